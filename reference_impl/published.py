"""Which checkpoints stand in a directory: names, wholeness, and the pointers to the newest and the best.

output_dir/
  step_10/            whole: manifest.json lists every file, its size and its SHA-256
  tmp_step_20/        a save that is not finished; never read
  latest -> step_10   for people and tools; :func:`newest_whole` does not depend on it
  best -> step_5      where checkpoints are kept for their metric
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
POINTER = "latest"
BEST = "best"


def final_name(step: int) -> str:
    return f"step_{step}"


def temporary_name(step: int) -> str:
    return f"tmp_step_{step}"


def whole_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """(step, directory) of every whole checkpoint, oldest first, in numeric order. Other names are never looked into."""
    found = []
    for path in _entries(root):
        step = _step(path.name, "step_")
        if step is not None and not path.is_symlink() and not why_not_whole(path):
            found.append((step, path))
    return sorted(found)


def newest_whole(root: Path) -> Path | None:
    """The whole checkpoint with the highest step, or None. Says on stderr what it passed over, and why.

    A crash can fall between a rename and the pointer's update, so the directories decide, not the pointer.
    """
    found = [
        (step, path) for path in _entries(root) if (step := _step(path.name, "step_")) is not None and not path.is_symlink()
    ]
    for path in leftovers(root):
        print(f"passing over {path}: a save or a removal that was not finished", file=sys.stderr, flush=True)
    return first_sound(path for _, path in sorted(found, reverse=True))


def first_sound(paths: Iterable[Path]) -> Path | None:
    """The first of these checkpoints that is whole, its bytes verified. Says on stderr what it passed over, and why."""
    for path in paths:
        wrong = why_not_whole(path, verify=True)
        if wrong is None:
            return path
        print(f"passing over {path}: {wrong}", file=sys.stderr, flush=True)
    return None


def why_not_whole(directory: Path, *, verify: bool = False) -> str | None:
    """What is wrong with a checkpoint directory, or None if its manifest's files are all there in full size.

    ``verify`` reads every byte and compares checksums; a manifest of an older version that has none passes.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, size in manifest["files"].items():
            seen = (directory / name).stat().st_size
            if seen != size:
                return f"{directory / name} has {seen} bytes, its manifest says {size}"
        for name, digest in manifest.get("sha256", {}).items() if verify else ():
            if checksum(directory / name) != digest:
                return f"{directory / name} does not have the bytes that were written"
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{directory / MANIFEST} is not a manifest: {error}"
    return None


def seal(directory: Path) -> None:
    """Write the manifest, last of all files, and flush them and their folders to storage."""
    write_manifest(directory)
    flush_tree(directory)


def write_manifest(directory: Path) -> None:
    """List every file, its size and its checksum."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST)
    sizes = {str(path.relative_to(directory)): path.stat().st_size for path in files}
    digests = {str(path.relative_to(directory)): checksum(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps({"files": sizes, "sha256": digests}, indent=1))


def flush_tree(directory: Path) -> None:
    """Flush every file of a tree, and every folder, whose names are flushed with it alone."""
    below = sorted(directory.rglob("*"))
    for path in (*(path for path in below if path.is_file()), *(path for path in below if path.is_dir()), directory):
        flush(path)


def make_directory(directory: Path) -> None:
    """Make a directory and those above it that are missing; their names survive a power loss, as what will be in them does."""
    if not directory.is_dir():
        make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        flush(directory.parent)


def point(root: Path, name: str, *, pointer: str = POINTER) -> None:
    """Make ``pointer`` a link to ``name`` in one atomic step."""
    beside = root / f".{pointer}.new"
    beside.unlink(missing_ok=True)
    beside.symlink_to(name)
    os.replace(beside, root / pointer)
    flush(root)


def remove(directory: Path) -> None:
    """Delete a checkpoint so that no half of it ever has a checkpoint's name."""
    doomed = directory.with_name(f"deleting_{directory.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    directory.rename(doomed)
    shutil.rmtree(doomed)


def remove_or_say(directory: Path) -> None:
    """Delete a checkpoint, or what was left of one; where that fails, say so on stderr. The next save tries again."""
    try:
        shutil.rmtree(directory) if directory in leftovers(directory.parent) else remove(directory)
    except OSError as error:
        print(f"could not remove {directory}, which takes room until it is gone: {error}", file=sys.stderr, flush=True)


def leftovers(root: Path) -> list[Path]:
    """What interrupted saves and deletions left behind: this module's own temporary names and nothing else."""
    prefixes = ("tmp_step_", "deleting_step_")
    return [path for path in _entries(root) if any(_step(path.name, prefix) is not None for prefix in prefixes)]


def checksum(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _entries(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []


def _step(name: str, prefix: str) -> int | None:
    """The step in a name such as step_10; None for step_010, step_10.backup or step_abc, which are somebody else's."""
    match = re.fullmatch(re.escape(prefix) + r"(0|[1-9][0-9]*)", name)
    return int(match[1]) if match else None
