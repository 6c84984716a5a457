"""The proof that contracts can fail: mutants are caught by the contract they name, good neighbours by none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from contracts.bindings.known import Target
from contracts.judging import REGISTRY
from contracts.lab.lab import Lab
from contracts.suite import PROFILES, Suite, select

MUTANT_WORLDS = (2, 1, 4)
"""Most mistakes need a second rank and no more, so a world of two comes first."""


@dataclass
class Mutant:
    """What became of a mutant: contracts that called it broken, and the message of the one which had to."""

    name: str
    caught_by: str
    killed_by: list[str]
    ok: bool
    message: str = ""


@dataclass
class Neighbour:
    """What became of a good neighbour: contracts that called it broken, or could not tell."""

    name: str
    broken: list[str]
    ok: bool
    message: str = ""


def prove(
    *,
    device: str = "cpu",
    directory: Path = Path(".contracts"),
    only: str | None = None,
    globs: Sequence[str] = ("*",),
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Mutant | Neighbour]:
    """Judge every mutant of the contracts that `globs` name, and every good neighbour by them; `only` is the name of one."""
    from reference_impl import mutants

    chosen = {contract.name for contract in select(globs)}
    with Lab("reference_impl.under_contract:Reference", device=device, directory=directory) as lab:
        for name, its in mutants.MUTANTS.items():
            if only in (None, name) and its.caught_by in chosen:
                yield judge_mutant(name, its.implementation, its.caught_by, lab, directory, progress)
        for name, implementation in mutants.NEIGHBOURS.items():
            if only in (None, name):
                yield judge_neighbour(name, implementation, lab, directory, progress, globs)


def judge_mutant(
    name: str, implementation: str, caught_by: str, lab: Lab, directory: Path, progress=lambda text: None
) -> Mutant:
    """Run the cases of the contract that must catch it, until it does; then ask the others about the same runs."""
    contract = REGISTRY[caught_by]
    suite = Suite(Target(name, implementation), worlds=MUTANT_WORLDS, directory=directory, lab=lab, progress=progress)
    verdict = suite.verdict(contract, stop_when_broken=True)
    seen = [history for history in suite._histories.values() if not isinstance(history, str)]
    killed_by = [
        other.name
        for other in select()
        if other.cases is contract.cases and suite.applies(other) and any(other(h).verdict == "broken" for h in seen)
    ]
    return Mutant(name, caught_by, killed_by, caught_by in killed_by, verdict.message)


def judge_neighbour(
    name: str, implementation: str, lab: Lab, directory: Path, progress=lambda text: None, globs: Sequence[str] = ("*",)
) -> Neighbour:
    """Judge a good neighbour by the contracts that `globs` name, on one case of each kind in a world of two."""
    suite = Suite(
        Target(name, implementation), profile=PROFILES["smoke"], worlds=(2,), directory=directory, lab=lab, progress=progress
    )
    verdicts = list(suite.run(select(globs)))
    wrong = [v for v in verdicts if v.verdict not in ("kept", "not-applicable")]
    broken = [v.name for v in wrong if v.verdict == "broken"]
    return Neighbour(name, broken, not wrong, "; ".join(f"{v.name} {v.verdict}: {v.message}" for v in wrong))


def to_json(found: list[Mutant | Neighbour]) -> dict[str, Any]:
    """The matrix as data: `{"mutants": [...], "neighbours": [...]}`."""
    return {
        "mutants": [asdict(item) for item in found if isinstance(item, Mutant)],
        "neighbours": [asdict(item) for item in found if isinstance(item, Neighbour)],
    }
