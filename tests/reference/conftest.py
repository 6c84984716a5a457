"""Shared pieces of the reference's tests: a tiny model and data on disk, and launches of real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # For tiny.py and rank_work.py, here and in the ranks.

from tiny import make_tiny_data, make_tiny_model  # noqa: E402


def environment() -> dict[str, str]:
    paths = [str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }


def launch(world: int, *command: str, ends: int = 0, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """torchrun ``command`` on ``world`` ranks of this machine; fails the test with their output unless it ends as told."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
    done = subprocess.run([*torchrun, *command], env=environment(), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == ends, f"torchrun {' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


MODULE = ["-m", "reference_impl"]


def settings(tiny: Path, name: str, **options) -> list[str]:
    """The command's arguments for a short run on the tiny model."""
    values = {
        "model": tiny / "model",
        "data": tiny / "data.jsonl",
        "eval_data": tiny / "data.jsonl",
        "output_dir": tiny / name,
        "device": "cpu",
        "batch_size": 2,
        "train_n_passages": 3,
        "eval_n_passages": 4,
        "eval_batch_size": 2,
        "steps": 12,
        "progress": "false",
        **options,
    }
    return [f"{key}={value}" for key, value in values.items()]


def losses(folder: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training step that the run's metrics hold."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "train"]


@pytest.fixture(scope="session")
def whole(tiny) -> Path:
    """The output of a run of two ranks that nothing disturbed."""
    launch(2, *MODULE, "train", *settings(tiny, "whole", checkpoint_every_steps=3))
    return tiny / "whole"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A folder with ``model`` (float32), ``model16`` (the same in bfloat16) and ``data.jsonl``."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    root = tmp_path_factory.mktemp("tiny")
    make_tiny_model(root / "model")
    make_tiny_model(root / "model16", dtype="bfloat16")
    make_tiny_data(root / "data.jsonl")
    return root
