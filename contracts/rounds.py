"""Judging for as long as there is time: round after round of freshly drawn cases."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from contracts.judging import Contract
from contracts.suite import PROFILES, Profile, Suite, Verdict

ROUND = PROFILES["ci"].examples
"""Cases a kind in a round: few, so that every contract has its turn early and no family waits for another's end."""


def judge_for(
    seconds: float,
    chosen: Sequence[Contract],
    profile: Profile,
    make_suite: Callable[..., Suite],
    told: Callable[[Suite, Contract, Verdict], None],
    round_begins: Callable[[int, int], None],
) -> list[Verdict]:
    """Judge `chosen` in rounds until `seconds` are over; each round draws with a seed of its own.

    What is broken or unknown is told once, when it is found, and not looked for again. Verdicts add up over the rounds.

    Args:
        make_suite: called with `profile` and `until` for each round.
        told: called with each verdict that is new: in the first round with all, later with what is no longer kept.
        round_begins: called with the round's number, from 1, and its seed.
    """
    until = time.monotonic() + seconds
    sums: dict[str, Verdict] = {}
    number = 0
    while number == 0 or time.monotonic() < until:
        number += 1
        suite = make_suite(profile=replace(profile, examples=ROUND), until=until)
        round_begins(number, suite.seed)
        for contract in chosen:
            before = sums.get(contract.name)
            if before is not None and before.verdict not in ("kept", "not-run"):
                continue
            verdict = suite.verdict(contract)
            sums[contract.name] = verdict if before is None else added(before, verdict)
            if before is None or sums[contract.name].verdict != before.verdict:
                told(suite, contract, verdict)
    return list(sums.values())


def added(before: Verdict, later: Verdict) -> Verdict:
    """Both rounds' evidence under the graver verdict of the two."""
    gravest = later if later.verdict in ("broken", "unknown") or before.verdict == "not-run" else before
    parts: dict[str, Any] = {
        "cases": before.cases + later.cases,
        "evidence": before.evidence + later.evidence,
        "worlds": sorted({*before.worlds, *later.worlds}),
        "meshes": sorted({*before.meshes, *later.meshes}),
        "modes": sorted({*before.modes, *later.modes}),
        "census": before.census + later.census,
        "seconds": round(before.seconds + later.seconds, 3),
    }
    return replace(gravest, **parts)
