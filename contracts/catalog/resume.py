"""An interrupted run continues the uninterrupted one."""

from __future__ import annotations

from contracts.judging import Check, contract
from contracts.history import History, MissingEvidence, first_difference
from contracts.implementation import Capability
from contracts.strategies import INTERRUPTED_RUNS


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def trajectory(history: History, check: Check) -> None:
    """State at the boundary is exact, and loss, parameters and moments of the next three steps are the uninterrupted ones.

    The oracle is the continuation of the very run that wrote the checkpoint. A first loss that agrees proves little:
    it is computed before the restored optimizer has acted. Divergence counts only where a twin run from the same seed
    agrees with the first bit for bit; otherwise nothing can be said.

    Seen: flashoptim#3, KempnerForge#115, speculators#1049.
    """
    for saved, resumed in history.resumes():
        if saved.failure is not None:
            continue  # What a broken save left cannot be resumed; that is no evidence about resuming.
        check(resumed.failure is None, f"the resumed generation failed: {resumed.failure}")
        boundary, restored = saved.snapshot("saving"), resumed.snapshot("resumed")
        check(restored.step == boundary.step, f"resumed at step {restored.step}, saved at step {boundary.step}")
        check.same(boundary.everything(), restored.everything(), f"state at step {boundary.step}")
        if saved.case.ranks != resumed.case.ranks:
            continue
        _require_twin(history, saved)
        for after in resumed.snapshots("trained"):
            check.same(saved.snapshot("trained", after.step).everything(), after.everything(), f"after step {after.step}")
        losses = {event.step: event.loss for event in saved.of("trained", rank=0)}
        for event in resumed.of("trained", rank=0):
            check(event.loss == losses[event.step], f"loss of step {event.step} is {event.loss!r}, uninterrupted {losses[event.step]!r}")


def _require_twin(history: History, saved) -> None:
    twins = [run[0] for root, run in history.runs.items() if root == "twin" and run[0].case.ranks == saved.case.ranks]
    if not twins:
        raise MissingEvidence("no twin run from the same seed, so a divergence could not be judged")
    for one, other in zip(saved.snapshots("trained"), twins[0].snapshots("trained"), strict=False):
        if difference := first_difference(one.everything(), other.everything()):
            raise MissingEvidence(f"cannot judge: two fault-free runs differ after step {one.step}: {difference}")
