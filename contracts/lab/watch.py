"""File events seen from outside: inotify over whole trees, in the one order the kernel made.

A recursive watch is late on a new directory, so what stands in it when the watch begins is reported as created. It may be so
late that a directory above has another name by then: a new one is looked for in the directory that was told to hold it,
which is kept open, and not under the path that this had.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from inotify_simple import INotify, flags

_MASK = flags.CREATE | flags.MODIFY | flags.CLOSE_WRITE | flags.DELETE | flags.MOVED_FROM | flags.MOVED_TO
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
        self.handles: dict[int, int] = {}
        """An open directory for each watch; open by path only, which keeps it from no one."""
        self.events: list[dict[str, Any]] = []
        self.overflowed = False
        self.roots = roots
        for tree, root in roots.items():
            self._add(tree, "", str(root), report=False)

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
        for descriptor in list(self.trees):
            self._forget(descriptor)

    def _add(self, tree: str, path: str, where: str, *, report: bool = True) -> None:
        """Watch the directory that is called `path` and found at `where`, and those in it."""
        try:
            handle = os.open(where, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            return
        where = f"/proc/self/fd/{handle}/"
        descriptor = self.inotify.add_watch(where, _MASK)
        self._forget(descriptor)
        self.trees[descriptor], self.handles[descriptor] = (tree, path), handle
        for entry in list(os.scandir(where)):
            name, directory = os.path.join(path, entry.name), entry.is_dir(follow_symlinks=False)
            if report:
                self._note("created", tree, name, directory, 0)
            if directory:
                self._add(tree, name, where + entry.name, report=report)

    def _forget(self, descriptor: int) -> None:
        if self.trees.pop(descriptor, None) is not None:
            os.close(self.handles.pop(descriptor))

    def _take(self, event: Any) -> None:
        if event.mask & flags.Q_OVERFLOW:
            self.overflowed = True
            return
        if event.mask & flags.IGNORED or event.wd not in self.trees:
            self._forget(event.wd)
            return
        tree, parent = self.trees[event.wd]
        path, directory = os.path.join(parent, event.name), bool(event.mask & flags.ISDIR)
        for flag, name in _NAMES.items():
            if event.mask & flag:
                self._note(name, tree, path, directory, event.cookie)
                if directory and name in ("created", "moved-to"):
                    where = f"/proc/self/fd/{self.handles[event.wd]}/{event.name}"
                    self._arrived(name, tree, path, where, event.cookie)
                elif directory and name == "deleted":
                    # Kept open, it would be there still, and its watch with it.
                    gone = [descriptor for descriptor, place in self.trees.items() if place == (tree, path)]
                    for descriptor in gone:
                        self._forget(descriptor)

    def _arrived(self, name: str, tree: str, path: str, where: str, cookie: int) -> None:
        if name == "moved-to":
            # Watches follow the directory, not its name: what lay under the old name now reports under the new one.
            old = next((e for e in reversed(self.events) if e["cookie"] == cookie and e["operation"] == "moved-from"), None)
            if old is not None:
                for descriptor, (its_tree, its) in self.trees.items():
                    if its_tree == tree and (its == old["path"] or its.startswith(old["path"] + os.sep)):
                        self.trees[descriptor] = (tree, path + its[len(old["path"]) :])
            # A directory that was renamed before its watch could begin has none under either name. What stands in it had
            # been written when it arrived: reported after its arrival, a whole checkpoint would look like a torn one.
            if (tree, path) not in self.trees.values():
                noted = len(self.events)
                self._add(tree, path, where)
                found = self.events[noted:]
                del self.events[noted:]
                origin = path
                if old is not None:
                    noted, origin = self.events.index(old) + 1, old["path"]
                self.events[noted - 1 : noted - 1] = [event | {"path": origin + event["path"][len(path) :]} for event in found]
            return
        self._add(tree, path, where)

    def _note(self, operation: str, tree: str, path: str, directory: bool, cookie: int) -> None:
        self.events.append({"operation": operation, "tree": tree, "path": path, "directory": directory, "cookie": cookie})
