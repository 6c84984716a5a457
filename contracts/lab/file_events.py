"""File events seen from inside a process: who opened, renamed and removed what; and the faults injected there.

A `sys.addaudithook` hook sees what Python does to paths under the run's root. Native writers raise no audit event, so
the known ones (safetensors, tokenizers, `torch.save` to a path) are wrapped where Python calls them. The view from
outside, inotify, is the oracle for *what* happened to a path; this one says *who* did it. A flush raises no audit event
either: `os.fsync`, `os.fdatasync` and `os.sync` are wrapped, so one in native code, or by a name that was imported from
`os` earlier, is not seen.

The module is imported by `sitecustomize` in spawned writer processes too, so it may import nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib.util
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

JOB_VARIABLE = "FSDP_CONTRACTS_JOB"
"""Names the file that describes the running generation; spawned processes find their way by it."""

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CREATES = {"open", "mkdir", "symlink", "link"}
_PATH_EVENTS = {"os.rename": 2, "os.remove": 1, "os.mkdir": 1, "os.rmdir": 1, "os.link": 2, "os.symlink": 2, "os.truncate": 1}


class FileEvents:
    """Records this process's file events under `root` and carries out the generation's faults at them."""

    def __init__(self, job: dict[str, Any], rank: int, *, is_rank: bool = True) -> None:
        self.root = os.path.realpath(job["root"])
        self.evidence = Path(job["evidence"])
        self.marks = self.evidence / "marks"
        self.ranks = job["ranks"]
        self.rank = rank
        self.is_rank = is_rank
        faults = [fault for fault in job["faults"] if fault.get("rank") == rank]
        self.holds = [fault for fault in faults if fault["do"] == "Hold"]
        # A rank's processes count their events each for itself; the rank's own count says when it is killed.
        self.kills = [fault for fault in faults if fault["do"] in ("Kill", "PowerLoss")] if is_rank else []
        self.keeps = any(fault["do"] == "PowerLoss" for fault in job["faults"])
        """Whether what is removed or replaced is kept aside: a disk may not have heard of it when the power is lost."""
        self.fails = [fault for fault in faults if fault["do"] == "Fail"]
        self._begin()

    def _begin(self) -> None:
        self.count = 0
        self.seen: dict[int, int] = {}
        """How many events each fault has counted, by its identity."""
        self.failing: dict[str, Any] | None = None
        self.lock = threading.Lock()
        self.busy = threading.local()
        self.log = os.open(self.evidence / f"files-{os.getpid()}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def _begin_in_forked_child(self) -> None:
        self.is_rank, self.kills = False, []
        self._begin()

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._begin_in_forked_child)
        if self.keeps:
            (self.evidence / "kept").mkdir(exist_ok=True)
        sys.addaudithook(self._hook)
        _wrap_native_writers(self)
        _wrap_flushes(self)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, int) or not (flags or 0) & _WRITES:
                return
            self.happened("open", path, truncates=bool(flags & os.O_TRUNC), exclusive=bool(flags & os.O_EXCL))
        elif event in ("os.remove", "os.rmdir") and args[1] != -1:
            # `shutil.rmtree` names what it removes relative to an open directory.
            self.happened(event.removeprefix("os."), f"/proc/self/fd/{args[1]}/{os.fsdecode(args[0])}")
        elif event in _PATH_EVENTS:
            self.happened(event.removeprefix("os."), *args[: _PATH_EVENTS[event]])

    def happened(self, operation: str, *paths: Any, **how: bool) -> None:
        """Record one event about to happen, and hold or kill this process where a fault says so."""
        if getattr(self.busy, "here", False):
            return
        self.busy.here = True
        try:
            inside = [name for path in paths if (name := self._relative(path)) is not None]
            if not inside:
                return
            with self.lock:
                number, self.count = self.count, self.count + 1
                kills = (kill for kill in self.kills if operation == "open" or not kill.get("torn"))
                due = (kill for kill in kills if any(re.search(kill["at"], name) for name in inside) and self._is_due(kill))
                kill = next(due, None)
                if self.failing is None and operation == "open":
                    fails = (fail for fail in self.fails if not (self.is_rank and fail["error"] == "SIGKILL"))
                    due = (fail for fail in fails if re.search(fail["at"], inside[0]) and self._is_due(fail))
                    self.failing = next(due, None)
            fail = self.failing if operation in _CREATES else None
            if self.keeps and not kill:
                how |= self._keep(operation, inside, number)
            self._write(operation, inside, number, kill or fail, **how)
            if kill and kill.get("torn"):
                _die_of_the_second_byte()
            elif kill:
                _strike(kill)
            if fail and fail["error"] == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            for hold in list(self.holds):
                if operation == "open" and re.search(hold["at"], inside[0]):
                    self.holds.remove(hold)
                    self._hold(hold)
            # As an event's mark does, this places the attempt among what inotify sees; a hold comes before it.
            self._mark(number, "attempt")
            if fail:
                # What an audit hook raises reaches the caller of `open` in its place.
                code = getattr(errno, fail["error"])
                raise OSError(code, os.strerror(code), os.fsdecode(paths[0]))
        finally:
            self.busy.here = False

    def flush(self, file: int | None, really: Callable[[], None]) -> None:
        """Carry out the flush of a file, or of everything, and record it with the bytes it covers once it has returned.

        It is no event that a Kill counts: killed before it or after, a process leaves the same files. To a PowerLoss the
        moment before a flush is the one when most is at stake.
        """
        operation = "sync" if file is None else "fsync"
        path = self.root if file is None else os.path.realpath(f"/proc/self/fd/{file}")
        inside = "." if path == self.root else self._relative(path)
        if inside is None or getattr(self.busy, "here", False):
            really()
            return
        self.busy.here = True
        try:
            with self.lock:
                number, self.count = self.count, self.count + 1
                losses = (kill for kill in self.kills if kill["do"] == "PowerLoss" and re.search(kill["at"], inside))
                loss = next((kill for kill in losses if self._is_due(kill)), None)
            if loss:
                self._write(operation, [inside], number, loss)
                _strike(loss)
            sizes = _sizes(self.root) if file is None else {inside: os.fstat(file).st_size}
            really()
            self._write(operation, [inside], number, None, sizes=sizes)
            self._mark(number, "flush")
        finally:
            self.busy.here = False

    def _write(self, operation: str, paths: list[str], number: int, fault: dict[str, Any] | None, **how: Any) -> None:
        line = {"operation": operation, "paths": paths, "rank": self.rank, "pid": os.getpid(), "number": number, **how}
        line |= {"thread": threading.get_ident(), "main": threading.current_thread() is threading.main_thread()}
        if fault:
            line["fault"] = fault["do"]
        os.write(self.log, (json.dumps(line) + "\n").encode())

    def _mark(self, number: int, kind: str) -> None:
        mark = self.marks / f"{self.rank}.{os.getpid()}-{number}.{kind}"
        os.close(os.open(mark, os.O_CREAT | os.O_WRONLY))

    def _keep(self, operation: str, paths: list[str], number: int) -> dict[str, Any]:
        """Give what is about to lose its last name another one, outside the run's root."""
        if operation == "remove" or (operation == "rename" and len(paths) == 2):
            name = f"{os.getpid()}-{number}"
            # Where there is nothing to remove or to replace, or a directory, nothing is kept.
            with contextlib.suppress(OSError):
                os.link(os.path.join(self.root, paths[-1]), self.evidence / "kept" / name, follow_symlinks=False)
                return {"kept": name}
        return {}

    def _is_due(self, fault: dict[str, Any]) -> bool:
        """Count one event for a fault; whether it is the one."""
        if fault["save"]:
            begun = sum(name.startswith(f"{self.rank}.") and name.endswith(".save-begins") for name in os.listdir(self.marks))
            if begun < fault["save"]:
                return False
        number = self.seen.get(id(fault), 0)
        self.seen[id(fault)] = number + 1
        return number == fault["event"]

    def _relative(self, path: Any) -> str | None:
        try:
            text = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        # The directory is resolved, the last part is not: an event on a link is about the link.
        text = os.path.join(os.path.realpath(os.path.dirname(text)), os.path.basename(text))
        return os.path.relpath(text, self.root) if text.startswith(self.root + os.sep) else None

    def _hold(self, hold: dict[str, Any]) -> None:
        end = time.monotonic() + hold["at_most"]
        while time.monotonic() < end:
            announced = {int(name.split(".")[0]) for name in os.listdir(self.marks) if name.endswith("." + hold["until"])}
            if announced >= (set(range(self.ranks)) - {self.rank} or {self.rank}):
                break
            time.sleep(0.005)
        # What the others go on to do shows as another name under the root; a stack that waits for this writer shows none.
        names, end = set(os.listdir(self.root)), min(end, time.monotonic() + hold["grace"])
        while time.monotonic() < end and set(os.listdir(self.root)) == names:
            time.sleep(0.005)


def _strike(kill: dict[str, Any]) -> None:
    """End this process here and now; where the power is lost, its peers and all writers too."""
    if kill["do"] == "PowerLoss":
        from contracts import processes  # a rank, which has imported the package

        for pid in processes.descendants(os.getppid()) - {os.getpid()}:
            processes.kill(pid)
    os.kill(os.getpid(), signal.SIGKILL)


def _die_of_the_second_byte() -> None:
    """Have the kernel end this process as soon as a file of its outgrows one byte; see RLIMIT_FSIZE in setrlimit(2)."""
    # Python ignores the signal, and could only change that in its main thread.
    ctypes.CDLL(None).signal(signal.SIGXFSZ, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1))


def _sizes(root: str) -> dict[str, int]:
    """Size of everything below `root`, by its path from there."""
    found = {}
    for path in Path(root).rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            found[str(path.relative_to(root))] = path.lstat().st_size
    return found


def _wrap_flushes(events: FileEvents) -> None:
    def wrap(name: str) -> None:
        original = getattr(os, name)

        @functools.wraps(original)
        def flush(fd: Any) -> None:
            number = fd if isinstance(fd, int) else fd.fileno()
            events.flush(number, lambda: original(number))

        setattr(os, name, flush)

    wrap("fsync")
    wrap("fdatasync")
    everything = os.sync
    os.sync = functools.wraps(everything)(lambda: events.flush(None, everything))


def _wrap_native_writers(events: FileEvents) -> None:
    """Make writers that bypass Python's `open` report their path. Modules not imported yet are wrapped on arrival."""

    def wrap(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else kwargs.get("filename", kwargs.get("path"))
            events.happened("open", path, truncates=True)
            return original(*args, **kwargs)

        setattr(owner, name, wrapper)

    _on_arrival(
        {
            "safetensors.torch": lambda module: wrap(module, "serialize_file", 1),
            "safetensors.numpy": lambda module: wrap(module, "serialize_file", 1),
            "tokenizers": lambda module: wrap(module.Tokenizer, "save", 1),
            "torch.serialization": lambda module: wrap(module._open_zipfile_writer_file, "__init__", 1),
        }
    )


def _on_arrival(wrappers: dict[str, Callable[[Any], None]]) -> None:
    """Call each wrapper with its module: now, or right after the module has been imported."""
    pending = dict(wrappers)

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
            if (wrapper := pending.pop(name, None)) is None:
                return None
            # The other finders answer, since this name is not pending any more.
            if (spec := importlib.util.find_spec(name)) is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: Any) -> None:
                    execute(module)
                    wrapper(module)

                spec.loader.exec_module = exec_module
            return spec

    for name in list(pending):
        if name in sys.modules:
            pending.pop(name)(sys.modules[name])
    if pending:
        sys.meta_path.insert(0, Finder)


def install_in_spawned_process() -> None:
    """Install the hook in a process that a rank spawned; called by this folder's sitecustomize."""
    job = json.loads(Path(os.environ[JOB_VARIABLE]).read_text())
    FileEvents(job, int(os.environ.get("RANK", "0")), is_rank=False).install()
