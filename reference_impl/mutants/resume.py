"""Mutants of the family resume."""

from __future__ import annotations

from pathlib import Path

from reference_impl.mutants.registry import mutant
from reference_impl.under_contract import Reference


@mutant(caught_by="resume.trajectory")
class ForgetsTheDataPosition(Reference):
    """Restores every tensor and starts the data from its beginning."""

    def load_progress(self, path: Path) -> None:
        super().load_progress(path)
        self.batches.consumed = 0


@mutant(caught_by="resume.trajectory")
class KeepsTheFreshWeights(Reference):
    """Restores the optimizer and leaves the model as it was built."""

    def load_model(self, path: Path) -> None:
        pass


@mutant(caught_by="resume.trajectory")
class ForgetsTheScheduler(Reference):
    """Never loads the scheduler: the first rate is right, for the optimizer's groups hold it, and the next are not."""

    def load_scheduler(self, path: Path) -> None:
        pass
