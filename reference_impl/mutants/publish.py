"""Mutants of the family publish."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.runtime import PeerError
from reference_impl.under_contract import Reference


@mutant(caught_by="publish.finalize-before-rename")
class RenamesWhileTheWriterRuns(Reference):
    """Publishes in finalize without waiting for the background writer."""

    class checkpointer_class(Checkpointer):
        def finalize(self) -> None:
            pending, self.pending = self.pending, None
            if pending is not None:
                self.publish(pending.directory, pending.step)

        def check_shards(self, directory: Path) -> None:
            pass


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
        def check_shards(self, directory: Path) -> None:
            for path in sorted(directory.glob("*.distcp"))[-1:]:
                path.unlink()


@mutant(caught_by="publish.published-is-whole")
class NeverPublishesTheLastSave(Reference):
    """Finalizes a save only when the next one begins."""

    def finalize(self) -> None:
        pass

    def close(self) -> None:
        self.checkpointer.pending = None


@mutant(caught_by="publish.snapshot-is-isolated")
class WritesLiveTensorsBehindTraining(Reference):
    """Returns from an asynchronous save without a copy, and writes what the tensors hold by then."""

    class checkpointer_class(Checkpointer):
        def write_shards(self, directory: Path, tensors):
            if self.mode == "sync":
                return super().write_shards(directory, tensors)
            pool = ThreadPoolExecutor(1)
            written = pool.submit(dcp.save, tensors, checkpoint_id=directory, process_group=self.runtime.writers)
            pool.shutdown(wait=False)
            return written, DefaultStager(StagingOptions(False, False, False, False))


@mutant(caught_by="publish.one-step-per-checkpoint")
class WritesProgressWhenItPublishes(Reference):
    """Writes counters and scheduler when the shards have landed, which is steps later."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            self.companions = companions
            super().write_replicated(directory, companions)

        def publish(self, directory: Path, step: int) -> None:
            super().write_replicated(directory, self.companions)
            super().publish(directory, step)


@mutant(caught_by="publish.saves-do-not-overlap")
class ForgetsTheSaveInFlight(Reference):
    """Begins the next save at once; the one in flight is forgotten."""

    class checkpointer_class(Checkpointer):
        def save(self, step, tensors, companions) -> None:
            self.pending = None
            super().save(step, tensors, companions)

        def begin(self, step: int) -> Path | None:
            (directory := self.root / published.temporary_name(step)).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            return directory


@mutant(caught_by="publish.finalize-is-idempotent")
class FinalizesWithNothingInFlight(Reference):
    """Takes for granted in finalize that a save is in flight."""

    def finalize(self) -> None:
        assert self.checkpointer.mode == "sync" or self.checkpointer.pending is not None, "finalize without a save"
        super().finalize()


@mutant(caught_by="publish.finalize-is-idempotent")
class PointsAgainInEachFinalize(Reference):
    """Renews the pointer in every call of finalize, whether a save was in flight or not."""

    def finalize(self) -> None:
        super().finalize()
        newest = published.newest_whole(self.checkpointer.root)
        if self.runtime.rank == 0 and newest is not None:
            published.point(self.checkpointer.root, newest.name)
        dist.barrier()


@mutant(caught_by="publish.exit-after-save")
class LeavesTheLastSaveToNobody(Reference):
    """Treats the final save as any other, to be published by a call which never comes, and does not flush it at exit."""

    def save(self, *, final: bool = False) -> None:
        super().save(final=False)

    class checkpointer_class(Checkpointer):
        def flush_at_exit(self) -> None:
            pass


@mutant(caught_by="publish.background-failure-surfaces")
class LogsTheWritersError(Reference):
    """Prints the error of a background writer and goes on."""

    class checkpointer_class(Checkpointer):
        def finalize(self) -> None:
            try:
                super().finalize()
            except PeerError as error:
                if self.mode == "sync":
                    raise
                print(error)


@mutant(caught_by="publish.save-returns-early")
class WaitsInSave(Reference):
    """Is asked for asynchronous saves and completes each before it returns."""

    def save(self, *, final: bool = False) -> None:
        super().save(final=final)
        self.finalize()
