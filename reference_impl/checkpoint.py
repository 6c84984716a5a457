"""Saving: shards by every rank, replicated files by rank 0, then one rename once everything is written.

    checkpointer.save(step, tensors, companions)   # sync: published on return; thread, process: written behind training
    checkpointer.finalize()                        # completes a save in flight and publishes it; else does nothing

Each step is a method of its own and entered by every rank. The backend is DCP; what "published" means is in
:mod:`reference_impl.published`.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from reference_impl import published
from reference_impl.retention import Retention
from reference_impl.runtime import PeerError, Runtime, all_true, everywhere, on_rank_zero

SHARDS = "dcp"
"""The folder inside a checkpoint that DCP owns."""

EXIT_DEADLINE = timedelta(seconds=10)
"""How long a rank that ends with a save in flight waits for the others to end too."""


@dataclass(frozen=True)
class Pending:
    """A save whose shards are still being written behind training."""

    step: int
    directory: Path
    written: Future[object]
    stager: DefaultStager


class Checkpointer:
    """Checkpoints of one run under ``root``, at most one save in flight.

    ``mode``: ``sync`` writes in ``save``; ``thread`` and ``process`` copy the tensors in ``save`` and write the copy from
    a background thread, or from a daemon process that DCP starts at the first save (some seconds) and keeps. The process
    mode needs a ``__main__`` that can be imported again.
    """

    def __init__(self, root: str | Path, runtime: Runtime, *, mode: str = "sync", keep: Retention | None = None) -> None:
        self.root, self.runtime, self.mode, self.keep = Path(root), runtime, mode, keep or Retention()
        self.pending: Pending | None = None
        self.removing: threading.Thread | None = None

    def latest(self) -> Path | None:
        """The newest whole checkpoint as rank 0 sees it, the same answer on every rank."""
        return on_rank_zero(self.runtime, "looking for a checkpoint", lambda: published.newest_whole(self.root))

    def best(self) -> Path | None:
        """The whole checkpoint with the best metric as rank 0 sees it, the same answer on every rank."""

        def look() -> Path | None:
            return published.first_sound(path for _, path in self.keep.ranked(published.whole_checkpoints(self.root)))

        return on_rank_zero(self.runtime, "looking for the best checkpoint", look)

    def save(self, step: int, tensors: dict[str, torch.Tensor], companions: Callable[[Path], None]) -> None:
        """Save ``tensors`` (DTensors, or plain tensors that are equal on all ranks or named per rank) as ``step_N``.

        ``companions(directory)`` writes the replicated files; rank 0 alone calls it. On return the tensors may be
        overwritten and the replicated files are complete. A save in flight is finalized first, and its failure is
        raised here; a step that is already published whole is left as it is.
        """
        self.finalize()
        directory = self.begin(step)
        if directory is None:
            return
        try:
            written, stager = self.write_shards(directory / SHARDS, tensors)
        except PeerError:
            self.discard(directory)
            raise
        try:
            self.write_replicated(directory, companions)
        except PeerError:
            wait([written])  # Nothing may write into a directory that is being removed.
            stager.close()
            self.discard(directory)
            raise
        self.pending = Pending(step, directory, written, stager)
        atexit.register(self.flush_at_exit)
        if self.mode == "sync":
            self.finalize()

    def finalize(self) -> None:
        """Wait for a save in flight on every rank and publish it; rank 0 then removes old ones behind training.

        A no-op when nothing is in flight. Raises :class:`~reference_impl.runtime.PeerError` on every rank when any writer
        failed; nothing is published then.
        """
        if self.complete():
            self.prune()

    def complete(self) -> bool:
        """Publish what is in flight; whether anything was."""
        pending, self.pending = self.pending, None
        if pending is None:
            return False
        atexit.unregister(self.flush_at_exit)
        try:
            everywhere(self.runtime, f"writing the checkpoint of step {pending.step}", pending.written.result)
            self.publish(pending.directory, pending.step)
        except PeerError:
            self.end_writer()  # Another save starts another: this one may be dead, or left alone by a peer's that is.
            self.discard(pending.directory)
            raise
        finally:
            pending.stager.close()
        return True

    def flush_at_exit(self) -> None:
        """Publish a save that is still in flight when the interpreter ends; where that cannot be, say so and exit with 1."""
        assert self.pending is not None
        try:
            if (error := getattr(sys, "last_value", None)) is not None:
                raise error  # This rank failed, and its peers may be anywhere.
            dist.monitored_barrier(self.runtime.control, timeout=EXIT_DEADLINE)
            if self.complete() and self.runtime.rank == 0:
                self.remove_old()  # An interpreter that ends starts no thread.
        except BaseException as error:
            print(f"rank {self.runtime.rank} ended before the save was published: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    def poll(self) -> None:
        """Finalize if every rank has finished writing; cheap enough to call once per training step."""
        if self.pending is not None and all_true(self.runtime, self.pending.written.done()):
            self.finalize()

    def close(self) -> None:
        """Finalize, wait for what is being removed, and end the writer process, which else outlives its rank by a moment."""
        self.finalize()
        self.settle()
        self.end_writer()

    def end_writer(self) -> None:
        """End the daemon that DCP keeps in process mode; it offers no other way."""
        if self.mode == "process":
            _async_process_executor._CHECKPOINT_PROCESS = None

    def begin(self, step: int) -> Path | None:
        """Rank 0 makes the temporary directory and clears leftovers. None if ``step`` is already published whole."""

        def prepare() -> Path | None:
            self.settle()
            published.make_directory(self.root)
            final, directory = self.root / published.final_name(step), self.root / published.temporary_name(step)
            if final.exists():
                if not published.why_not_whole(final):
                    return None
                published.remove(final)
            for path in published.leftovers(self.root):
                if path != directory:
                    published.remove_or_say(path)
            if directory.exists():
                shutil.rmtree(directory)
            directory.mkdir()
            return directory

        return on_rank_zero(self.runtime, f"preparing the checkpoint of step {step}", prepare)

    def write_shards(self, directory: Path, tensors: dict[str, torch.Tensor]) -> tuple[Future[object], DefaultStager]:
        """Every rank writes its shards with DCP; the future completes when this rank's are on disk and the metadata too."""
        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=self.mode == "process",
                use_async_staging=False,  # The copy must be complete when save returns.
                use_non_blocking_copy=False,
            )
        )
        kind = AsyncCheckpointerType.PROCESS if self.mode == "process" else AsyncCheckpointerType.THREAD

        def write() -> Future[object]:
            if self.mode == "sync":
                done: Future[object] = Future()
                done.set_result(dcp.save(tensors, checkpoint_id=directory, process_group=self.runtime.writers))
                return done
            response = dcp.async_save(
                tensors,
                checkpoint_id=directory,
                process_group=self.runtime.writers,
                async_checkpointer_type=kind,
                async_stager=stager,
            )
            return response.upload_completion if isinstance(response, AsyncSaveResponse) else response

        return everywhere(self.runtime, f"writing shards to {directory}", write), stager

    def write_replicated(self, directory: Path, companions: Callable[[Path], None]) -> None:
        """Rank 0 writes what every rank has alike; every rank returns once it is complete."""
        on_rank_zero(self.runtime, f"writing tokenizer and configuration to {directory}", lambda: companions(directory))

    def publish(self, directory: Path, step: int) -> None:
        """Rank 0 seals the finished directory, gives it its final name, and moves the pointers, in this order."""

        def rename() -> None:
            final = self.root / published.final_name(step)
            self.check_shards(directory / SHARDS)
            published.seal(directory)
            os.rename(directory, final)
            published.flush(self.root)
            self.point(final.name, published.POINTER)
            if self.keep.best and (found := self.keep.ranked(published.whole_checkpoints(self.root))):
                self.point(found[0][1].name, published.BEST)

        on_rank_zero(self.runtime, f"publishing step {step}", rename)

    def point(self, name: str, pointer: str) -> None:
        """Rank 0 has ``pointer`` name a published checkpoint."""
        published.point(self.root, name, pointer=pointer)

    def check_shards(self, directory: Path) -> None:
        """Raise ``OSError`` unless every file is there that DCP says it has written: somebody may have removed one since."""
        stored = dcp.FileSystemReader(directory).read_metadata().storage_data
        for name in sorted({info.relative_path for info in stored.values()}):
            (directory / name).stat()

    def prune(self) -> None:
        """Rank 0 begins to remove old checkpoints in a thread: on a large file system that takes longer than a step."""
        if self.runtime.rank == 0:
            self.settle()
            self.removing = threading.Thread(target=self.remove_old, name="remove old checkpoints")
            self.removing.start()

    def settle(self) -> None:
        """Wait until what is being removed is gone. The next save does so first, and ranks other than 0 remove nothing."""
        removing, self.removing = self.removing, None
        if removing is not None:
            removing.join()

    def remove_old(self) -> None:
        """Remove the whole checkpoints that ``keep`` does not name; what is not whole neither counts nor goes."""
        whole = published.whole_checkpoints(self.root)
        kept = self.keep.kept(whole)
        for found in whole:
            if found not in kept:
                published.remove_or_say(found[1])

    def discard(self, directory: Path) -> None:
        """Rank 0 removes what a failed save left, so that a full disk is not filled further."""
        on_rank_zero(self.runtime, f"removing {directory}", lambda: shutil.rmtree(directory, ignore_errors=True))
