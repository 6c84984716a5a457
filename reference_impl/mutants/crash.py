"""Mutants of the family crash."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path

import torch.distributed as dist

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.runtime import PeerError, on_rank_zero
from reference_impl.under_contract import Reference


class NewestByName(Checkpointer):
    """Takes the newest name for the newest checkpoint, whatever is in it."""

    def latest(self) -> Path | None:
        def look() -> Path | None:
            names = [path for path in self.root.glob("step_*") if path.name[5:].isdigit()]
            return max(names, key=lambda path: int(path.name[5:]), default=None)

        return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="crash.every-crash-point")
class TrustsThePointer(Reference):
    """Resumes what `latest` names; a crash between the rename and the pointer loses the newest checkpoint."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            path = self.root / published.POINTER
            return on_rank_zero(self.runtime, "reading the pointer", lambda: path.resolve() if path.exists() else None)


@mutant(caught_by="crash.every-crash-point")
class SavesUnderTheFinalName(Reference):
    """Writes straight into the directory with the final name, and takes the newest name on resume."""

    class checkpointer_class(NewestByName):
        def begin(self, step: int) -> Path | None:
            def prepare() -> Path:
                (directory := self.root / published.final_name(step)).mkdir(exist_ok=True)
                return directory

            return on_rank_zero(self.runtime, "preparing", prepare)


@mutant(caught_by="crash.every-crash-point")
class RemovesThePointerFirst(Reference):
    """Resumes by the pointer, and takes it away before it makes the new one."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            def rename() -> None:
                pointer, final = self.root / published.POINTER, self.root / published.final_name(step)
                published.seal(directory)
                pointer.unlink(missing_ok=True)
                os.rename(directory, final)
                pointer.symlink_to(final.name)

            on_rank_zero(self.runtime, "publishing", rename)

        def latest(self) -> Path | None:
            path = self.root / published.POINTER
            return on_rank_zero(self.runtime, "reading the pointer", lambda: path.resolve() if path.exists() else None)


@mutant(caught_by="crash.power-loss")
class LeavesFlushingToDCP(Reference):
    """Relies on DCP, which flushes its own files, and flushes neither the manifest nor the tokenizer."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            def rename() -> None:
                published.write_manifest(directory)
                for path in (directory / "tokenizer", directory / "dcp", directory):
                    published.flush(path)
                os.rename(directory, self.root / published.final_name(step))
                published.point(self.root, published.final_name(step))

            on_rank_zero(self.runtime, "publishing", rename)


@mutant(caught_by="crash.power-loss")
class NeverFlushesTheName(Reference):
    """Flushes every file of a checkpoint and not the directory in which it gets its name."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            def rename() -> None:
                published.seal(directory)
                os.rename(directory, self.root / published.final_name(step))

            on_rank_zero(self.runtime, "publishing", rename)


@mutant(caught_by="crash.power-loss")
class FlushesAfterTheRename(Reference):
    """Flushes a checkpoint once it has its name, and takes the newest name on resume."""

    class checkpointer_class(NewestByName):
        def publish(self, directory: Path, step: int) -> None:
            def rename() -> None:
                final = self.root / published.final_name(step)
                published.write_manifest(directory)
                os.rename(directory, final)
                published.flush_tree(final)
                published.point(self.root, final.name)

            on_rank_zero(self.runtime, "publishing", rename)


@mutant(caught_by="crash.every-crash-point")
class WritesThePointerInPlace(Reference):
    """Overwrites a text file that names the newest checkpoint, and resumes from what it names."""

    class checkpointer_class(Checkpointer):
        def point(self, name: str, pointer: str) -> None:
            (self.root / pointer).write_text(name)
            published.flush(self.root / pointer)
            published.flush(self.root)

        def latest(self) -> Path | None:
            def look() -> Path | None:
                pointer = self.root / published.POINTER
                return self.root / pointer.read_text() if pointer.exists() else None

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="crash.stale-leftovers")
class SavesIntoLeftovers(Reference):
    """Uses the temporary directory of an interrupted save again, with what is in it."""

    class checkpointer_class(Checkpointer):
        def begin(self, step: int) -> Path | None:
            def prepare() -> Path:
                (directory := self.root / published.temporary_name(step)).mkdir(parents=True, exist_ok=True)
                return directory

            return on_rank_zero(self.runtime, "preparing", prepare)


@mutant(caught_by="crash.stale-leftovers")
class RefusesToSaveOverLeftovers(Reference):
    """Makes the temporary directory and fails where an interrupted save has left one."""

    class checkpointer_class(Checkpointer):
        def begin(self, step: int) -> Path | None:
            directory = self.root / published.temporary_name(step)
            return on_rank_zero(self.runtime, "preparing", lambda: directory.mkdir(parents=True) or directory)


@mutant(caught_by="crash.torn-file")
class NeverLooksAtSizes(Reference):
    """Resumes the newest checkpoint by its name."""

    checkpointer_class = NewestByName


@mutant(caught_by="crash.torn-file")
class CountsFilesAndNotBytes(Reference):
    """Takes a checkpoint for whole when every file of its manifest is there."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                for path in sorted(self.root.glob("step_*"), key=lambda path: int(path.name[5:]), reverse=True):
                    with contextlib.suppress(OSError, ValueError):
                        names = published.json.loads((path / published.MANIFEST).read_text())["files"]
                        if all((path / name).exists() for name in names):
                            return path
                return None

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="crash.bit-flip")
class ComparesSizesOnly(Reference):
    """Claims integrity, and compares the files' sizes with the manifest's."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                found = published.whole_checkpoints(self.root)
                return found[-1][1] if found else None

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="crash.disk-full")
class SwallowsAFailedSave(Reference):
    """Takes a save that cannot be written for bad luck, and trains on without a word."""

    class checkpointer_class(Checkpointer):
        def save(self, step, tensors, companions) -> None:
            with contextlib.suppress(PeerError):
                super().save(step, tensors, companions)

        def finalize(self) -> None:
            with contextlib.suppress(PeerError):
                super().finalize()


@mutant(caught_by="crash.disk-full")
class MakesRoomFirst(Reference):
    """Removes the checkpoints there are before it writes the next one."""

    class checkpointer_class(Checkpointer):
        def begin(self, step: int) -> Path | None:
            if self.runtime.rank == 0:
                for path in self.root.glob("step_*"):
                    shutil.rmtree(path)
            dist.barrier()
            return super().begin(step)
