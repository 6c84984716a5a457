"""Every crash point of the smallest save: kill each rank at each file event of it, resume, and say what came of it.

    python -m contracts.crash_points reference --ranks 2 --mode thread
    python -m contracts.crash_points reference --ranks 2 --power-loss

A control run that nothing befalls counts the events of the second save, of its publication and of the removal of the
first. Then each is a case of its own. With `--power-loss` the power is lost there, and before each flush, twice over: once
unflushed names and bytes are gone, once bytes alone. Prints a line per point, and how many a minute were visited, resume
included.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import contracts.catalog  # noqa: F401  fills the registry
from contracts.bindings.known import resolve
from contracts.case import Case
from contracts.history import GenerationHistory, History
from contracts.judging import REGISTRY
from contracts.lab.lab import Lab
from contracts.saves import kill_point
from contracts.strategies import crash_case, power_case

NEVER = 1_000_000
"""No save has that many file events, so a kill there does not strike: that is the control run."""
OUTCOMES = ("is lost", "lost work", "refuses to start", "silently differs", "hangs", "no whole checkpoint")


def points(lab: Lab, ranks: int, mode: str, *, power_loss: bool = False) -> Iterator[Case]:
    """A case for each file event that a rank's second save has in a control run; for each flush, too, if the power is lost.

    Raises:
        RuntimeError: the control run failed.
    """
    control = lab.run(crash_case(ranks, mode, 0, NEVER)).generations[0]
    if not control.launch.ok:
        raise RuntimeError(f"the control run failed: {control.launch.explain()}")
    for rank in range(ranks):
        for event in range(events_of_second_save(control, rank, *("attempt", "flush")[: 1 + power_loss])):
            if power_loss:
                yield power_case(ranks, mode, rank, event, "names and bytes")
                yield power_case(ranks, mode, rank, event, "bytes")
            else:
                yield crash_case(ranks, mode, rank, event)


def events_of_second_save(control: GenerationHistory, rank: int, *kinds: str) -> int:
    """How many events of these kinds `rank` had from the beginning of its second save on."""
    second = control.of("save-begins", rank=rank)[1].order
    return sum(event.order > second for event in control.of(*kinds, rank=rank))


def outcome(history: History, contract: str = "crash.every-crash-point") -> tuple[str, str]:
    """What came of a crash point, and in which words."""
    judgement = REGISTRY[contract](history)
    if judgement.verdict == "kept":
        return "resumes exactly", kill_point(history.generations[0]) or ""
    found = next((name for name in OUTCOMES if name in judgement.message), judgement.verdict)
    return found, judgement.message.splitlines()[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("implementation", help="reference, torch_dcp, a mutant's name, or module:Class")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--mode", choices=["sync", "thread", "process"], default="sync")
    parser.add_argument("--power-loss", action="store_true", help="lose the power there instead, and before each flush")
    parser.add_argument("--python", default=None, help="interpreter of the environment the implementation lives in")
    parser.add_argument("--directory", type=Path, default=Path(".contracts"))
    options = parser.parse_args()
    target = resolve(options.implementation, python=options.python)
    contract = "crash.power-loss" if options.power_loss else "crash.every-crash-point"
    seen: collections.Counter[str] = collections.Counter()
    with Lab(target.implementation, python=target.python, directory=options.directory) as lab:
        cases = list(points(lab, options.ranks, options.mode, power_loss=options.power_loss))
        started = time.monotonic()
        for case in cases:
            what, words = outcome(lab.run(case), contract)
            seen[what] += 1
            print(f"{what:17} {words}", flush=True)
        minutes = (time.monotonic() - started) / 60
    print(
        f"{len(cases)} points, {len(cases) / minutes:.0f} a minute: "
        + ", ".join(f"{n} {what}" for what, n in seen.most_common())
    )
    return 0 if set(seen) == {"resumes exactly"} else 1


if __name__ == "__main__":
    sys.exit(main())
