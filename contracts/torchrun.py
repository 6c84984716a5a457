"""Launch a function in real torchrun ranks and learn what became of every one of them.

`launch(function, 2)` starts a torch elastic agent in a process of its own, which forks (or spawns) the ranks with the
whole torchrun environment. It returns a `Launch`: one outcome per rank, root cause first, with the stack of each rank
that hung. Nothing it started outlives the call. It stands alone: it needs torch and Linux, nothing else of this project.

    from contracts.torchrun import launch

    def work(path):
        torch.distributed.init_process_group("gloo")
        ...

    launch(work, 2, args=("/tmp/out",), timeout=30).raise_for_failure()

Functions answer through files, never through return values: a rank that is killed returns nothing.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

PEER_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "Application timeout",
    "Connection refused",
    "Socket Timeout",
    "ncclRemoteError",
    "Watchdog caught collective operation timeout",
    "recvValue failed",
)
"""What collectives say when the fault is another rank's. A rank that raised one of these is a consequence, not a cause."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOG_TAIL = 4000


class LaunchError(RuntimeError):
    """A launch did not end with every rank returning; `launch` holds the outcomes."""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch.explain())
        self.launch = launch


@dataclass
class RankOutcome:
    """What became of one rank.

    Attributes:
        status: "returned" · "raised" (an exception left the function) · "killed" (by `signal`, not by us) · "exited"
            (left with `exitcode` and without returning, 0 included) · "terminated" (the agent or the time-out ended it)
            · "missing" (never started).
        stacks: Python stacks of all its threads where it was terminated.
        log: the last 4,000 characters of its output.
    """

    rank: int
    status: Literal["returned", "raised", "killed", "exited", "terminated", "missing"]
    pid: int | None = None
    exitcode: int | None = None
    signal: str | None = None
    error: str | None = None
    traceback: str | None = None
    ended: float | None = None
    timed_out: bool = False
    stacks: str = ""
    log: str = ""

    @property
    def is_consequence(self) -> bool:
        """Whether a peer's failure explains this one."""
        if self.status == "raised":
            return any(text in (self.error or "") for text in PEER_ERRORS)
        return self.status == "missing" or (self.status == "terminated" and (not self.timed_out or self.waits_for_peers))

    @property
    def waits_for_peers(self) -> bool:
        """Whether its main thread stood in a collective when it was terminated."""
        main = self.stacks.split("Thread 0x")[-1] if "Thread 0x" in self.stacks else self.stacks
        return "torch/distributed/distributed_c10d.py" in main or "torch/distributed/c10d_logger.py" in main

    def story(self) -> list[str]:
        """The lines that tell most: the end of a traceback, the innermost frames of a stack, or the last output."""
        if self.traceback or not self.stacks:
            return (self.traceback or self.log).strip().splitlines()[-30:]
        # Stacks are printed innermost frame first, and the main thread last.
        threads = [text.strip().splitlines() for text in self.stacks.split("\n\n") if text.strip()]
        return [line for thread in threads for line in thread[:12]]

    def __str__(self) -> str:
        match self.status:
            case "raised":
                return f"rank {self.rank} raised {self.error}"
            case "killed":
                return f"rank {self.rank} was killed by {self.signal}"
            case "exited":
                return f"rank {self.rank} exited with code {self.exitcode} without returning"
            case "missing":
                return f"rank {self.rank} never started"
            case "terminated" if self.timed_out:
                return f"rank {self.rank} {'waited for its peers' if self.waits_for_peers else 'still ran'}"
            case status:
                return f"rank {self.rank} {status}"


@dataclass
class Launch:
    """Outcome of a launch: `outcomes` in rank order, whether the deadline ended it, and what was left running."""

    outcomes: list[RankOutcome]
    timed_out: bool = False
    seconds: float = 0.0
    left_behind: list[str] = field(default_factory=list)
    agent: str = ""

    @property
    def ok(self) -> bool:
        return not self.timed_out and not self.left_behind and all(o.status == "returned" for o in self.outcomes)

    @property
    def primary(self) -> RankOutcome | None:
        """The rank that failed first and for a reason of its own; None where every rank returned."""
        failed = [o for o in self.outcomes if o.status != "returned"]
        rank_of = {"killed": 0, "exited": 1, "raised": 2, "terminated": 3, "missing": 4}
        failed.sort(key=lambda o: (o.is_consequence, rank_of[o.status] if o.ended is None else 0, o.ended or 0.0, o.rank))
        return failed[0] if failed else None

    def explain(self) -> str:
        """Say what happened, root cause first, in lines a person can read."""
        if self.ok:
            return f"{len(self.outcomes)} ranks returned"
        lines = []
        if self.timed_out:
            lines.append(f"no end after {self.seconds:.0f} s; the ranks that still ran were ended")
        if (first := self.primary) is not None:
            lines.append(str(first))
            lines += [f"  {line}" for line in first.story()]
            lines += [
                f"{'then' if o.is_consequence else 'also'}: {o}"
                for o in self.outcomes
                if o is not first and o.status != "returned"
            ]
            if self.timed_out and first.waits_for_peers:
                for o in self.outcomes:
                    if o is not first and o.stacks:
                        lines += [f"rank {o.rank}:", *(f"  {line}" for line in o.story())]
        lines += [f"left behind: {what}" for what in self.left_behind]
        if all(o.status == "missing" for o in self.outcomes):
            lines.append(self.agent.strip()[-2000:])
        return "\n".join(lines)

    def raise_for_failure(self) -> Launch:
        """Return self where every rank returned; raise LaunchError otherwise."""
        if not self.ok:
            raise LaunchError(self)
        return self

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Launch:
        return cls(**{**data, "outcomes": [RankOutcome(**outcome) for outcome in data["outcomes"]]})


def launch(
    function: Callable[..., Any],
    nproc_per_node: int = 1,
    *,
    args: tuple[Any, ...] = (),
    timeout: float = 60.0,
    start_method: Literal["fork", "spawn"] = "fork",
    env: Mapping[str, str] | None = None,
    directory: Path | None = None,
    on_wait: Callable[[float], None] | None = None,
) -> Launch:
    """Run `function(*args)` in `nproc_per_node` fresh ranks of one node and wait for all of them.

    Args:
        function: called on every rank; with "spawn" it must be importable.
        timeout: seconds after which each rank still running writes its stacks and is killed.
        start_method: "fork" starts in a fraction of a second and needs a parent which has run no backward pass, opened
            no process group and touched no CUDA; "spawn" imports everything anew.
        env: variables set on top of the present environment, in the agent and the ranks.
        directory: where status, logs and stacks go; a temporary one that is removed afterwards by default.
        on_wait: called while waiting with the seconds since the start, at least every 50 ms.

    Raises:
        ValueError: `nproc_per_node` or `timeout` is not positive.
        RuntimeError: the platform is not Linux.
    """
    if sys.platform != "linux":
        raise RuntimeError(f"ranks are launched with Linux process control; this is {sys.platform}. Use a Linux machine or container.")
    if nproc_per_node < 1 or timeout <= 0:
        raise ValueError(f"nproc_per_node and timeout must be positive, got {nproc_per_node} and {timeout}")
    own = directory is None
    where = Path(tempfile.mkdtemp(prefix="torchrun-")) if own else Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    before = _children(os.getpid())
    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    agent = os.fork()
    if agent == 0:
        _agent(function, args, nproc_per_node, start_method, env, where)
    left: list[str] = []
    try:
        timed_out = not _wait(agent, started + timeout, started, on_wait, lambda: _ranks_are_gone(where, nproc_per_node))
        if timed_out:
            _ask_for_stacks(where, nproc_per_node)
        ranks = {pid for rank in range(nproc_per_node) if (pid := _rank_pid(where, rank))}
    finally:
        family = _descendants(agent)
        _kill(agent, group=True)
        _reap(agent)
        left = [] if timed_out else [_describe(pid) for pid in sorted(family - ranks) if _is_running(pid)]
        for pid in family:
            _kill(pid)
        # Orphans come to us only where this process is a subreaper, as the lab's parent is.
        orphans = _children(os.getpid()) - before
        left += [_describe(pid) for pid in sorted(orphans - family - {agent}) if _is_running(pid)]
        for pid in orphans:
            _kill(pid)
            _reap(pid)
    notes = json.loads((where / "agent.json").read_text()) if (where / "agent.json").exists() else {}
    result = Launch(
        outcomes=[_outcome(where, rank, notes, timed_out) for rank in range(nproc_per_node)],
        timed_out=timed_out,
        seconds=time.monotonic() - started,
        left_behind=left + notes.get("left_behind", []),
        agent=_tail(where / "agent.log"),
    )
    if own:
        shutil.rmtree(where, ignore_errors=True)
    return result


def become_subreaper() -> None:
    """Make this process inherit the orphans of its descendants, so that a launch can find and end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _agent(function, args, ranks, start_method, env, where) -> None:
    """The agent's process; never returns."""
    code = 1
    try:
        os.setsid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        become_subreaper()
        log = os.open(where / "agent.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env or {})
        exitcodes = _record_exitcodes()
        code = _run_elastic(function, args, ranks, start_method, where)
        notes: dict[str, Any] = {"exitcodes": exitcodes}
        deadline = time.monotonic() + 1.0  # a resource tracker or a daemon that is on its way out is not left behind
        while (rest := _children(os.getpid())) and time.monotonic() < deadline:
            for pid in rest:
                _reap(pid, block=False)
            time.sleep(0.01)
        notes["left_behind"] = [_describe(pid) for pid in rest]
        for pid in rest | _descendants(os.getpid()):
            _kill(pid)
        (where / "agent.json").write_text(json.dumps(notes))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _record_exitcodes() -> dict[int, int]:
    """Note how every child of this process ended: elastic reports the first failure only and drops the others."""
    wait, exitcodes = os.waitpid, {}

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        ended, status = wait(pid, options)
        if ended:
            exitcodes[ended] = os.waitstatus_to_exitcode(status)
        return ended, status

    os.waitpid = waitpid
    return exitcodes


def _run_elastic(function, args, ranks, start_method, where) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=where.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.02,
        start_method=start_method,
        logs_specs=DefaultLogsSpecs(log_dir=str(where / "elastic")),
    )
    try:
        elastic_launch(config, _rank)(function, args, str(where))
    except ChildFailedError:
        return 1
    return 0


def _rank(function: Callable[..., Any], args: tuple[Any, ...], where: str) -> None:
    """The first frame of a rank: output to a file, stacks on demand, and a status that no crash can forge."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    rank = int(os.environ["RANK"])
    base = Path(where) / f"rank-{rank}"
    log = os.open(f"{base}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(f"{base}.stacks", "w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # Written by a signal handler in C, so it works in a rank that waits inside a collective; then the default action.
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    _write(base, {"status": "started", "pid": os.getpid()})
    try:
        function(*args)
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and "fork-based multiprocessing" in message:
            message += '\n(the launching process ran a backward pass before it forked; pass start_method="spawn")'
        _write(base, {"status": "raised", "error": message, "traceback": traceback.format_exc(), "ended": time.time()})
        raise
    else:
        _write(base, {"status": "returned", "ended": time.time()})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _write(base: Path, status: dict[str, Any]) -> None:
    with open(f"{base}.status", "a") as file:
        file.write(json.dumps(status) + "\n")


def _outcome(where: Path, rank: int, notes: dict[str, Any], timed_out: bool) -> RankOutcome:
    base = where / f"rank-{rank}"
    status: dict[str, Any] = {}
    try:
        for line in Path(f"{base}.status").read_text().splitlines():
            status |= json.loads(line)
    except FileNotFoundError:
        return RankOutcome(rank, "missing")
    exitcode = notes.get("exitcodes", {}).get(str(status["pid"]))
    outcome = RankOutcome(rank, status["status"], status["pid"], exitcode, log=_tail(Path(f"{base}.log")))
    outcome.ended = status.get("ended")
    outcome.error, outcome.traceback = status.get("error"), status.get("traceback")
    outcome.stacks = _tail(Path(f"{base}.stacks"), 20 * _LOG_TAIL)
    if status["status"] == "started":
        if exitcode is None or exitcode == -signal.SIGTERM:
            outcome.status, outcome.timed_out = "terminated", timed_out
        elif exitcode < 0:
            outcome.status, outcome.signal = "killed", signal.Signals(-exitcode).name
        else:
            outcome.status = "exited"
    return outcome


def _wait(pid, deadline, started, on_wait, ranks_are_gone: Callable[[], bool]) -> bool:
    """Wait until `pid` has ended; False where the deadline came first. Leaves it to be reaped.

    The agent waits on a pipe that a rank's own children inherit; where those stay, it would wait for them for ever.
    """
    alone_since = None
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while (now := time.monotonic()) < deadline:
            if poll.poll(max(1, min(50.0, (deadline - now) * 1000))):
                return True
            if on_wait is not None:
                on_wait(now - started)
            alone_since = (alone_since or now) if ranks_are_gone() else None
            if alone_since is not None and now - alone_since > 2.0:
                return True
        return bool(poll.poll(0))
    finally:
        os.close(handle)


def _ask_for_stacks(where: Path, ranks: int) -> None:
    for rank in range(ranks):
        if (pid := _rank_pid(where, rank)) and _is_running(pid):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(0.2)


def _rank_pid(where: Path, rank: int) -> int | None:
    try:
        return json.loads((where / f"rank-{rank}.status").read_text().splitlines()[0])["pid"]
    except (FileNotFoundError, IndexError, ValueError):
        return None


def _ranks_are_gone(where: Path, ranks: int) -> bool:
    pids = [_rank_pid(where, rank) for rank in range(ranks)]
    return all(pid is not None and not _is_running(pid) for pid in pids)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill(pid: int, *, group: bool = False) -> bool:
    try:
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _reap(pid: int, *, block: bool = True) -> None:
    try:
        os.waitpid(pid, 0 if block else os.WNOHANG)
    except ChildProcessError:
        pass


def _children(pid: int) -> set[int]:
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(text) for text in file.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def _descendants(pid: int) -> set[int]:
    found, todo = set(), [pid]
    while todo:
        new = _children(todo.pop()) - found
        found |= new
        todo += new
    return found


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = "gone"
    return f"process {pid} ({words[:200]})"


def _tail(path: Path, size: int = _LOG_TAIL) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
