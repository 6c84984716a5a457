"""The command trains, is killed, resumes by itself and evaluates; what cannot be used is said plainly."""

import json
import subprocess
import sys

import pytest

from conftest import HERE, MODULE, environment, launch, losses, settings
from reference_impl.__main__ import main
from reference_impl.errors import PeerError


def run(*arguments):
    return subprocess.run([sys.executable, *MODULE, *arguments], env=environment(), capture_output=True, text=True, timeout=120)


def test_help_documents_every_option():
    done = run("--help")
    assert done.returncode == 0 and "train_n_passages=5" in done.stdout and "checkpoint_every_steps=100" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "lerning_rate=1"], "did you mean 'learning_rate'"),
        (["train", "absent.yaml"], "absent.yaml"),
        (["train", "model=/nowhere", "device=cpu"], "no config.json"),
    ],
)
def test_bad_usage_is_one_plain_line_and_exit_2(arguments, said):
    done = run(*arguments)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("result", "status", "said"),
    [
        ({"stopped": None}, 0, ""),
        ({"stopped": "SIGTERM"}, 75, ""),
        (PeerError("writing failed on 1 of 2 ranks"), 1, "writing failed on 1 of 2 ranks\nwhat was published before stays"),
    ],
)
def test_the_exit_status_says_how_a_run_ended(result, status, said, monkeypatch, capsys):
    def train(config):
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("reference_impl.run.train", train)
    assert main(["train"]) == status
    assert said in capsys.readouterr().err


def test_a_killed_run_resumes_by_itself_and_ends_as_if_it_had_not_been(tiny, whole):
    killed = launch(
        2,
        str(HERE / "killed_run.py"),
        "8",
        *settings(tiny, "killed", checkpoint_every_steps=3, save_mode="process"),
        ends=1,
    )
    assert "SIGKILL" in killed.stderr
    assert "step_3" in {path.name for path in (tiny / "killed").iterdir()}
    done = launch(2, *MODULE, "train", *settings(tiny, "killed", checkpoint_every_steps=3))
    assert "resumed at step" in done.stderr
    assert losses(tiny / "killed") == losses(whole) and len(losses(whole)) == 12
    assert (tiny / "killed" / "loss.png").exists()
    assert sorted(path.name for path in (tiny / "killed").glob("*step_*")) == ["step_12", "step_9"]
    alone = run("evaluate", *settings(tiny, "killed", max_length=7))
    result, after = json.loads(alone.stdout.splitlines()[-1]), json.loads(done.stdout.splitlines()[-1])["after"]
    assert result["checkpoint"].endswith("step_12") and result["mrr@10"] == pytest.approx(after["mrr@10"])
