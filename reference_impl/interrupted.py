"""The fine-tune, killed half-way and resumed, beside one that was left alone.

    python -m reference_impl.interrupted --ranks 2 --out report

Trains twice under torchrun: once undisturbed, and once with a rank killed by SIGKILL half-way and the same command given
again, which resumes by itself. Exits 1 unless the resumed losses equal the undisturbed ones bit for bit and MRR@10 on
modules never trained on rose by at least ``--gain``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SETTINGS = ("checkpoint_every_steps=5", "save_mode=thread", "eval_queries=150", "warmup_steps=3")
"""A checkpoint every few steps, so that a short run has some to lose; evaluation on few queries, since it runs twice."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reference_impl.interrupted", description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="world size (default: 2)")
    parser.add_argument("--steps", type=int, default=28, help="optimizer steps of the whole run (default: 28)")
    parser.add_argument("--gain", type=float, default=0.25, help="by how much MRR@10 has to rise (default: 0.25)")
    parser.add_argument(
        "--out", type=Path, default=Path("report"), help="where finetune.json and loss.png go (default: report)"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where the two runs are made afresh (default: runs)")
    options = parser.parse_args(arguments)
    alone, interrupted = options.runs / "undisturbed", options.runs / "interrupted"
    for run in (alone, interrupted):
        shutil.rmtree(run, ignore_errors=True)

    print(f"fine-tuning undisturbed, {options.steps} steps on {options.ranks} ranks", flush=True)
    _train(options, alone, "evaluate_around_training=false").wait_for(0)

    half = options.steps // 2 + 2  # between two checkpoints, so that steps are lost and taken again
    print(
        f"fine-tuning again, until rank {options.ranks - 1} is killed after step {half}; torchrun then says so at length",
        flush=True,
    )
    running = _train(options, interrupted)
    _await_step(running, interrupted, half)
    running.kill_last_rank()
    running.wait_for_failure()
    lost = _losses(interrupted)
    print(f"killed after step {max(lost)}; giving the same command again", flush=True)
    _train(options, interrupted).wait_for(0)

    losses, expected = _losses(interrupted), _losses(alone)
    before, after = (record["mrr@10"] for record in _records(interrupted, "evaluation"))
    differ = [step for step in expected if losses.get(step) != expected[step]]
    result = {
        "steps": options.steps,
        "killed_after_step": max(lost),
        "checkpoints": sorted(path.name for path in interrupted.glob("step_*")),
        "losses_that_differ": differ,
        "mrr@10": {"before": before, "after": after, "gain": after - before},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "finetune.json").write_text(json.dumps(result, indent=1) + "\n")
    shutil.copy(interrupted / "loss.png", options.out / "loss.png")
    print(f"MRR@10 on unseen modules: {before:.4f} before, {after:.4f} after")
    print(
        f"losses of all {len(expected)} steps equal the undisturbed run's" if not differ else f"losses differ at steps {differ}"
    )
    return 0 if not differ and after - before >= options.gain else 1


class _Running:
    """A torchrun command and its ranks."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def kill_last_rank(self) -> None:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        ranks = sorted(int(pid) for file in children for pid in file.read_text().split())
        os.kill(ranks[-1], signal.SIGKILL)

    def wait_for(self, status: int) -> None:
        if (seen := self.process.wait()) != status:
            raise SystemExit(f"the fine-tune exited with {seen}")

    def wait_for_failure(self) -> None:
        if self.process.wait() == 0:
            raise SystemExit("the fine-tune exited with 0 although a rank had been killed")


def _train(options: argparse.Namespace, run: Path, *more: str) -> _Running:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.ranks}",
        "-m", "reference_impl", "train", f"output_dir={run}", f"steps={options.steps}", *SETTINGS, *more,
    ]  # fmt: skip
    return _Running(subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}))


def _await_step(running: _Running, run: Path, step: int) -> None:
    while step not in _losses(run):
        if running.process.poll() is not None:
            raise SystemExit(f"the fine-tune exited with {running.process.returncode} before step {step}")
        time.sleep(0.05)


def _records(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [record for line in lines if line.endswith("\n") and (record := json.loads(line))["kind"] == kind]


def _losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in _records(run, "train")}


if __name__ == "__main__":
    sys.exit(main())
