"""Good neighbours that save in other ways: correct, unusual, and not to be called broken."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from contracts.implementation import Capability
from reference_impl import published
from reference_impl.checkpoint import SHARDS, Checkpointer
from reference_impl.mutants.registry import neighbour
from reference_impl.runtime import everywhere, on_rank_zero
from reference_impl.trainer import PROGRESS
from reference_impl.under_contract import Reference


@neighbour
class PublishesInTwoPhases(Reference):
    """Gives a finished checkpoint a name that says it is ready, and its final one when every rank has seen it there."""

    layout = replace(Reference.layout, temporary=r"(tmp|ready)_step_\d+")

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            ready = directory.with_name(f"ready_step_{step}")

            def rename() -> None:
                if ready.exists():
                    published.remove(ready)
                directory.rename(ready)

            on_rank_zero(self.runtime, f"making step {step} ready", rename)
            everywhere(self.runtime, f"looking at step {step}", (ready / SHARDS).stat)
            super().publish(ready, step)


@neighbour
class OpensItsShardsAtOnce(Reference):
    """Makes each rank's shard file before it returns from `save`, and fills it behind training."""

    class checkpointer_class(Checkpointer):
        def write_shards(self, directory: Path, tensors: dict[str, torch.Tensor]):
            def make() -> None:
                directory.mkdir(exist_ok=True)
                (directory / f"__{self.runtime.rank}_0.distcp").touch()

            everywhere(self.runtime, "making shards", make)
            return super().write_shards(directory, tensors)


@neighbour
class RenamesItsCompanions(Reference):
    """Writes each replicated file under another name first, and then gives it its own."""

    class checkpointer_class(Checkpointer):
        def write_replicated(self, directory: Path, companions: Callable[[Path], None]) -> None:
            def write_beside(path: Path) -> None:
                beside = path / "beside"
                beside.mkdir()
                companions(beside)
                for file in [file for file in beside.rglob("*") if file.is_file()]:
                    target = path / file.relative_to(beside)
                    target.parent.mkdir(exist_ok=True)
                    os.replace(file, target)
                for folder in (*beside.iterdir(), beside):
                    folder.rmdir()

            super().write_replicated(directory, write_beside)


@neighbour
class PointsWithAFile(Reference):
    """Keeps its pointers as text files that hold a name, written beside and renamed."""

    class checkpointer_class(Checkpointer):
        def point(self, name: str, pointer: str) -> None:
            beside = self.root / f"{pointer}.part"
            beside.write_text(f"{name}\n")
            published.flush(beside)
            os.replace(beside, self.root / pointer)
            published.flush(self.root)


@neighbour
class PrunesBeforeItReturns(Reference):
    """Removes old checkpoints before `save` or `finalize` returns, and raises where it cannot."""

    class checkpointer_class(Checkpointer):
        def prune(self) -> None:
            on_rank_zero(self.runtime, "removing old checkpoints", self.remove_old)


@neighbour
class SavesBesideLeftovers(Reference):
    """Leaves what an interrupted save has left where it is, and gives each save a directory of its own."""

    layout = replace(Reference.layout, temporary=r"tmp_step_\d+-[0-9a-f]+")

    class checkpointer_class(Checkpointer):
        def begin(self, step: int) -> Path | None:
            def prepare() -> Path | None:
                published.make_directory(self.root)
                if not published.why_not_whole(self.root / published.final_name(step)):
                    return None
                directory = self.root / f"{published.temporary_name(step)}-{uuid.uuid4().hex}"
                directory.mkdir()
                return directory

            return on_rank_zero(self.runtime, "preparing", prepare)


@neighbour
class RefusesADamagedCheckpoint(Reference):
    """Refuses to start on a newest checkpoint that is damaged, by the name of the file, and takes no older one for it."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                names = [path for path in self.root.glob("step_*") if path.name[5:].isdigit()]
                newest = max(names, key=lambda path: int(path.name[5:]), default=None)
                if newest is not None and (wrong := published.why_not_whole(newest, verify=True)):
                    raise ValueError(f"{newest} is damaged: {wrong}; remove it to go on from the one before")
                return newest

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@neighbour
class VerifiesOnlyWhatItLoads(Reference):
    """Verifies the files that a resume reads; a damaged tokenizer is left to whoever evaluates. It claims no integrity."""

    capabilities = Reference.capabilities - {Capability.INTEGRITY}

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                names = [path for path in self.root.glob("step_*") if path.name[5:].isdigit()]
                for path in sorted(names, key=lambda path: int(path.name[5:]), reverse=True):
                    with contextlib.suppress(OSError, ValueError, KeyError):
                        sizes = json.loads((path / published.MANIFEST).read_text())["files"]
                        loaded = [name for name in sizes if name.startswith(SHARDS) or name in (PROGRESS, "tokenization.json")]
                        if loaded and all((path / name).stat().st_size == sizes[name] for name in loaded):
                            return path
                return None

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)
