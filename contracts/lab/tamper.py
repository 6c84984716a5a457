"""What happens to a run's directory between two generations: damage, foreign names, litter."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from contracts.case import Tamper
from contracts.implementation import Layout

LITTER = "left-over.bin"


def apply(tamper: Tamper, root: Path, layout: Layout) -> dict[str, Any]:
    """Do to `root` what `tamper` says.

    Returns:
        `{"how", "checkpoint", "paths"}`: the newest published checkpoint then, or None, and what was changed or added,
        both relative to the root. No paths where there was nothing to do it to.
    """
    found = published(root, layout)
    newest = found[-1] if found else None
    paths = _do(tamper, newest, found, root, layout)
    return {"how": tamper.how, "checkpoint": newest and newest.name, "paths": [str(path.relative_to(root)) for path in paths]}


def published(root: Path, layout: Layout) -> list[Path]:
    """Directories that count as published under `root`, in the order of their steps."""
    found = []
    for path in root.iterdir():
        match = re.fullmatch(layout.published, path.name)
        if (
            match
            and path.is_dir()
            and not path.is_symlink()
            and not (layout.incomplete and (path / layout.incomplete).exists())
        ):
            found.append((int(match["step"]), path))
    return [path for _, path in sorted(found)]


def _do(tamper: Tamper, newest: Path | None, found: list[Path], root: Path, layout: Layout) -> list[Path]:
    if tamper.how == "litter":
        others = [path for path in root.iterdir() if path.is_dir() and not path.is_symlink() and path not in found]
        paths = [path / LITTER for place in sorted(others) for path in (place, *(p for p in place.rglob("*") if p.is_dir()))]
        for path in paths:
            path.write_bytes(b"left over")
        return paths
    if newest is None:
        return []
    match tamper.how:
        case "foreign":
            start, end = re.fullmatch(layout.published, newest.name).span("step")
            higher = f"{newest.name[:start]}100{newest.name[end:]}"
            copies = [root / f"{higher}.backup", root / f"{higher}_old", root / f"{newest.name}.tmp"]
            copies = [path for path in copies if not re.fullmatch(layout.temporary, path.name)]
            for path in copies:
                shutil.copytree(newest, path)
            empty = root / f"{newest.name[:start]}abc{newest.name[end:]}"
            empty.mkdir()
            note = root / f"{newest.name[:start]}notes.txt"
            note.write_text("somebody else's")
            return [*copies, empty, note]
        case "older-touched":
            for age, path in enumerate(found):
                for each in (path, *path.rglob("*")):
                    os.utime(each, (1_000_000_000 - age * 1000,) * 2)
            return found
    files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if re.search(tamper.at, str(path.relative_to(newest)))]
    if not files:
        return []
    path = files[tamper.file % len(files)]
    content = path.read_bytes()
    match tamper.how:
        case "truncate":
            path.write_bytes(content[: len(content) // 2])
        case "empty":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
        case "flip":
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :])
    return [path]
