"""File events seen from outside: inotify over whole trees, in the one order the kernel made.

A recursive watch is late on a new directory, so what stands in it when the watch begins is reported as created.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inotify_simple import INotify, flags

_MASK = flags.CREATE | flags.MODIFY | flags.CLOSE_WRITE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO | flags.DONT_FOLLOW
_NAMES = {
    flags.CREATE: "created",
    flags.MODIFY: "modified",
    flags.CLOSE_WRITE: "closed",
    flags.DELETE: "deleted",
    flags.MOVED_FROM: "moved-from",
    flags.MOVED_TO: "moved-to",
}


class Watch:
    """Collects the events of the trees under `roots`: `{"operation", "tree", "path", "directory", "cookie"}`."""

    def __init__(self, roots: dict[str, Path]) -> None:
        self.inotify = INotify()
        self.trees: dict[int, tuple[str, str]] = {}
        self.events: list[dict[str, Any]] = []
        self.overflowed = False
        self.roots = roots
        for tree in roots:
            self._add(tree, "", report=False)

    def fileno(self) -> int:
        return self.inotify.fileno()

    def drain(self, timeout_ms: int = 0) -> None:
        """Take every event that is waiting."""
        while found := self.inotify.read(timeout=timeout_ms):
            timeout_ms = 0
            for event in found:
                self._take(event)

    def close(self) -> None:
        self.inotify.close()

    def _add(self, tree: str, path: str, *, report: bool = True) -> None:
        where = self.roots[tree] / path
        try:
            descriptor = self.inotify.add_watch(where, _MASK)
        except (FileNotFoundError, NotADirectoryError):
            return
        self.trees[descriptor] = (tree, path)
        try:
            entries = list(os.scandir(where))
        except FileNotFoundError:
            return
        for entry in entries:
            name, directory = os.path.join(path, entry.name), entry.is_dir(follow_symlinks=False)
            if report:
                self._note("created", tree, name, directory, 0)
            if directory:
                self._add(tree, name, report=report)

    def _take(self, event: Any) -> None:
        if event.mask & flags.Q_OVERFLOW:
            self.overflowed = True
            return
        if event.mask & flags.IGNORED or event.wd not in self.trees:
            self.trees.pop(event.wd, None)
            return
        tree, parent = self.trees[event.wd]
        path, directory = os.path.join(parent, event.name), bool(event.mask & flags.ISDIR)
        for flag, name in _NAMES.items():
            if event.mask & flag:
                self._note(name, tree, path, directory, event.cookie)
                if directory and name in ("created", "moved-to"):
                    self._arrived(name, tree, path, event.cookie)

    def _arrived(self, name: str, tree: str, path: str, cookie: int) -> None:
        if name == "moved-to":
            # Watches follow the directory, not its name: what lay under the old name now reports under the new one.
            old = next((e for e in reversed(self.events) if e["cookie"] == cookie and e["operation"] == "moved-from"), None)
            if old is not None:
                for descriptor, (its_tree, where) in self.trees.items():
                    if its_tree == tree and (where == old["path"] or where.startswith(old["path"] + os.sep)):
                        self.trees[descriptor] = (tree, path + where[len(old["path"]) :])
            # A directory that was renamed before its watch could begin has none under either name. What stands in it had
            # been written when it arrived: reported after its arrival, a whole checkpoint would look like a torn one.
            if (tree, path) not in self.trees.values():
                noted = len(self.events)
                self._add(tree, path)
                found = self.events[noted:]
                del self.events[noted:]
                origin = path
                if old is not None:
                    noted, origin = self.events.index(old) + 1, old["path"]
                self.events[noted - 1 : noted - 1] = [event | {"path": origin + event["path"][len(path) :]} for event in found]
            return
        self._add(tree, path)

    def _note(self, operation: str, tree: str, path: str, directory: bool, cookie: int) -> None:
        self.events.append({"operation": operation, "tree": tree, "path": path, "directory": directory, "cookie": cookie})
