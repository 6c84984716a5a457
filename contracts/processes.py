"""Processes on Linux: whom they started, how they ended, and ending them for certain."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37


def become_subreaper() -> None:
    """Make this process inherit the orphans of its descendants, so that it can find and end them."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process as soon as the one that started it is gone."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def zombie_exitcode(pid: int) -> int | None:
    """How a process ended that nobody has reaped yet: the last field of its `stat`, see proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields[0] == "Z" else None


def end(pids: set[int]) -> None:
    """Kill processes and wait until they are gone, or zombies for somebody else to reap."""
    handles = []
    for pid in pids:
        try:
            handles.append(os.pidfd_open(pid))
        except OSError:
            continue
        kill(pid)
    poll = select.poll()
    for handle in handles:
        poll.register(handle, select.POLLIN)
    end, waiting = time.monotonic() + 2.0, set(handles)
    while waiting and (left := end - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            waiting.discard(handle)
            poll.unregister(handle)
    for handle in handles:
        os.close(handle)


def kill(pid: int, *, group: bool = False) -> bool:
    try:
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def wait_for_group(group: int, seconds: float = 2.0) -> None:
    """Wait until no process of a group runs that has been killed; one whose parent is gone is in nobody else's care."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(group, 0)  # raises as soon as the group is empty, zombies included
            if not any(is_running(pid) for pid in _members(group)):
                return
            time.sleep(0.005)


def _members(group: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[2] == str(group):  # see proc_pid_stat(5)
                found.add(int(stat.parent.name))
    return found


def reap(pid: int, *, block: bool = True) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if block else os.WNOHANG)


def children(pid: int) -> set[int]:
    found: set[int] = set()
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found |= {int(text) for text in file.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def descendants(pid: int) -> set[int]:
    found, todo = set(), [pid]
    while todo:
        new = children(todo.pop()) - found
        found |= new
        todo += new
    return found


def describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        words = "gone"
    return f"process {pid} ({words[:200]})"


def is_subreaper() -> bool:
    answer = ctypes.c_int()
    return ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0 and bool(answer.value)


def prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
