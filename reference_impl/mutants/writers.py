"""Mutants of the family writers."""

from __future__ import annotations

import threading
from pathlib import Path

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
