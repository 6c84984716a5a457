"""`launch` on real processes: each way a rank can end gives the right evidence in time, and nothing outlives the call."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch._dynamo  # torch imports it to report a rank's failure: 1.2 s in each rank if not done before the fork
import torch.distributed as dist

from contracts import processes
from contracts.torchrun import Launch, LaunchError, RankOutcome, launch

LONG = datetime.timedelta(seconds=60)
"""Never reached: peers of a rank that died learn of it from its sockets."""
SHORT = datetime.timedelta(seconds=2)
"""What a rank waits for a peer that lives and does not come."""
IN_TIME = 30.0
"""A launch that fails by itself needs about a second; the rest is room for a busy machine."""


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path, monkeypatch):
    """Every process below a test works in the test's own folder, wherever it is re-parented to; afterwards none does."""
    temporary, work = tmp_path / "temporary", tmp_path / "work"
    temporary.mkdir(), work.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.chdir(work)
    files = open_files()
    yield
    assert processes_in(work) - {os.getpid()} == set()
    assert list(temporary.iterdir()) == []
    assert open_files() == files


def processes_in(folder: Path) -> set[int]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if os.readlink(link) == str(folder):
                found.add(int(link.parent.name))
        except OSError:  # Ended meanwhile, or a zombie, which has no folder any more.
            continue
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def rank() -> int:
    return int(os.environ["RANK"])


def meet() -> None:
    dist.init_process_group("gloo", timeout=LONG)
    dist.barrier()


# --- ranks that return -----------------------------------------------------------------------------------------------


def write_environment(folder: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GREETING")
    meet()
    total = torch.ones(())
    dist.all_reduce(total)
    lines = [f"{name}={os.environ[name]}" for name in names]
    Path(folder, f"{rank()}.txt").write_text("\n".join([*lines, f"total={total.item():.0f}"]))
    dist.destroy_process_group()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_every_rank_returns_and_has_the_whole_torchrun_environment(tmp_path, start_method):
    result = launch(
        write_environment, 2, args=(str(tmp_path),), start_method=start_method, env={"GREETING": "hello"}, timeout=120
    )
    assert result.ok, result.explain()
    assert [outcome.status for outcome in result.outcomes] == ["returned", "returned"]
    seen = [dict(line.split("=") for line in (tmp_path / f"{r}.txt").read_text().splitlines()) for r in (0, 1)]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"], one["total"]) for one in seen] == [
        ("0", "0", "2", "2"),
        ("1", "1", "2", "2"),
    ]
    assert seen[0]["MASTER_PORT"] == seen[1]["MASTER_PORT"]
    assert all(one["MASTER_ADDR"] and one["TORCHELASTIC_RUN_ID"] and one["GREETING"] == "hello" for one in seen)
    assert "GREETING" not in os.environ


def test_raise_for_failure_returns_a_launch_that_went_well():
    result = launch(os.getpid, 1)
    assert result.raise_for_failure() is result
    assert result.primary is None
    assert result.explain() == "1 ranks returned"


def count_threads_of_the_agent(folder: str) -> None:
    Path(folder, str(rank())).write_text(str(len(os.listdir(f"/proc/{os.getppid()}/task"))))


def test_ranks_are_forked_from_a_single_thread(tmp_path):
    """A lock that another thread holds in that moment would never be released in the rank."""
    launch(count_threads_of_the_agent, 2, args=(str(tmp_path),)).raise_for_failure()
    assert {(tmp_path / name).read_text() for name in "01"} == {"1"}


def test_a_given_directory_keeps_status_and_logs(tmp_path):
    result = launch(print, 1, args=("kept",), directory=tmp_path / "evidence")
    assert result.ok
    assert (tmp_path / "evidence" / "rank-0.log").read_text() == "kept\n"


def test_a_launch_goes_to_json_and_back():
    result = launch(os._exit, 1, args=(3,), timeout=IN_TIME)
    assert Launch.from_json(result.to_json()) == result


# --- ranks that fail -------------------------------------------------------------------------------------------------


def dies() -> None:
    meet()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_killed_rank_comes_first_and_its_peer_as_a_consequence():
    result = launch(dies, 2, timeout=IN_TIME)
    assert not result.timed_out
    assert (result.primary.rank, result.primary.status, result.primary.signal) == (1, "killed", "SIGKILL")
    assert result.outcomes[0].is_consequence, result.explain()
    assert result.explain().startswith("rank 1 was killed by SIGKILL\nthen: rank 0 ")


def dies_while_its_peer_computes() -> None:
    meet()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        time.sleep(0.01)


def test_a_killed_rank_comes_first_where_its_peer_would_never_have_noticed():
    result = launch(dies_while_its_peer_computes, 2, timeout=IN_TIME)
    assert not result.timed_out
    assert (result.primary.rank, result.primary.status) == (1, "killed"), result.explain()
    assert result.outcomes[0].status == "terminated"


def never_comes_back() -> None:
    while True:
        time.sleep(0.01)


def hangs(timeout: datetime.timedelta) -> None:
    meet()
    if rank() == 1:
        never_comes_back()
    dist.barrier(group=dist.group.WORLD) if timeout == LONG else wait_for_a_while(timeout)


def wait_for_a_while(timeout: datetime.timedelta) -> None:
    options = dist.AllreduceOptions()
    options.timeout = timeout
    dist.group.WORLD.allreduce([torch.ones(())], options).wait()


def test_a_hung_rank_is_named_with_its_stack_at_the_deadline():
    result = launch(hangs, 2, args=(LONG,), timeout=5)
    assert result.timed_out
    assert result.seconds < 5 + 5
    assert (result.primary.rank, result.primary.status) == (1, "terminated"), result.explain()
    assert "in never_comes_back" in result.primary.stacks
    assert "in never_comes_back" in result.explain()
    assert result.outcomes[0].waits_for_peers
    assert result.explain().splitlines()[-1] == "then: rank 0 waited for its peers when it was ended"


def test_a_hung_rank_is_named_with_its_stack_when_its_peer_gives_up_first():
    result = launch(hangs, 2, args=(SHORT,), timeout=IN_TIME)
    assert not result.timed_out
    assert (result.primary.rank, result.primary.status) == (1, "terminated"), result.explain()
    assert "in never_comes_back" in result.primary.stacks
    assert result.outcomes[0].is_consequence


def hangs_deaf_to_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if rank() == 1:
        os._exit(5)
    never_comes_back()


def test_a_rank_that_exited_comes_first_where_its_peer_holds_on_until_the_deadline():
    result = launch(hangs_deaf_to_sigterm, 2, timeout=3)
    assert result.timed_out
    assert (result.primary.rank, result.primary.status, result.primary.exitcode) == (1, "exited", 5), result.explain()


def leaves_early(code: int) -> None:
    meet()
    if rank() == 1:
        os._exit(code)
    dist.barrier()


@pytest.mark.parametrize("code", [0, 3])
def test_a_rank_that_exits_without_returning_comes_first_whatever_its_code(code):
    result = launch(leaves_early, 2, args=(code,), timeout=IN_TIME)
    assert not result.timed_out
    assert (result.primary.rank, result.primary.status, result.primary.exitcode) == (1, "exited", code), result.explain()
    assert result.outcomes[0].is_consequence


def leaves_early_unnoticed() -> None:
    if rank() == 1:
        os._exit(0)


def test_a_silent_exit_that_no_peer_waits_for_is_seen_long_before_the_deadline():
    result = launch(leaves_early_unnoticed, 2, timeout=IN_TIME)
    assert not result.timed_out
    assert result.outcomes[0].status == "returned"
    assert (result.primary.rank, result.primary.status, result.primary.exitcode) == (1, "exited", 0), result.explain()


def raises_alone() -> None:
    meet()
    if rank() == 1:
        raise ValueError("layer 3 has no weight")
    dist.barrier()


def test_a_rank_that_raises_alone_comes_first_with_its_traceback():
    result = launch(raises_alone, 2, timeout=IN_TIME)
    assert not result.timed_out
    assert (result.primary.rank, result.primary.error) == (1, "ValueError: layer 3 has no weight"), result.explain()
    assert "in raises_alone" in result.primary.traceback
    assert result.outcomes[0].is_consequence


def raises_after_its_peer_has_noticed(folder: str) -> None:
    meet()
    if rank() == 1:
        try:
            raise ValueError("layer 3 has no weight")
        finally:
            dist.destroy_process_group()
            never_comes_back()
    dist.barrier()


def test_a_rank_that_raised_comes_first_though_its_peers_error_came_earlier(tmp_path):
    result = launch(raises_after_its_peer_has_noticed, 2, args=(str(tmp_path),), timeout=IN_TIME)
    assert not result.timed_out
    assert result.outcomes[0].ended <= result.outcomes[1].ended
    assert (result.primary.rank, result.primary.error) == (1, "ValueError: layer 3 has no weight"), result.explain()


def dies_before_it_meets() -> None:
    if rank() == 1:
        os._exit(3)
    dist.init_process_group("gloo", timeout=SHORT)


def test_a_rank_that_never_came_to_the_meeting_comes_first():
    result = launch(dies_before_it_meets, 2, timeout=IN_TIME)
    assert (result.primary.rank, result.primary.status) == (1, "exited"), result.explain()


def calls_another_collective() -> None:
    meet()
    options = dist.BroadcastOptions()
    options.timeout = SHORT
    if rank() == 1:
        options.rootRank = 0
        dist.group.WORLD.broadcast([torch.ones(3)], options).wait()
    wait_for_a_while(SHORT)


def test_a_mismatched_collective_shows_where_every_rank_waited():
    result = launch(calls_another_collective, 2, timeout=IN_TIME)
    assert not result.timed_out
    assert all(outcome.is_consequence for outcome in result.outcomes)
    text = result.explain()
    assert text.startswith("no rank failed for a reason of its own")
    assert "in wait_for_a_while" in text
    assert "in calls_another_collective" in text
    assert "rank 0 raised" in text and "rank 1 raised" in text


def skips_a_collective() -> None:
    meet()
    if rank() == 0:
        wait_for_a_while(SHORT)


def test_a_rank_that_skipped_a_collective_is_named_beside_the_one_that_waited():
    text = launch(skips_a_collective, 2, timeout=IN_TIME).explain()
    assert "rank 0 raised" in text
    assert "rank 1 returned" in text


def floods() -> None:
    for number in range(80_000):
        print(f"{number:06d}", "x" * 100)
    raise ValueError("after 8 MB of output")


def test_a_flood_of_output_ends_in_a_short_tail():
    result = launch(floods, 2, timeout=IN_TIME)
    assert result.primary.error == "ValueError: after 8 MB of output", result.explain()
    assert "079999 xxx" in result.primary.log
    assert all(len(outcome.log) <= 4000 for outcome in result.outcomes)


def test_a_failure_is_raised_with_the_whole_story():
    with pytest.raises(LaunchError, match="rank 1 raised ValueError: layer 3 has no weight") as caught:
        launch(raises_alone, 2, timeout=IN_TIME).raise_for_failure()
    assert caught.value.launch.primary.rank == 1


# --- children of ranks -----------------------------------------------------------------------------------------------


def starts_a_program(folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(folder, f"{rank()}.pid").write_text(str(child.pid))


def test_a_program_that_a_rank_left_running_is_reported_and_ended(tmp_path):
    result = launch(starts_a_program, 2, args=(str(tmp_path),), timeout=IN_TIME)
    pids = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert not result.ok
    assert sorted(result.left_behind) == sorted(f"process {pid} (sleep 600)" for pid in pids)
    assert all(outcome.status == "returned" for outcome in result.outcomes)
    assert not any(is_alive(pid) for pid in pids)
    assert result.explain().startswith("left behind: process ")


def forks_a_child(folder: str, ending: str) -> None:
    # It inherits the pipe by which the agent learns of the rank's end, as the workers of a DataLoader do.
    pid = os.fork()
    if pid == 0:
        os.setsid()
        never_comes_back()
    Path(folder, f"{rank()}.pid").write_text(str(pid))
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "exited":
        os._exit(0)


@pytest.mark.parametrize("ending", ["returned", "exited", "killed"])
def test_a_forked_child_is_reported_and_hides_nothing_of_its_ranks_end(tmp_path, ending):
    result = launch(forks_a_child, 2, args=(str(tmp_path), ending), timeout=IN_TIME)
    assert not result.timed_out
    assert [outcome.status for outcome in result.outcomes] == [ending, ending], result.explain()
    assert len(result.left_behind) == 2
    assert not any(is_alive(int(file.read_text())) for file in tmp_path.glob("*.pid"))


def hangs_with_a_child(folder: str) -> None:
    starts_a_program(folder)
    never_comes_back()


def test_the_deadline_ends_the_children_of_ranks_too(tmp_path):
    result = launch(hangs_with_a_child, 1, args=(str(tmp_path),), timeout=3)
    assert result.timed_out
    assert not is_alive(int((tmp_path / "0.pid").read_text()))


def test_a_killed_group_is_awaited_though_nobody_is_its_parent():
    command = ["sh", "-c", "sleep 600 & echo $!; wait"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as leader:
        orphan = int(leader.stdout.readline())
        os.killpg(leader.pid, signal.SIGKILL)
    processes.wait_for_group(leader.pid)
    assert not processes.is_running(orphan)


def test_other_children_of_the_launching_process_live_on():
    mine: list[subprocess.Popen] = []

    def start_one(seconds: float) -> None:
        if not mine:
            mine.append(subprocess.Popen(["sleep", "600"]))

    try:
        assert launch(time.sleep, 1, args=(0.2,), on_wait=start_one).ok
        assert mine[0].poll() is None
    finally:
        mine[0].kill()
        mine[0].wait()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- the call itself -------------------------------------------------------------------------------------------------


def test_an_interrupt_while_waiting_ends_the_ranks_and_leaves():
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(never_comes_back, 2, on_wait=interrupt)


def runs_backward_after_a_fork() -> None:
    # As torch says it, with a GPU in the machine, where the launching process ran a backward pass before.
    raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")


def test_a_rank_that_cannot_run_after_a_fork_is_told_to_spawn():
    assert 'pass start_method="spawn"' in launch(runs_backward_after_a_fork, 1, timeout=IN_TIME).explain()


@pytest.mark.parametrize("bad", [{"nproc_per_node": 0}, {"nproc_per_node": -1}, {"timeout": 0}, {"timeout": -1.0}])
def test_a_count_or_timeout_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match="must be positive, got"):
        launch(os.getpid, **bad)


def test_another_platform_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RuntimeError, match=r"this is darwin\. Use a Linux machine"):
        launch(os.getpid)


def test_a_function_that_cannot_be_spawned_is_explained_by_the_agents_own_words():
    result = launch(lambda: None, 1, start_method="spawn", timeout=IN_TIME)
    assert [outcome.status for outcome in result.outcomes] == ["missing"]
    assert "pickle" in result.explain()


# --- reading stacks --------------------------------------------------------------------------------------------------


def a_stack(file: str, function: str, *, current: bool = False) -> str:
    thread = "Current thread" if current else "Thread"
    return f'{thread} 0x00007f (most recent call first):\n  File "{file}", line 1 in {function}\n'


IN_A_COLLECTIVE = "/site-packages/torch/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("main", "helper", "waits"),
    [(IN_A_COLLECTIVE, "work.py", True), ("work.py", IN_A_COLLECTIVE, False), ("a.py", "b.py", False)],
)
def test_a_rank_waits_for_its_peers_when_its_main_thread_does(main, helper, waits):
    stacks = a_stack(helper, "saves") + "\n" + a_stack(main, "main", current=True)
    assert RankOutcome(0, "terminated", stacks=stacks).waits_for_peers is waits


def waits_in_a_thread() -> None:
    meet()
    if rank() == 1:
        threading.Thread(target=dist.barrier, daemon=True).start()
    never_comes_back()


def test_stacks_of_every_thread_are_kept():
    result = launch(waits_in_a_thread, 2, timeout=5)
    assert "in barrier" in result.outcomes[1].stacks, result.explain()
    assert not result.outcomes[1].waits_for_peers
