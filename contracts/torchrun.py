"""Launch a function in real torchrun ranks and learn what became of every one of them.

`launch(function, 2)` starts a torch elastic agent in a process of its own, which forks (or spawns) the ranks with the
whole torchrun environment. It returns a `Launch`: one outcome per rank, root cause first, with the stack of each rank
that hung. Nothing it started outlives the call. It stands alone: it needs torch and Linux, no other package of this project.

    from contracts.torchrun import launch

    def work(path):
        torch.distributed.init_process_group("gloo")
        ...

    launch(work, 2, args=("/tmp/out",), timeout=30).raise_for_failure()

Functions answer through files, never through return values: a rank that is killed returns nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Literal

from contracts import processes

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
    "DistStoreError: wait timeout",
)
"""What collectives say when the fault is another rank's. A rank that raised one of these is a consequence, not a cause."""

_LOG_TAIL = 4000
_NOTICED_LATE = 1.0
"""Seconds by which the agent may notice a death after the peers do; a death within them of a peer's error came first."""
_PATIENCE = 2.0
"""Seconds that an agent may go on once no rank is left that could end its wait."""


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
        error: the exception that left the function; of a terminated rank, the one it was handling when the end came.
        ended: when it raised, returned or was seen dead, in seconds since the epoch.
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
        main = re.split(r"^(?:Current thread|Thread) 0x", self.stacks, flags=re.MULTILINE)[-1]
        return "torch/distributed/distributed_c10d.py" in main or "torch/distributed/c10d_logger.py" in main

    @property
    def suspicion(self) -> tuple[int, float, int]:
        """Sorts the rank that failed first and for a reason of its own before those it took along."""
        if self.status in ("killed", "exited", "raised") and not self.is_consequence:
            # An abort is how a watchdog ends a rank whose peer failed, so it gets no benefit of the doubt.
            late = self.status != "raised" and self.signal != "SIGABRT"
            return 0, (self.ended or 0.0) - _NOTICED_LATE * late, self.rank
        if self.status == "terminated" and self.error and not any(text in self.error for text in PEER_ERRORS):
            return 1, 0.0, self.rank
        if self.status == "terminated" and not self.waits_for_peers:
            return 2, 0.0, self.rank
        return (4 if self.status == "missing" else 3), self.ended or 0.0, self.rank

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
                return f"rank {self.rank} raised {self.error.splitlines()[0] if self.error else ''}"
            case "killed":
                return f"rank {self.rank} was killed by {self.signal}"
            case "exited":
                return f"rank {self.rank} exited with code {self.exitcode} without returning"
            case "missing":
                return f"rank {self.rank} never started"
            case "terminated":
                what = "waited for its peers" if self.waits_for_peers else "still ran"
                return f"rank {self.rank} {what}{f', handling {self.error},' if self.error else ''} when it was ended"
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
        return min(failed, key=lambda o: o.suspicion, default=None)

    def explain(self) -> str:
        """Say what happened, root cause first, in lines a person can read."""
        if self.ok:
            return f"{len(self.outcomes)} ranks returned"
        lines = []
        if self.timed_out:
            lines.append(f"no end after {self.seconds:.0f} s; the ranks that still ran were ended")
        first = self.primary
        if first is not None and first.suspicion[0] == 3:
            lines.append("no rank failed for a reason of its own; did one call another collective than the rest, or none?")
            for o in [first, *(o for o in self.outcomes if o is not first)]:
                lines += [str(o), *(f"  {line}" for line in o.story() if o.status != "returned")]
        elif first is not None:
            lines += [str(first), *(f"  {line}" for line in first.story())]
            others = [o for o in self.outcomes if o is not first and o.status != "returned"]
            lines += [f"{'then' if o.is_consequence else 'also'}: {o}" for o in others]
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
        raise RuntimeError(
            f"ranks are launched with Linux process control; this is {sys.platform}. Use a Linux machine or container."
        )
    if nproc_per_node < 1 or timeout <= 0:
        raise ValueError(f"nproc_per_node and timeout must be positive, got {nproc_per_node} and {timeout}")
    if directory is not None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        return _launch(function, nproc_per_node, args, timeout, start_method, env, Path(directory), on_wait)
    with tempfile.TemporaryDirectory(prefix="torchrun-", ignore_cleanup_errors=True) as temporary:
        return _launch(function, nproc_per_node, args, timeout, start_method, env, Path(temporary), on_wait)


def _launch(function, nproc, args, timeout, start_method, env, where: Path, on_wait) -> Launch:
    from contracts.rendezvous import serve_store

    sys.stdout.flush()
    sys.stderr.flush()
    started = time.monotonic()
    store, port = serve_store(nproc)
    before = processes.children(os.getpid())
    agent = os.fork()
    if agent == 0:
        _agent(function, args, nproc, start_method, env, where, port)
    left: list[str] = []
    timed_out = False
    try:
        timed_out = not _wait(agent, started + timeout, started, on_wait, lambda: _nothing_will_come(where, nproc))
        if timed_out:
            _ask_for_stacks(where, nproc)
    finally:
        ranks = {pid for rank in range(nproc) if (pid := _rank_pid(where, rank))}
        family = processes.descendants(agent)
        if not timed_out:
            left = _still_running(family - ranks)
        # Ranks that the agent has not reaped are zombies only as long as it lives.
        unreaped = {pid: (code, None) for pid in ranks if (code := processes.zombie_exitcode(pid)) is not None}
        exits = unreaped | _read_exits(where)
        processes.kill(agent, group=True)
        processes.kill(store)
        processes.reap(agent)
        processes.reap(store)
        processes.end(family)
        # What the agent's end made an orphan, such as multiprocessing's resource tracker, was killed with its group.
        processes.wait_for_group(agent)
        # Orphans come to us only where this process is a subreaper, as the lab's parent is; other children are not ours.
        orphans = processes.children(os.getpid()) - before if processes.is_subreaper() else set()
        left += _still_running(orphans - family)
        processes.end(orphans)
        for pid in orphans:
            processes.reap(pid)
    notes = json.loads((where / "agent.json").read_text()) if (where / "agent.json").exists() else {}
    return Launch(
        outcomes=[_outcome(where, rank, exits, timed_out) for rank in range(nproc)],
        timed_out=timed_out,
        seconds=time.monotonic() - started,
        left_behind=left + notes.get("left_behind", []),
        agent=_tail(where / "agent.log"),
    )


def _still_running(pids: set[int]) -> list[str]:
    return [processes.describe(pid) for pid in sorted(pids) if processes.is_running(pid)]


def _agent(function, args, ranks, start_method, env, where, port) -> None:
    """The agent's process; never returns."""
    code = 1
    try:
        os.setsid()
        processes.die_with_parent()
        processes.become_subreaper()
        _send_output_to(where / "agent.log")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env or {})
        _record_exits(where)
        # torch leaves a file per rank that failed in the temporary folder; here it goes with the rest.
        tempfile.tempdir = str(where)
        code = _run_elastic(function, args, ranks, start_method, where, port)
        # To spawn ranks, multiprocessing started a resource tracker for this process, which lives as long as it does.
        own = {getattr(resource_tracker._resource_tracker, "_pid", None)}
        deadline = time.monotonic() + 1.0  # a daemon that is on its way out is not left behind
        while (rest := processes.children(os.getpid()) - own) and time.monotonic() < deadline:
            for pid in rest:
                processes.reap(pid, block=False)
            time.sleep(0.01)
        left = [processes.describe(pid) for pid in rest]
        processes.end(rest | processes.descendants(os.getpid()))
        (where / "agent.json").write_text(json.dumps({"left_behind": left}))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _record_exits(where: Path) -> None:
    """Note how and when every child of this process ended: elastic reports the first failure only and drops the others.

    Noted at once, since the agent itself may be ended before it can sum up.
    """
    wait, exits = os.waitpid, open(where / "exits.jsonl", "a", buffering=1)

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        ended, status = wait(pid, options)
        if ended:
            exits.write(json.dumps([ended, os.waitstatus_to_exitcode(status), time.time()]) + "\n")
        return ended, status

    os.waitpid = waitpid


def _read_exits(where: Path) -> dict[int, tuple[int, float | None]]:
    try:
        lines = (where / "exits.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {pid: (code, at) for pid, code, at in map(json.loads, lines)}


def _run_elastic(function, args, ranks, start_method, where, port) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from contracts.rendezvous import OneNode

    rendezvous_handler_registry.register("one-node", lambda parameters: OneNode(parameters.run_id, port))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=where.name,
        rdzv_backend="one-node",
        rdzv_endpoint=f"localhost:{port}",
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
    processes.die_with_parent()
    tempfile.tempdir = None
    rank = int(os.environ["RANK"])
    base = Path(where) / f"rank-{rank}"
    _send_output_to(Path(f"{base}.log"))
    stacks = open(f"{base}.stacks", "w")
    faulthandler.enable(file=stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # Written by a signal handler in C, so it works in a rank that waits inside a collective; then the default action.
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)
    _write(base, {"status": "started", "pid": os.getpid()})
    try:
        function(*args)
    except BaseException as error:
        # Elastic ends the peers of a rank that failed; what this rank has to say is written before it listens.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        status = "raised"
        if (signalled := _elastic_signal(error)) is not None:
            status, error = "terminated", signalled.__context__
        text = None if error is None else f"{type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and "fork-based multiprocessing" in text:
            error.add_note('the launching process ran a backward pass before it forked; pass start_method="spawn"')
        trace = None if error is None else "".join(traceback.format_exception(error))
        _write(base, {"status": status, "error": text, "traceback": trace, "ended": time.time()})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        raise
    else:
        _write(base, {"status": "returned", "ended": time.time()})
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _send_output_to(path: Path) -> None:
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    # A launching process that captures its output, as pytest does, has streams of its own, and loggers that hold them.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            os.dup2(log, stream.fileno())
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", closefd=False, errors="backslashreplace")
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)


def _elastic_signal(error: BaseException | None) -> BaseException | None:
    """The exception by which elastic's SIGTERM handler ends a rank, where it is what left the function or led to it."""
    while error is not None and type(error).__name__ != "SignalException":
        error = error.__context__
    return error


def _write(base: Path, status: dict[str, Any]) -> None:
    with open(f"{base}.status", "a") as file:
        file.write(json.dumps(status) + "\n")


def _outcome(where: Path, rank: int, exits: dict[int, tuple[int, float | None]], timed_out: bool) -> RankOutcome:
    base = where / f"rank-{rank}"
    status: dict[str, Any] = {}
    try:
        for line in Path(f"{base}.status").read_text().splitlines():
            status |= json.loads(line)
    except FileNotFoundError:
        return RankOutcome(rank, "missing")
    exitcode, died = exits.get(status["pid"], (None, None))
    outcome = RankOutcome(rank, status["status"], status["pid"], exitcode, log=_tail(Path(f"{base}.log")))
    outcome.ended = status.get("ended", died)
    outcome.error, outcome.traceback = status.get("error"), status.get("traceback")
    outcome.stacks = _tail(Path(f"{base}.stacks"), 20 * _LOG_TAIL)
    outcome.timed_out = timed_out and exitcode is None and status["status"] == "started"
    if status["status"] == "started":
        # SIGTERM leaves its mark in the stacks, however the rank then ended.
        if exitcode is None or exitcode == -signal.SIGTERM or (exitcode > 0 and outcome.stacks):
            outcome.status = "terminated"
        elif exitcode < 0:
            outcome.status, outcome.signal = "killed", signal.Signals(-exitcode).name
        else:
            outcome.status = "exited"
    return outcome


def _wait(pid, deadline, started, on_wait, nothing_will_come: Callable[[], bool]) -> bool:
    """Wait until `pid` has ended, or waits in vain; False where the deadline came first. Leaves it to be reaped."""
    in_vain_since = None
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        while (now := time.monotonic()) < deadline:
            if poll.poll(max(1, min(50.0, (deadline - now) * 1000))):
                return True
            if on_wait is not None:
                on_wait(now - started)
            in_vain_since = (in_vain_since or now) if nothing_will_come() else None
            if in_vain_since is not None and now - in_vain_since > _PATIENCE:
                return True
        return bool(poll.poll(0))
    finally:
        os.close(handle)


def _ask_for_stacks(where: Path, ranks: int) -> None:
    """Have every rank that runs write its stacks, and wait until they are written, or for a second at most."""
    asked = []
    for rank in range(ranks):
        if (pid := _rank_pid(where, rank)) and processes.is_running(pid):
            os.kill(pid, signal.SIGUSR1)
            asked.append(where / f"rank-{rank}.stacks")
    sizes, end = None, time.monotonic() + 1.0
    while time.monotonic() < end:
        time.sleep(0.1)
        before, sizes = sizes, [path.stat().st_size for path in asked]
        if sizes == before and all(sizes):
            return


def _rank_pid(where: Path, rank: int) -> int | None:
    try:
        return json.loads((where / f"rank-{rank}.status").read_text().splitlines()[0])["pid"]
    except (FileNotFoundError, IndexError, ValueError):
        return None


def _nothing_will_come(where: Path, ranks: int) -> bool:
    """Whether the agent waits in vain.

    It waits for the value of a rank that exited without a word, with 0, and holds those that returned until it has it.
    And it waits on a pipe that a rank's own children inherit, as long as they live.
    """
    silent = alive = 0
    for rank in range(ranks):
        if (pid := _rank_pid(where, rank)) is None:
            return False
        ended = len(Path(f"{where}/rank-{rank}.status").read_text().splitlines()) > 1
        running = processes.is_running(pid)
        if running and not ended:
            return False
        silent += not running and not ended
        alive += running
    return silent > 0 or alive == 0


def _tail(path: Path, size: int = _LOG_TAIL) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
