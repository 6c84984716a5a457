"""Every crash point of the smallest save: kill each rank at each file event of it, resume, and say what came of it.

    python -m contracts.crash_points reference --ranks 2 --mode thread
    python -m contracts.crash_points reference --ranks 2 --power-loss
    python -m contracts.crash_points reference --ranks 2 --torn

A control run that nothing befalls counts the events of the second save, of its publication and of the removal of the
first. Then each is a case of its own: a run that ends there, and new processes that resume, go on and save. With
`--power-loss` the power is lost there, and before each flush, twice over: once unflushed names and bytes are gone, once
bytes alone. With `--torn` a rank dies in the middle of each file that it opens. Prints a line per point, and how many a
minute were visited, resume included.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import contracts.catalog  # noqa: F401  fills the registry
from contracts.bindings.known import resolve
from contracts.case import Case
from contracts.history import GenerationHistory, History
from contracts.judging import REGISTRY
from contracts.lab.lab import Lab
from contracts.saves import kill_point
from contracts.strategies.saves import crash_case, power_case

NEVER = 1_000_000
"""No save has that many file events, so a kill there does not strike: that is the control run."""
OUTCOMES = ("is lost", "lost work", "refuses to start", "silently differs", "hangs", "no whole checkpoint")


def points(lab: Lab, ranks: int, mode: str, *, power_loss: bool = False, torn: bool = False) -> Iterator[Case]:
    """A case for each file event that a rank's second save has in a control run.

    For each flush, too, if the power is lost; for each file that is opened alone, if that is torn.

    Raises:
        RuntimeError: the control run failed.
    """
    case = crash_case(ranks, mode, 0, NEVER)
    (control,) = lab.run(replace(case, generations=case.generations[:1])).generations
    if not control.launch.ok:
        raise RuntimeError(f"the control run failed: {control.launch.explain()}")
    for rank in range(ranks):
        if torn:
            for event in range(events_of_second_save(control, rank, "attempt", operation="open")):
                yield _resumed_once(crash_case(ranks, mode, rank, event, torn=True))
            continue
        for event in range(events_of_second_save(control, rank, *("attempt", "flush")[: 1 + power_loss])):
            if power_loss:
                yield _resumed_once(power_case(ranks, mode, rank, event, "names and bytes"))
                yield _resumed_once(power_case(ranks, mode, rank, event, "bytes"))
            else:
                yield _resumed_once(crash_case(ranks, mode, rank, event))


def _resumed_once(case: Case) -> Case:
    """Without the second resume, from the save that follows the first one; the contract's own cases have it."""
    return replace(case, generations=case.generations[:2])


def events_of_second_save(control: GenerationHistory, rank: int, *kinds: str, operation: str | None = None) -> int:
    """How many events of these kinds `rank` itself had from its second save on; those of its writer process end no rank."""
    second = control.of("save-begins", rank=rank)[1].order
    (begins,) = control.of("begins", rank=rank)
    its = [event for event in control.of(*kinds, rank=rank) if event.data["pid"] == begins.data["pid"]]
    return sum(event.order > second and operation in (None, event.operation) for event in its)


@dataclass(frozen=True)
class Outcome:
    """What came of one crash point: in one word or two, where it was, and what else there is to say."""

    outcome: str
    point: str
    told: str = ""

    def __str__(self) -> str:
        return f"{self.outcome:17} {self.told or self.point}"


def outcome(history: History, contract: str = "crash.every-crash-point") -> Outcome:
    """What came of the crash point that a history is of."""
    judgement = REGISTRY[contract](history)
    point = kill_point(history.generations[0]) or ""
    if judgement.verdict == "kept":
        return Outcome("resumes exactly", point)
    found = next((name for name in OUTCOMES if name in judgement.message), judgement.verdict)
    return Outcome(found, point, judgement.message.splitlines()[0])


def visit(lab: Lab, ranks: int, mode: str, *, power_loss: bool = False, torn: bool = False) -> Iterator[Outcome]:
    """Visit every point, one after the other."""
    contract = "crash.power-loss" if power_loss else "crash.every-crash-point"
    for case in points(lab, ranks, mode, power_loss=power_loss, torn=torn):
        yield outcome(lab.run(case), contract)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("implementation", help="reference, torch_dcp, a mutant's name, or module:Class")
    parser.add_argument("--ranks", type=int, default=1, help="world size (1)")
    parser.add_argument("--mode", choices=["sync", "thread", "process"], default="sync", help="who writes the shards (sync)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--power-loss", action="store_true", help="lose the power there instead, and before each flush")
    how.add_argument("--torn", action="store_true", help="kill the rank in the middle of each file instead")
    parser.add_argument("--python", default=None, help="interpreter of the environment the implementation lives in")
    parser.add_argument("--directory", type=Path, default=Path(".contracts"), help="where evidence is kept (.contracts)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    options = parser.parse_args()
    target = resolve(options.implementation, python=options.python)
    seen: list[Outcome] = []
    with Lab(target.implementation, python=target.python, directory=options.directory) as lab:
        lab.about()  # the parent is warm
        started = time.monotonic()
        for point in visit(lab, options.ranks, options.mode, power_loss=options.power_loss, torn=options.torn):
            seen.append(point)
            print(point, flush=True)
        minutes = (time.monotonic() - started) / 60
    counts = collections.Counter(point.outcome for point in seen)
    told = ", ".join(f"{number}: {outcome}" for outcome, number in counts.most_common())
    what = "power is lost" if options.power_loss else "a file is torn" if options.torn else "a rank is killed"
    print(
        f"{options.implementation}, {options.ranks} ranks, {options.mode}: {what} at {len(seen)} points "
        f"({len(seen) / minutes:.0f} a minute), of which {told}"
    )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        about = {"implementation": options.implementation, "ranks": options.ranks, "mode": options.mode}
        table = {**about, "power_loss": options.power_loss, "torn": options.torn, "points": [asdict(point) for point in seen]}
        options.json.write_text(json.dumps(table, indent=1))
    return 0 if set(counts) == {"resumes exactly"} else 1


if __name__ == "__main__":
    sys.exit(main())
