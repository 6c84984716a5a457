"""The lab: run a case on an implementation, and come back with its history."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import contracts
from contracts import checkpoint_dir
from contracts.case import Case, Generation, PowerLoss, Tamper
from contracts.history import History, inside_events
from contracts.implementation import Layout
from contracts.lab import power, tamper
from contracts.lab.leases import exclusive, lease
from contracts.lab.watch import Watch

START_SECONDS = 300.0
"""How long a warm parent may take to import its stack; some compile on their first import."""


class LabError(RuntimeError):
    """The lab itself could not do its work; it says nothing about the implementation."""


class Lab:
    """Runs cases on the implementations of one stack, through one warm parent.

    Args:
        implementation: `module:Class`.
        python: interpreter of the stack's environment.
        device: "cpu" (gloo) or "cuda" (NCCL, one GPU per rank).
        directory: where evidence is kept; one directory per case and implementation, reused when it is complete.
        deadline: seconds a generation may take.
        paths: directories that the stack's modules are imported from, before those of `PYTHONPATH`.
        progress: told when a world has to wait for cores or GPUs that others hold.
    """

    def __init__(
        self,
        implementation: str,
        *,
        python: str = sys.executable,
        device: str = "cpu",
        directory: Path = Path(".contracts"),
        deadline: float = 60.0,
        paths: Sequence[Path] = (),
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.implementation = implementation
        self.python = python
        self.device = device
        self.directory = Path(directory).resolve()
        self.deadline = deadline
        self.paths = tuple(map(str, paths))
        self.progress = progress
        self._parent: _Parent | None = None
        self._about: dict[str, Any] = {}

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the warm parent and whatever it started."""
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def about(self, implementation: str | None = None) -> dict[str, Any]:
        """Name, capabilities, layout and environment of an implementation of this stack, from its own process."""
        name = implementation or self.implementation
        if name not in self._about:
            self._about[name] = self._ask({"do": "import", "implementation": name}, START_SECONDS)
        return self._about[name]

    def run(self, case: Case, implementation: str | None = None) -> History:
        """Run `case`, or load its history where this lab's directory has it already.

        Raises:
            LabError: the lab failed; a stack's failure is evidence in the history instead.
        """
        name = implementation or self.implementation
        about = self.about(name)
        where = self.directory / "histories" / f"{name.replace(':', '.')}-{self.device}-{case.key}"
        # Not `with_suffix`: the name has dots, and every case of a module would share one lock.
        with exclusive(where.with_name(f"{where.name}.lock")):
            if not (where / "complete").exists():
                shutil.rmtree(where, ignore_errors=True)
                where.mkdir(parents=True)
                self._run(case, name, about, where)
                (where / "complete").touch()
        return History.load(where)

    def _run(self, case: Case, name: str, about: dict[str, Any], where: Path) -> None:
        case.write(where / "case.json")
        (where / "about.json").write_text(json.dumps(about))
        models = [str(where / f"model-{number}") for number in range(len(case.generations))]
        job = {"case": str(where / "case.json"), "models": models, "records": str(where / "records.jsonl")}
        self._ask({"do": "prepare", **job}, START_SECONDS)
        layout = Layout(**about["layout"] | {"companions": tuple(about["layout"]["companions"])})
        for number, generation in enumerate(case.generations):
            evidence, root = where / f"generation-{number}", where / generation.root
            root.mkdir(exist_ok=True)
            details = {
                "implementation": name,
                "case": str(where / "case.json"),
                "generation": number,
                "evidence": str(evidence),
                "root": str(root),
                "model": models[number],
                "records": job["records"],
                "device": self.device,
                "ranks": generation.ranks,
                "faults": case.to_json()["generations"][number]["faults"],
            }
            tampered = [tamper.apply(fault, root, layout) for fault in generation.faults if isinstance(fault, Tamper)]
            stood = power.standing(root)
            reply, watch = self._launch(details, evidence)
            with open(evidence / "outside.jsonl", "w") as file:
                file.writelines(json.dumps(event) + "\n" for event in watch.events)
            lost = _lose_power(generation, evidence, root, stood)
            notes = ["inotify's queue overflowed: file events are missing"] if watch.overflowed else []
            done = {"launch": reply["launch"], "disk": _published(root, layout), "notes": notes, "tampered": tampered}
            done |= {"pointer": _pointer(root, layout.pointer), "best": _pointer(root, layout.best)}
            done |= {"names": _names(root), "lost": lost}
            (evidence / "done.json").write_text(json.dumps(done))

    def _launch(self, details: dict[str, Any], evidence: Path) -> tuple[dict[str, Any], Watch]:
        """Launch a generation's ranks, with the watch on while they run."""
        (evidence / "marks").mkdir(parents=True)
        (evidence / "job.json").write_text(json.dumps(details))
        watch = Watch({"marks": evidence / "marks", "root": Path(details["root"])})
        with contextlib.closing(watch), lease(self.device, details["ranks"], waiting=self.progress) as slots:
            env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            if self.device == "cuda":
                env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, slots))
            job = {
                "do": "run",
                "implementation": details["implementation"],
                "job_file": str(evidence / "job.json"),
                "ranks": details["ranks"],
                "deadline": self.deadline,
                "directory": str(evidence / "launch"),
                "env": env,
            }
            reply = self._ask(job, self.deadline + 30, watch)
            watch.drain()
        return reply, watch

    def _ask(self, job: dict[str, Any], timeout: float, watch: Watch | None = None) -> dict[str, Any]:
        if self._parent is None:
            self._parent = _Parent(self.python, self.directory, self.paths)
        try:
            return self._parent.ask(job, timeout, watch)
        except BaseException:  # An interrupt too: the answer still to come would be taken for that of the next job.
            self.close()
            raise


def _packages_alone(directory: Path) -> Path:
    """A folder that holds this project's packages and nothing else.

    Another stack's interpreter imports them from there: the folder they are installed in may hold a torch of its own.
    """
    alone, home = directory / "packages", Path(contracts.__file__).parent.parent
    alone.mkdir(exist_ok=True)
    for name in ("contracts", "reference_impl"):
        if (home / name).is_dir():
            with contextlib.suppress(FileExistsError):
                (alone / name).symlink_to(home / name)
    return alone


class _Parent:
    """The warm parent's process, and the pipe to it."""

    def __init__(self, python: str, directory: Path, paths: Sequence[str] = ()) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"parent-{os.getpid()}-{id(self):x}.log"
        reading, writing = os.pipe()
        package = str(_packages_alone(directory))
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, package, os.getcwd(), os.environ.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [python, "-m", "contracts.lab.parent", str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[writing],
                env=env,
                start_new_session=True,
            )
        os.close(writing)
        self.replies = reading
        self.buffer = b""

    def ask(self, job: dict[str, Any], timeout: float, watch: Watch | None) -> dict[str, Any]:
        assert self.process.stdin is not None
        end = time.monotonic() + timeout
        try:
            self.process.stdin.write((json.dumps(job) + "\n").encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise LabError(f"the warm parent has died:\n{self._tail()}") from None
        while b"\n" not in self.buffer:
            ready, _, _ = select.select([self.replies, *([watch] if watch else [])], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise LabError(f"the warm parent did not answer {job['do']!r} within {timeout:.0f} s:\n{self._tail()}")
            if watch in ready:
                watch.drain()
            if self.replies in ready:
                chunk = os.read(self.replies, 1 << 16)
                if not chunk:
                    raise LabError(f"the warm parent died while it did {job['do']!r}:\n{self._tail()}")
                self.buffer += chunk
        line, self.buffer = self.buffer.split(b"\n", 1)
        reply = json.loads(line)
        if not reply.pop("ok"):
            raise LabError(f"{reply['error']}\n{reply['traceback']}\n{self._tail()}")
        return reply

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its agents and ranks die with it: each asked the kernel for that
            self.process.wait()
        os.close(self.replies)
        self.log.unlink(missing_ok=True)

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


def _lose_power(generation: Generation, evidence: Path, root: Path, stood: list[str]) -> dict[str, Any]:
    """Take from the run's directory what a power loss of this generation took, if there was one."""
    fault = next((fault for fault in generation.faults if isinstance(fault, PowerLoss)), None)
    if fault is None:
        return {}
    events = inside_events(evidence)
    if not any(line.get("fault") == "PowerLoss" for _, line in events):
        return {}
    disk = power.Disk(stood)
    # What has no order left no mark, which comes before the deed.
    for event in power.happened([line for order, line in events if order is not None], root):
        disk.happens(event)
    return power.lose(root, disk, evidence / "kept", names=fault.lost != "bytes")


def _names(root: Path) -> dict[str, int]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_dir() and not path.is_symlink():
            found[f"{name}/"] = 0
        else:
            found[name] = path.lstat().st_size
    return found


def _pointer(root: Path, name: str | None) -> str | None:
    if name is None:
        return None
    path = root / name
    if path.is_symlink():
        return os.path.basename(os.readlink(path))
    return os.path.basename(path.read_text().strip()) if path.is_file() else None


def _published(root: Path, layout: Layout) -> dict[str, Any]:
    found = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        whole = layout.incomplete is None or not (path / layout.incomplete).exists()
        if path.is_dir() and not path.is_symlink() and re.fullmatch(layout.published, name) and whole:
            found[name] = checkpoint_dir.read(path).to_json()
    return found
