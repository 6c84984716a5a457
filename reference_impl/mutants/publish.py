"""Mutants of the family publish."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.under_contract import Reference


@mutant(caught_by="publish.finalize-before-rename")
class RenamesWhileTheWriterRuns(Reference):
    """Publishes in finalize without waiting for the background writer."""

    class checkpointer_class(Checkpointer):
        def finalize(self) -> None:
            pending, self.pending = self.pending, None
            if pending is not None:
                self.publish(pending.directory, pending.step)


@mutant(caught_by="publish.finalize-before-rename")
class WritesAMarkerAfterTheRename(Reference):
    """Adds a file to the checkpoint once it has its final name."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            super().publish(directory, step)
            if self.runtime.rank == 0:
                (self.root / published.final_name(step) / "DONE").write_text("done")
            dist.barrier()


@mutant(caught_by="publish.finalize-before-rename")
class BringsTheTemporaryDirectoryBack(Reference):
    """A rank that is late makes the temporary directory again, after it was renamed."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            super().publish(directory, step)
            os.makedirs(directory, exist_ok=True)


@mutant(caught_by="publish.published-is-whole")
class LeavesOutTheOptimizer(Reference):
    """Saves the model, and no optimizer state."""

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in super().checkpoint_tensors().items() if not name.startswith("optimizer.")}


@mutant(caught_by="publish.published-is-whole")
class LosesARanksShards(Reference):
    """Tidies up before the rename, and takes one rank's shards for rubbish."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            if self.runtime.rank == 0:
                for path in sorted(directory.rglob("*.distcp"))[-1:]:
                    path.unlink()
            super().publish(directory, step)


@mutant(caught_by="publish.published-is-whole")
class NeverPublishesTheLastSave(Reference):
    """Finalizes a save only when the next one begins."""

    def finalize(self) -> None:
        pass

    def close(self) -> None:
        self.checkpointer.pending = None
