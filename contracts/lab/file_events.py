"""File events seen from inside a process: who opened, renamed and removed what; and the faults injected there.

A `sys.addaudithook` hook sees what Python does to paths under the run's root. Native writers raise no audit event, so
the known ones (safetensors, tokenizers, `torch.save` to a path) are wrapped where Python calls them. The view from
outside, inotify, is the oracle for *what* happened to a path; this one says *who* did it.

The module is imported by `sitecustomize` in spawned writer processes too, so it may import nothing heavy.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
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
        faults = [fault for fault in job["faults"] if fault.get("rank") == rank]
        self.holds = [fault for fault in faults if fault["do"] == "Hold"]
        # A rank's processes count their events each for itself; the rank's own count says when it is killed.
        self.kills = [fault for fault in faults if fault["do"] == "Kill"] if is_rank else []
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
        self.kills = []
        self._begin()

    def install(self) -> None:
        os.register_at_fork(after_in_child=self._begin_in_forked_child)
        sys.addaudithook(self._hook)
        _wrap_native_writers(self)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            if isinstance(path, int) or not (flags or 0) & _WRITES:
                return
            self.happened("open", path)
        elif event in ("os.remove", "os.rmdir") and args[1] != -1:
            # `shutil.rmtree` names what it removes relative to an open directory.
            self.happened(event.removeprefix("os."), f"/proc/self/fd/{args[1]}/{os.fsdecode(args[0])}")
        elif event in _PATH_EVENTS:
            self.happened(event.removeprefix("os."), *args[: _PATH_EVENTS[event]])

    def happened(self, operation: str, *paths: Any) -> None:
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
                due = (kill for kill in self.kills if any(re.search(kill["at"], name) for name in inside) and self._is_due(kill))
                kill = next(due, None)
                if self.failing is None and operation == "open":
                    due = (fail for fail in self.fails if re.search(fail["at"], inside[0]) and self._is_due(fail))
                    self.failing = next(due, None)
            fail = self.failing if operation in _CREATES else None
            line = {"operation": operation, "paths": inside, "rank": self.rank, "pid": os.getpid(), "number": number}
            if fault := kill or fail:
                line["fault"] = fault["do"]
            os.write(self.log, (json.dumps(line) + "\n").encode())
            if kill:
                os.kill(os.getpid(), signal.SIGKILL)
            for hold in list(self.holds):
                if operation == "open" and re.search(hold["at"], inside[0]):
                    self.holds.remove(hold)
                    self._hold(hold)
            # As an event's mark does, this places the attempt among what inotify sees; a hold comes before it.
            mark = self.marks / f"{self.rank}.{os.getpid()}-{number}.attempt"
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY))
            if fail:
                # What an audit hook raises reaches the caller of `open` in its place.
                code = getattr(errno, fail["error"])
                raise OSError(code, os.strerror(code), os.fsdecode(paths[0]))
        finally:
            self.busy.here = False

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


def _wrap_native_writers(events: FileEvents) -> None:
    """Make writers that bypass Python's `open` report their path. Modules not imported yet are wrapped on arrival."""

    def wrap(owner: Any, name: str, position: int) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            path = args[position] if len(args) > position else kwargs.get("filename", kwargs.get("path"))
            events.happened("open", path)
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
