"""A rank that does not see some paths, as a client of a shared file system whose cache is stale.

Questions about existence and listings leave those paths out, in the rank and in what it forks; opening, renaming or
removing one goes to the file system, as such a client's would.
"""

from __future__ import annotations

import errno
import functools
import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def blindfold(root: Path, at: str) -> None:
    """Hide from this process the paths, relative to `root`, in which the regular expression `at` is found."""
    base = os.path.realpath(root)

    def hidden(path: Any, *, follow: bool = False) -> bool:
        if isinstance(path, int):
            return False
        text = os.path.abspath(os.fsdecode(path))
        texts = [text, os.path.realpath(text)] if follow else [text]
        return any(text.startswith(base + os.sep) and re.search(at, os.path.relpath(text, base)) for text in texts)

    def missing(path: Any) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))

    stat, lstat, access, listdir, scandir = os.stat, os.lstat, os.access, os.listdir, os.scandir

    @functools.wraps(stat)
    def blind_stat(path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True) -> os.stat_result:
        if dir_fd is None and hidden(path, follow=follow_symlinks):
            raise missing(path)
        return stat(path, dir_fd=dir_fd, follow_symlinks=follow_symlinks)

    @functools.wraps(lstat)
    def blind_lstat(path: Any, *, dir_fd: int | None = None) -> os.stat_result:
        if dir_fd is None and hidden(path):
            raise missing(path)
        return lstat(path, dir_fd=dir_fd)

    @functools.wraps(access)
    def blind_access(path: Any, mode: int, **options: Any) -> bool:
        return not hidden(path, follow=True) and access(path, mode, **options)

    @functools.wraps(listdir)
    def blind_listdir(path: Any = ".") -> list[Any]:
        if hidden(path, follow=True):
            raise missing(path)
        names = listdir(path)
        return names if isinstance(path, int) else [name for name in names if not hidden(os.path.join(path or ".", name))]

    @functools.wraps(scandir)
    def blind_scandir(path: Any = ".") -> Any:
        if path is not None and hidden(path, follow=True):
            raise missing(path)
        return _Entries(scandir(path), hidden)

    os.stat, os.lstat, os.access, os.listdir, os.scandir = blind_stat, blind_lstat, blind_access, blind_listdir, blind_scandir
    # From Python 3.13 on, pathlib's glob has taken the function from `os` when it was imported.
    if getattr(globber := getattr(glob, "_StringGlobber", None), "scandir", None) is scandir:
        globber.scandir = staticmethod(blind_scandir)


class _Entries:
    """What `os.scandir` returns, without the hidden entries."""

    def __init__(self, entries: Any, hidden: Any) -> None:
        self.entries, self.hidden = entries, hidden

    def __iter__(self) -> Iterator[os.DirEntry]:
        return self

    def __next__(self) -> os.DirEntry:
        return next(entry for entry in self.entries if not self.hidden(entry.path))

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.entries.close()
