"""What a disk holds after the power has failed: the recorded file events, replayed against what was flushed.

POSIX promises no more than this. `fsync` of a file puts the bytes that it had then on the disk; `fsync` of a directory
puts there which names it had then. "Calling fsync() does not necessarily ensure that the entry in the directory
containing the file has also reached disk. For that an explicit fsync() on a file descriptor for the directory is also
needed" (fsync(2) of Linux). So of two disks that both are possible, one is taken, the same for the same events:

- bytes that a file had beyond its last flush are gone, so a file that was never flushed is empty;
- and, unless names are said to have got there by themselves, so are creations, renames and removals since the last flush
  of the directory: a new name is gone with all that is below it, an old name is back with what was flushed of its file.

Left out, as no disk has to lose it: bytes written in place of older ones; half a rename from one directory into another,
which is done as soon as either is flushed. What stood at the beginning counts as flushed. A file of a writer that was
not seen from inside is left as it is, and named: nothing is known of its flushes.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(eq=False)
class Node:
    """A file, a link or a directory.

    Attributes:
        names: what a directory holds now; None for anything else.
        flushed: what of it a disk is sure to hold.
        safe: bytes of a file that a disk is sure to hold.
        kept: name that a file was given aside when it lost this one.
    """

    names: dict[str, Node] | None = None
    flushed: dict[str, Node] = field(default_factory=dict)
    safe: float = 0
    kept: str | None = None


class Disk:
    """A model of the tree under a root: what is there, and what is flushed of it.

    Args:
        standing: paths that were there before the first event, a directory's with a slash at its end, parents first.
    """

    def __init__(self, standing: Iterable[str] = ()) -> None:
        self.root = Node({})
        self.moves: list[tuple[Node, Node, str, Node, str]] = []
        for path in standing:
            self.add(path)

    def add(self, path: str) -> Node:
        """Put something there that is on the disk already, as far as it is known."""
        parent, name = self._parent(path.rstrip("/"))
        parent.names[name] = parent.flushed[name] = node = Node({} if path.endswith("/") else None, safe=math.inf)
        return node

    def find(self, path: str) -> Node | None:
        node: Node | None = self.root
        for name in Path(path).parts:
            node = node.names.get(name) if node is not None and node.names is not None else None
        return node

    def happens(self, event: dict[str, Any]) -> None:
        """Carry out one event as the kernel would; what cannot be done changes nothing."""
        operation, paths = event["operation"], event["paths"]
        if operation in ("fsync", "sync"):
            for path, size in event["sizes"].items():
                if (node := self.find(path)) is not None:
                    self._flush(node, size)
            if operation == "sync":
                self._flush(self.root, 0)
            return
        parent, name = self._parent(paths[-1])
        if parent is None:
            return
        there = parent.names.get(name)
        match operation:
            case "open" | "truncate":
                if there is None and operation == "open":
                    parent.names[name] = Node()
                elif there is not None and event.get("truncates", operation == "truncate") and not event.get("exclusive"):
                    there.safe = 0
            case "mkdir" | "symlink" if there is None:
                parent.names[name] = Node({} if operation == "mkdir" else None, safe=math.inf)
            case "link" if there is None and len(paths) == 2 and (source := self.find(paths[0])) is not None:
                parent.names[name] = source
            case "remove" | "rmdir" if there is not None and there.names == ({} if operation == "rmdir" else None):
                there.kept = event.get("kept", there.kept)
                del parent.names[name]
            case "rename":
                self._rename(event, parent, name, there)

    def survives(self) -> Iterator[tuple[str, Node]]:
        """Every path that is sure to be on the disk, parents first."""
        return _walk(self.root, lambda node: node.flushed)

    def stands(self) -> Iterator[tuple[str, Node]]:
        """Every path that is there now, parents first."""
        return _walk(self.root, lambda node: node.names)

    def _parent(self, path: str) -> tuple[Node | None, str]:
        parent = self.find(os.path.dirname(path))
        return (parent if parent is not None and parent.names is not None else None), os.path.basename(path)

    def _flush(self, node: Node, size: int) -> None:
        if node.names is None:
            node.safe = max(node.safe, size)
            return
        node.flushed = dict(node.names)
        for move in [move for move in self.moves if node in (move[1], move[3])]:
            moved, old, before, new, after = move
            self.moves.remove(move)
            if old.names.get(before) is not moved and old.flushed.get(before) is moved:
                del old.flushed[before]
            if new.names.get(after) is moved:
                new.flushed[after] = moved

    def _rename(self, event: dict[str, Any], parent: Node, name: str, there: Node | None) -> None:
        if len(event["paths"]) == 1:  # One of the two is outside the root: it goes there, or comes from there.
            if there is None:
                parent.names[name] = Node(safe=math.inf)
            else:
                del parent.names[name]
            return
        old, before = self._parent(event["paths"][0])
        moved = old.names.get(before) if old is not None else None
        if moved is None or moved is there:
            return
        if there is not None:
            if there.names or (there.names is None) != (moved.names is None):
                return
            there.kept = event.get("kept", there.kept)
        del old.names[before]
        parent.names[name] = moved
        if old is not parent:
            self.moves.append((moved, old, before, parent, name))


def standing(root: Path) -> list[str]:
    """Every path under `root` as `Disk` takes them."""
    found = [(str(path.relative_to(root)), path.is_dir() and not path.is_symlink()) for path in sorted(root.rglob("*"))]
    return [f"{path}/" if directory else path for path, directory in found]


def happened(events: list[dict[str, Any]], root: Path) -> list[dict[str, Any]]:
    """The events of `root` that took place, of those that were about to: one may have failed, or have come too late.

    Too late came only the last of a thread, and what became of that shows under `root`.
    """
    last = {(event["pid"], event["thread"]): number for number, event in enumerate(events)}
    return [
        event
        for number, event in enumerate(events)
        if "fault" not in event and (last[event["pid"], event["thread"]] != number or _took_place(event, root))
    ]


def _took_place(event: dict[str, Any], root: Path) -> bool:
    there = os.path.lexists(root / event["paths"][0])
    match event["operation"]:
        case "remove" | "rmdir":
            return not there
        case "rename":
            return len(event["paths"]) == 1 or not there
        case "open" | "mkdir" | "symlink" | "link":
            return os.path.lexists(root / event["paths"][-1])
    return True


def lose(root: Path, disk: Disk, kept: Path, *, names: bool) -> dict[str, Any]:
    """Make `root` what the disk is sure to hold.

    Args:
        kept: where files that had lost their last name are, by the name they got there.
        names: whether unflushed names are lost, too.

    Returns:
        `{"cut": {path: [bytes before, bytes after]}, "gone": [paths], "back": [paths], "unseen": [paths]}`: files that
        lost bytes; names that are not there any more and names that are there again, without those below them; and files
        of writers that were not seen from inside, about which nothing is known.
    """
    unseen = [path for path in standing(root) if disk.find(path) is None]
    for path in unseen:
        disk.add(path)
    before = dict(disk.stands())
    after = dict(disk.survives()) if names else before
    if names:
        _rebuild(root, after, {node: root / path for path, node in before.items()}, kept)
    cut = {}
    for path, node in after.items():
        if node.names is None and not (root / path).is_symlink() and (size := _size(root / path)) > node.safe:
            os.truncate(root / path, int(node.safe))
            cut[path] = [size, int(node.safe)]
    return {
        "cut": cut,
        "gone": _topmost(path for path in before if path not in after),
        "back": _topmost(path for path in after if path not in before),
        "unseen": [path for path in unseen if not path.endswith("/")],
    }


def _rebuild(root: Path, wanted: dict[str, Node], places: dict[Node, Path], kept: Path) -> None:
    """Make a tree of `wanted` from the files in their present places, and put it where the old one was."""
    new = root.with_name(f"{root.name}.after-power-loss")
    new.mkdir()
    for path, node in wanted.items():
        if node.names is not None:
            (new / path).mkdir()
            continue
        place = places.get(node) or (kept / node.kept if node.kept else None)
        # A file may be where no event has put it: a writer in native code moved or removed it.
        with contextlib.suppress(FileNotFoundError):
            if place is not None:
                os.link(place, new / path, follow_symlinks=False)
    shutil.rmtree(root)
    new.rename(root)


def _walk(node: Node, names: Callable[[Node], dict[str, Node]], prefix: str = "") -> Iterator[tuple[str, Node]]:
    for name, below in names(node).items():
        path = os.path.join(prefix, name)
        yield path, below
        if below.names is not None:
            yield from _walk(below, names, path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _topmost(paths: Iterable[str]) -> list[str]:
    found = set(paths)
    return sorted(path for path in found if not any(str(parent) in found for parent in Path(path).parents))
