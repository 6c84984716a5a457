"""Contracts, and how they judge.

A contract is a pure function of a history. It asks `check(condition, message)` for each piece of evidence; what it
returns is ignored. A verdict with no evidence is unknown, and so is one whose judge raised.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from contracts.checkpoint_dir import CheckpointDirectory
from contracts.history import History, MissingEvidence, first_difference
from contracts.implementation import Capability
from contracts.strategies.drawing import Cases

VerdictName = Literal["kept", "broken", "unknown", "not-applicable", "not-run"]

REGISTRY: dict[str, Contract] = {}
"""Every contract by name, in the order of definition. Import `contracts.catalog` to fill it with this project's."""


class NotApplicable(Exception):
    """Raised by a judge: this history is of something the implementation does not claim to do."""


class Check:
    """Counts evidence and keeps what failed."""

    def __init__(self) -> None:
        self.evidence = 0
        self.failures: list[str] = []

    def __call__(self, condition: Any, message: str) -> bool:
        """Count one piece of evidence; `message` says what was seen and what was expected where it does not hold."""
        self.evidence += 1
        if not condition:
            self.failures.append(message)
        return bool(condition)

    def same(self, expected: Mapping[Any, torch.Tensor], seen: Mapping[Any, torch.Tensor], where: str) -> bool:
        """Compare tensors bit for bit; each counts as one piece of evidence."""
        self.evidence += len(expected)
        difference = first_difference(expected, seen)
        if difference is not None:
            self.failures.append(f"{where}: {difference}")
        return difference is None


def require_readable(name: str, checkpoint: CheckpointDirectory) -> None:
    """Raise NotApplicable for a checkpoint that is in none of the formats our own reader knows.

    What a checkpoint holds is read from the bytes on disk, or not at all: a stack's own reader proves nothing.
    """
    if checkpoint.files and not checkpoint.is_readable:
        found = ", ".join(sorted(checkpoint.files)[:3])
        raise NotApplicable(f"{name} holds neither DCP nor safetensors files, which are what this suite reads; it has {found}")


@dataclass(frozen=True)
class Judgement:
    """What one contract says of one history."""

    verdict: VerdictName
    evidence: int
    failures: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        if not self.failures:
            return ""
        more = f" (and {len(self.failures) - 1} more)" if len(self.failures) > 1 else ""
        return self.failures[0] + more


@dataclass(frozen=True)
class Contract:
    """One property that a stack owes its users.

    Attributes:
        name: `family.contract`.
        statement: what must hold for every generated case.
        why: the rest of the docstring.
        seen: public reports of it being broken.
        needs: capabilities without which it does not apply.
        cases: which cases it is judged on.
    """

    name: str
    statement: str
    why: str
    seen: tuple[str, ...]
    needs: frozenset[Capability]
    cases: Cases
    judge: Callable[[History, Check], None] = field(repr=False)

    @property
    def family(self) -> str:
        return self.name.partition(".")[0]

    def __call__(self, history: History) -> Judgement:
        """Judge a history; never raises."""
        check = Check()
        trouble: str | None = None
        try:
            self.judge(history, check)
        except NotApplicable as reason:
            return Judgement("not-applicable", 0, (str(reason),))
        except MissingEvidence as missing:
            trouble = str(missing)
        except Exception as error:
            trouble = f"the judge raised {type(error).__name__}: {error}\n{traceback.format_exc(limit=-3).strip()}"
        if check.failures:
            return Judgement("broken", check.evidence, tuple(check.failures))
        # A run that failed where the case asked for none is not a run in which the property was seen to hold.
        reasons = [reason for reason in (*history.failures, trouble) if reason]
        reasons += [note for generation in history.generations for note in generation.notes]
        if reasons or not check.evidence:
            return Judgement("unknown", check.evidence, tuple(reasons) or ("the history holds no evidence for it",))
        return Judgement("kept", check.evidence)


def contract(*, cases: Cases, needs: Iterable[Capability]) -> Callable[[Callable[[History, Check], None]], Contract]:
    """Register a function as the contract `<module>.<function-name>`; its docstring is the contract's documentation.

    The first line is the statement; a last paragraph `Seen: a, b.` names public reports.
    """

    def register(judge: Callable[[History, Check], None]) -> Contract:
        text = (judge.__doc__ or "").strip()
        statement, _, rest = text.partition("\n")
        seen = re.search(r"\n\s*Seen: (.+?)\.?\s*$", rest, re.DOTALL)
        name = f"{judge.__module__.rpartition('.')[2]}.{judge.__name__.replace('_', '-')}"
        made = Contract(
            name=name,
            statement=statement,
            why=re.sub(r"\s+", " ", rest[: seen.start()] if seen else rest).strip(),
            seen=tuple(re.split(r",\s+", seen.group(1))) if seen else (),
            needs=frozenset(needs),
            cases=cases,
            judge=judge,
        )
        if not statement:
            raise ValueError(f"contract {name} has no docstring; its first line is its statement")
        if name in REGISTRY:
            raise ValueError(f"contract {name} is defined twice")
        REGISTRY[name] = made
        return made

    return register
