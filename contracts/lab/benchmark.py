"""What the lab saves, beside cold torchruns of the same work and beside ckpt-chaos.

    python -m contracts.lab.benchmark

A generation: the lab and torchrun run the same ranks on the same job, in turn, so that a busy machine slows both. Prints
medians, their ratio, and the share of the lab's time that the ranks themselves were at work.

Checks: every contract judges one case of its kind in a world of two, and what a kind's contracts share is run once.
Beside it, each of these checks as a test of its own that launches its generations with torchrun: their number, times what
such a launch took in the same run.

Crash points: DCP saves in two ranks, killed at each file event and resumed, one at a time; by `contracts.crash_points`, and
by ckpt-chaos 0.1.8 (`pip install ckpt-chaos`) between two such rounds. Each rate is of points, without control runs, and of
all the time that they took, ours once the parent was warm.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from contracts.bindings.known import resolve
from contracts.case import Case, Generation, Save, Train
from contracts.crash_points import visit
from contracts.lab.lab import Lab
from contracts.suite import PROFILES, Suite, select

IMPLEMENTATION = "contracts.bindings.torch_dcp:TorchDCP"
CASE = Case(generations=(Generation(ranks=2, steps=(Train(2), Save())),))
WARM_UP, ROUNDS = 2, 7


def main() -> int:
    _checks(_generation())
    _crash_points()
    return 0


def _generation() -> float:
    """Print the first part; seconds of a cold torchrun."""
    through_lab: list[float] = []
    own_work: list[float] = []
    cold: list[float] = []
    with tempfile.TemporaryDirectory() as directory, Lab(IMPLEMENTATION, directory=Path(directory)) as lab:
        for number in range(WARM_UP + ROUNDS):
            history = lab.run(replace(CASE, seed=number))
            generation = history.generations[0]
            assert generation.failure is None, generation.failure
            job = json.loads((history.directory / "generation-0" / "job.json").read_text())
            seconds = _cold_torchrun(job, Path(directory) / f"cold-{number}")
            if number >= WARM_UP:
                through_lab.append(generation.launch.seconds)
                own_work.append(_own_seconds(history.directory / "generation-0"))
                cold.append(seconds)
    lab_median, cold_median, share = map(
        statistics.median, (through_lab, cold, [own / whole for own, whole in zip(own_work, through_lab, strict=True)])
    )
    print(f"{CASE.generations[0]}, {ROUNDS} rounds in turn, medians")
    print(f"  through the lab    {lab_median:6.2f} s")
    print(f"  cold torchrun      {cold_median:6.2f} s   {cold_median / lab_median:.1f} times as long")
    print(f"  ranks' own work    {share:6.0%}   of the time through the lab")
    return cold_median


def _checks(cold_seconds: float) -> None:
    """Print the second part."""
    checks = launches = 0
    with tempfile.TemporaryDirectory() as directory:
        target = resolve("reference")
        with Suite(target, profile=PROFILES["smoke"], worlds=(2,), directory=Path(directory)) as suite:
            chosen = [contract for contract in select() if suite.applies(contract)]  # and the parent is warm
            started = time.perf_counter()
            for contract in chosen:
                verdict = suite.verdict(contract)
                checks += verdict.cases
                launches += verdict.census.generations
            seconds = time.perf_counter() - started
    print(f"{len(chosen)} contracts, one case of each kind in a world of two: {checks} checks of {launches} generations")
    print(f"  through the suite  {seconds / checks:6.2f} s a check, {seconds / len(chosen):.2f} s a contract")
    each = cold_seconds * launches / checks
    print(f"  cold torchruns     {each:6.2f} s a check   {each * checks / seconds:.1f} times as long")


def _crash_points() -> None:
    """Print the third part."""
    if importlib.util.find_spec("ckpt_chaos") is None:
        print("crash points: ckpt-chaos is not installed here, so there is nothing to put beside ours")
        return
    with tempfile.TemporaryDirectory() as directory:
        first = _our_points(Path(directory) / "first")
        started = time.perf_counter()
        its = subprocess.run(
            [sys.executable, "-m", "ckpt_chaos", "bench", "dcp_ddp", "--ranks", "2", "--jobs", "1"],
            cwd=directory,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        seconds = time.perf_counter() - started
        found = re.search(r"(\d+) save events", its.stdout)
        if found is None:
            raise RuntimeError(f"ckpt-chaos counted no save events:\n{its.stdout}\n{its.stderr}")
        second = _our_points(Path(directory) / "second")
    ours = 60 * (first[0] + second[0]) / (first[1] + second[1])
    theirs = 60 * int(found[1]) / seconds
    print("crash points of DCP saves in two ranks, resume included, one at a time")
    print(f"  through the lab    {ours:6.1f} a minute   {first[0]} points, twice; {ours / theirs:.1f} times as many")
    print(f"  ckpt-chaos         {theirs:6.1f} a minute   {found[1]} points")


def _our_points(directory: Path) -> tuple[int, float]:
    """How many points, and the seconds they took once the parent was warm, their control run included."""
    with Lab(IMPLEMENTATION, directory=directory) as lab:
        lab.about()
        started = time.perf_counter()
        return len(list(visit(lab, 2, "sync"))), time.perf_counter() - started


def _own_seconds(evidence: Path) -> float:
    """From the first rank's beginning to the last one's end, by the marks that they left."""
    times = {kind: [p.stat().st_mtime for p in (evidence / "marks").glob(f"*.{kind}")] for kind in ("begins", "ends")}
    return max(times["ends"]) - min(times["begins"])


def _cold_torchrun(job: dict, evidence: Path) -> float:
    """The same ranks on the same job, from a shell's point of view."""
    (evidence / "marks").mkdir(parents=True)
    (evidence / "run").mkdir()
    job_file = evidence / "job.json"
    job_file.write_text(json.dumps(job | {"evidence": str(evidence), "root": str(evidence / "run")}))
    rank = f"import sys; from contracts.lab.rank import main; main({str(job_file)!r})"
    script = evidence / "rank.py"
    script.write_text(rank + "\n")
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
