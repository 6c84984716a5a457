import pocket_checkpoints

from contracts import Capability, CheckpointerOnly, Layout, contract_tests


class PocketCheckpoints(CheckpointerOnly):
    """One safetensors file per checkpoint, gathered on rank 0."""

    capabilities = frozenset({Capability.TRAIN, Capability.RESUME, Capability.SCHEDULER, Capability.PUBLISH})
    layout = Layout(published=r"ckpt-(?P<step>\d+)", temporary=r"writing-\d+")

    def save(self, *, final=False):
        pocket_checkpoints.save(self.place.root, self.step, self.model, self.optimizer, self.scheduler)

    def resume(self):
        self.step = pocket_checkpoints.load_latest(self.place.root, self.model, self.optimizer, self.scheduler)


test_checkpoint_contracts = contract_tests(
    PocketCheckpoints,
    contracts=(
        *("keys.*", "order.*-optimizer", "precision.moments-*", "publish.finalize-before-*", "publish.published-*"),
        *("resume.trajectory", "writers.replicated-*", "writers.visible-*"),
    ),
    known={"order.scheduler-after-optimizer": "https://example.org/pocket-checkpoints/issues/12"},
)
