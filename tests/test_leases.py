"""Worlds on one machine never share a core or a GPU, and nobody holds one after its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from contracts.lab import leases

HOLDER = """
import sys
from contracts.lab import leases
leases.cores = lambda: int(sys.argv[2])
with leases.lease("cpu", int(sys.argv[1])) as slots:
    print(*slots, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch) -> None:
    """Locks of this test alone, whatever else runs on this machine, and four cores."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(leases, "cores", lambda: 4)


@contextlib.contextmanager
def holder(ranks: int, cores: int = 4) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds `ranks` slots until its input ends; its first line of output names them."""
    command = [sys.executable, "-c", HOLDER, str(ranks), str(cores)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        yield process
    finally:
        process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)


def slots_of(process: subprocess.Popen[str]) -> set[int]:
    return {int(slot) for slot in process.stdout.readline().split()}


def test_worlds_of_two_processes_are_disjoint():
    with holder(2) as one, holder(2) as other:
        first, second = slots_of(one), slots_of(other)
    assert len(first) == len(second) == 2
    assert not first & second


def test_a_world_in_this_process_is_disjoint_from_another_process():
    with holder(3) as other:
        theirs = slots_of(other)
        with leases.lease("cpu", 1) as mine:
            assert theirs | set(mine) == {0, 1, 2, 3}


def test_a_world_waits_until_whole_and_says_what_came_free():
    with holder(3) as other:
        slots_of(other)
        with pytest.raises(TimeoutError, match="1 of 2 cpu slots came free"), leases.lease("cpu", 2, timeout=0.1):
            pass
    with leases.lease("cpu", 4, timeout=5) as slots:  # what the failed attempt had taken is free as well
        assert slots == [0, 1, 2, 3]


def test_slots_come_free_when_their_holder_is_killed():
    with holder(4) as other:
        assert slots_of(other) == {0, 1, 2, 3}
        other.kill()
        with leases.lease("cpu", 4, timeout=10) as slots:
            assert slots == [0, 1, 2, 3]


def test_slots_come_free_when_a_world_fails():
    with contextlib.suppress(RuntimeError), leases.lease("cpu", 4):
        raise RuntimeError
    with leases.lease("cpu", 4, timeout=1):
        pass


def test_a_world_larger_than_the_machine_takes_every_core():
    with holder(16) as other:
        assert slots_of(other) == {0, 1, 2, 3}


def test_gpus_that_are_not_there_are_never_waited_for(monkeypatch):
    monkeypatch.setattr(leases, "gpus", lambda: 1)
    with pytest.raises(LookupError, match="2 NCCL ranks need 2 GPUs; this machine has 1"), leases.lease("cuda", 2):
        pass


def test_cores_and_gpus_are_leased_apart(monkeypatch):
    monkeypatch.setattr(leases, "gpus", lambda: 4)
    with holder(4) as other:
        slots_of(other)
        with leases.lease("cuda", 4, timeout=1) as slots:
            assert slots == [0, 1, 2, 3]


@pytest.mark.parametrize(("cores", "ranks", "worlds"), [(4, 2, 2), (5, 2, 2), (16, 4, 4), (2, 2, 1), (1, 2, 1), (2, 4, 1)])
def test_whole_worlds_fit_side_by_side_and_one_always_does(monkeypatch, cores, ranks, worlds):
    monkeypatch.setattr(leases, "cores", lambda: cores)
    assert leases.whole_worlds("cpu", ranks) == worlds


def test_whole_worlds_of_gpus_count_gpus(monkeypatch):
    monkeypatch.setattr(leases, "gpus", lambda: 8)
    assert leases.whole_worlds("cuda") == 4


def test_exclusive_names_the_lock_that_another_process_holds(tmp_path):
    with leases.exclusive(tmp_path / "a.lock"):
        with pytest.raises(TimeoutError, match=r"a\.lock"), leases.exclusive(tmp_path / "a.lock", timeout=0.05):
            pass
        with leases.exclusive(tmp_path / "b.lock", timeout=0.05):
            pass
