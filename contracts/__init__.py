"""Contracts that FSDP fine-tuning and checkpointing stacks owe their users, run in real torchrun worlds.

Put a stack under contract by describing it once, and let pytest judge it:

    # test_contracts.py
    import torch.distributed.checkpoint as dcp
    from contracts import Capability, CheckpointerOnly, Layout, contract_tests

    class OurCheckpointer(CheckpointerOnly):
        '''Our checkpointer on the suite's plain FSDP2 trainer.'''

        capabilities = {Capability.TRAIN, Capability.RESUME}
        layout = Layout(published=r"ckpt-(?P<step>\\d+)")

        def save(self, *, final=False):
            our_package.save(self.model, self.optimizer, step=self.step, directory=self.place.root)

        def resume(self):
            self.step = our_package.load_latest(self.model, self.optimizer, directory=self.place.root)

    test_checkpoint_contracts = contract_tests(
        OurCheckpointer, known={"precision.moments-survive-resume": "https://example.org/issues/12"}
    )

`fsdp-contracts run test_contracts:OurCheckpointer` judges the same class from the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from contracts.case import Case, Generation
    from contracts.history import Event, History, Shard, Snapshot, State
    from contracts.implementation import Capability, Implementation, KeyMapping, Layout, Place
    from contracts.judging import Check, Contract, contract
    from contracts.pytest_plugin import contract_tests
    from contracts.suite import Suite, Verdict
    from contracts.torchrun import Launch, LaunchError, launch
    from contracts.trainer import CheckpointerOnly

_HOME = {
    "Case": "case", "Generation": "case", "Check": "judging", "Contract": "judging", "contract": "judging",
    "Event": "history", "History": "history", "Shard": "history", "Snapshot": "history", "State": "history",
    "Capability": "implementation", "Implementation": "implementation", "KeyMapping": "implementation",
    "Layout": "implementation", "Place": "implementation", "contract_tests": "pytest_plugin", "Suite": "suite",
    "Verdict": "suite", "Launch": "torchrun", "LaunchError": "torchrun", "launch": "torchrun", "CheckpointerOnly": "trainer",
}  # fmt: skip

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    # Imported on first use: a rank or a stack's own environment needs neither pytest nor Hypothesis.
    if name not in _HOME:
        raise AttributeError(f"module 'contracts' has no attribute {name!r}")
    return getattr(importlib.import_module(f"contracts.{_HOME[name]}"), name)
