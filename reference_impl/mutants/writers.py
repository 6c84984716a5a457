"""Mutants of the family writers."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import Future
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.under_contract import Reference


@mutant(caught_by="writers.replicated-files-rank-0")
class EveryRankWritesTheTokenizer(Reference):
    """Forgets the rank guard around tokenizer and configuration."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            companions(directory)
            super().write_replicated(directory, lambda path: None)


@mutant(caught_by="writers.replicated-files-rank-0")
class TheLastRankWritesTheTokenizer(Reference):
    """Guards the replicated files with the wrong rank."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            if self.runtime.rank == self.runtime.world - 1:
                companions(directory)
            super().write_replicated(directory, lambda path: None)


@mutant(caught_by="writers.visible-on-return")
class ReturnsBeforeTheTokenizerIsWritten(Reference):
    """Lets rank 0 write the replicated files in the background, and no rank waits for it."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            if self.runtime.rank == 0:
                self.background = threading.Thread(target=companions, args=(directory,))
                self.background.start()

        def publish(self, directory: Path, step: int) -> None:
            if self.mode != "sync" and self.runtime.rank == 0:
                self.background.join()
            super().publish(directory, step)


@mutant(caught_by="writers.visible-on-return")
class NoBarrierAfterTheTokenizer(Reference):
    """Rank 0 writes the replicated files inside its guard; the other ranks do not wait for it."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            if self.runtime.rank == 0:
                companions(directory)


@mutant(caught_by="writers.one-writer-per-path")
class EveryRankWritesTheReport(Reference):
    """Lets every rank write a report of the save, under one name."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            super().write_replicated(directory, companions)
            (directory / "report.txt").write_text("saved")
            dist.barrier()


@mutant(caught_by="writers.collectives-on-every-rank")
class SavesOnRankZeroAlone(Reference):
    """Guards the sharded save with a rank, as if it were a small file: rank 0's shards are all that lands."""

    class checkpointer_class(Checkpointer):
        def write_shards(self, directory: Path, tensors):
            if self.runtime.rank == 0:
                dcp.save(tensors, checkpoint_id=directory, no_dist=True)
            dist.barrier()
            (done := Future()).set_result(None)
            return done, DefaultStager(StagingOptions(False, False, False, False))


@mutant(caught_by="writers.collectives-on-every-rank")
class GuardsACollective(Reference):
    """Puts a collective behind `if rank == 0`, which waits for ranks that never come."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            if self.runtime.rank == 0:
                companions(directory)
                dist.barrier(group=self.runtime.control)


@mutant(caught_by="writers.failure-reaches-everyone")
class KeepsItsFailureToItself(Reference):
    """Raises at once where a shard cannot be written, and the peers wait for that rank in a collective."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions) -> None:
            if self.runtime.rank == 0:
                companions(directory)
            dist.barrier(group=self.runtime.control)

        def write_shards(self, directory: Path, tensors):
            (directory / f"rank_{self.runtime.rank}.pt").parent.mkdir(exist_ok=True)
            (directory / f"rank_{self.runtime.rank}.pt").write_bytes(b"its part")
            return super().write_shards(directory, tensors)


@mutant(caught_by="writers.failure-reaches-everyone")
class KeepsItsWritersDeathToItself(Reference):
    """Shares what its writer could not do, but raises at once where the writer's process is dead."""

    class checkpointer_class(Checkpointer):
        def complete(self) -> bool:
            failure = self.pending and self.pending.written.exception()
            if "process is dead" in str(failure):
                raise failure
            return super().complete()


@mutant(caught_by="writers.one-publisher")
class EveryRankRenames(Reference):
    """Lets every rank give the checkpoint its name; whoever comes late looks away."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            if self.runtime.rank == 0:
                published.seal(directory)
            dist.barrier()
            with contextlib.suppress(FileNotFoundError):
                os.rename(directory, self.root / published.final_name(step))
            dist.barrier()
            if self.runtime.rank == 0:
                published.point(self.root, published.final_name(step))
            dist.barrier()


@mutant(caught_by="writers.no-local-view-branching")
class EveryRankLooksForItself(Reference):
    """Lets each rank choose the newest checkpoint that it sees."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            return published.newest_whole(self.root)
