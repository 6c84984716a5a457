"""Mutants of the family retention."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch.distributed as dist

from reference_impl import published
from reference_impl.checkpoint import Checkpointer
from reference_impl.mutants.registry import mutant
from reference_impl.retention import read_metric
from reference_impl.runtime import on_rank_zero
from reference_impl.under_contract import Reference


def numbered(root: Path, pattern: str = "step_*") -> list[Path]:
    """Directories by the digits in their names, whatever else is in these."""
    found = [path for path in root.glob(pattern) if path.is_dir()]
    return sorted(found, key=lambda path: int("".join(filter(str.isdigit, path.name)) or -1))


@mutant(caught_by="retention.one-whole-always")
class PrunesBeforePublishing(Reference):
    """Makes room for the new checkpoint first, and then gives it its name."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            def remove_old() -> None:
                found = published.whole_checkpoints(self.root)
                for _, path in found[: max(0, len(found) - self.keep.latest + 1)]:
                    published.remove(path)

            on_rank_zero(self.runtime, "pruning", remove_old)
            super().publish(directory, step)


@mutant(caught_by="retention.one-whole-always")
class MovesThePointerToTheTemporaryName(Reference):
    """Points `latest` at the temporary directory when it is written, and renames that one afterwards."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            super().publish(directory, step)
            if self.runtime.rank == 0:
                published.point(self.root, directory.name)
            dist.barrier()


@mutant(caught_by="retention.incomplete-never-counts")
class CountsLeftovers(Reference):
    """Counts every directory with a step in its name, those of interrupted saves too, and never clears any."""

    class checkpointer_class(Checkpointer):
        def begin(self, step: int) -> Path | None:
            (directory := self.root / published.temporary_name(step)).mkdir(parents=True, exist_ok=True)
            dist.barrier()
            return directory

        def remove_old(self) -> None:
            for path in numbered(self.root, "*step_*")[: -self.keep.latest]:
                shutil.rmtree(path)


@mutant(caught_by="retention.foreign-names-untouched")
class RemovesWhateverLooksLikeAStep(Reference):
    """Takes every directory that begins with `step_` for a checkpoint of its own when it prunes."""

    class checkpointer_class(Checkpointer):
        def remove_old(self) -> None:
            keep = {path for _, path in published.whole_checkpoints(self.root)[-self.keep.latest :]}
            for path in self.root.glob("step_*"):
                if path.is_dir() and path not in keep:
                    shutil.rmtree(path)


@mutant(caught_by="retention.foreign-names-untouched")
class ReadsTheStepFromEveryName(Reference):
    """Takes the digits after `step_` for the step, and fails at a name that has none."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                return max(self.root.glob("step_*"), key=lambda path: int(path.name.split("_")[1].split(".")[0]), default=None)

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="retention.latest-kept")
class KeepsOneTooFew(Reference):
    """Does not count the checkpoint that was just published among those to keep."""

    class checkpointer_class(Checkpointer):
        def remove_old(self) -> None:
            found = published.whole_checkpoints(self.root)
            for _, path in found[: max(0, len(found) - max(1, self.keep.latest - 1))]:
                published.remove(path)


@mutant(caught_by="retention.steps-order-numerically")
class SortsNamesAsText(Reference):
    """Takes the last name in alphabetical order for the newest checkpoint: step_9, not step_10."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                return max(
                    (path for _, path in published.whole_checkpoints(self.root)), key=lambda path: path.name, default=None
                )

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="retention.steps-order-numerically")
class TakesTheLastModified(Reference):
    """Takes the directory that was modified last for the newest checkpoint."""

    class checkpointer_class(Checkpointer):
        def latest(self) -> Path | None:
            def look() -> Path | None:
                return max(
                    (path for _, path in published.whole_checkpoints(self.root)),
                    key=lambda path: path.stat().st_mtime,
                    default=None,
                )

            return on_rank_zero(self.runtime, "looking for a checkpoint", look)


@mutant(caught_by="retention.latest-and-best-kept")
class PrunesTheNewerOfEqualOnes(Reference):
    """Keeps the older of two checkpoints with equal metrics, where the pointer names the newer."""

    class checkpointer_class(Checkpointer):
        def remove_old(self) -> None:
            whole = published.whole_checkpoints(self.root)
            sign = 1 if self.keep.mode == "min" else -1
            by_metric = sorted(whole, key=lambda found: sign * read_metric(found[1], self.keep.metric))
            for found in whole:
                if found not in [*whole[-self.keep.latest :], *by_metric[: self.keep.best]]:
                    published.remove(found[1])


@mutant(caught_by="retention.latest-and-best-kept")
class PrunesTheBest(Reference):
    """Keeps the newest checkpoints, whatever their metric."""

    class checkpointer_class(Checkpointer):
        def remove_old(self) -> None:
            for _, path in published.whole_checkpoints(self.root)[: -self.keep.latest]:
                published.remove(path)


@mutant(caught_by="retention.latest-and-best-kept")
class KeepsThePointerToAnEqualOne(Reference):
    """Moves the pointer to the best only for a better metric, so of two equal checkpoints it goes on to name the older."""

    class checkpointer_class(Checkpointer):
        def publish(self, directory: Path, step: int) -> None:
            best = self.root / published.BEST
            before = best.resolve() if best.exists() else None
            super().publish(directory, step)
            if self.runtime.rank == 0 and before is not None:
                metrics = [read_metric(path, self.keep.metric) for path in (before, best.resolve())]
                if metrics[0] == metrics[1]:
                    published.point(self.root, before.name, pointer=published.BEST)
            dist.barrier()
