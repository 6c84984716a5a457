"""Faults as they come: SIGTERM, an agent that is killed, a disk that is full, a directory that somebody removes.

Each time the reference says what happened, keeps what was published, and leaves nothing running.
"""

import json
import subprocess
import sys
import time

from conftest import HERE, MODULE, environment, launch, losses, settings
from contracts.processes import children, is_running


def about(checkpoint):
    return json.loads((checkpoint / "save.json").read_text())


def test_a_run_that_is_told_to_stop_and_then_loses_its_agent_ends_as_if_undisturbed(tiny, whole):
    script, options = str(HERE / "stopped_run.py"), settings(tiny, "stopped", checkpoint_every_steps=3, save_mode="thread")
    told = launch(2, script, "4", "SIGTERM", *options, ends=1)
    assert "stopped by SIGTERM at step 5 of 12; resume with the same command" in told.stderr
    loss = dict(losses(tiny / "stopped"))[5]
    assert about(tiny / "stopped" / "step_5") == {"step": 5, "final": False, "metrics": {"loss": loss}}

    # Killed outright, the agent cannot end its ranks, one of which waits here and the other for it.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    agent = subprocess.Popen(
        [*torchrun, script, "8", "SIGKILL", *options], env=environment(), stderr=subprocess.PIPE, text=True
    )
    ranks: set[int] = set()
    while agent.poll() is None:
        ranks |= children(agent.pid)
        time.sleep(0.05)
    said = agent.stderr.read()  # until the last process that holds it is gone
    assert f"resumed at step 5 of 12, from {tiny / 'stopped' / 'step_5'}" in said
    assert "rank 0: torchrun is gone" in said and "rank 1: torchrun is gone" in said
    assert len(ranks) == 2 and not any(map(is_running, ranks))

    done = launch(2, *MODULE, "train", *options)
    assert "resumed at step 6" in done.stderr
    assert losses(tiny / "stopped") == losses(whole)
    assert about(tiny / "stopped" / "step_12")["final"]


def test_full_disks_removed_directories_and_a_script_that_just_ends(tiny):
    launch(2, str(HERE / "faulty_work.py"), "faults", str(tiny))
    assert sorted(path.name for path in (tiny / "in_flight").iterdir()) == ["latest", "step_1"]
