"""A kind of case, and how cases of it are drawn. Hypothesis runs in the process that judges, never in a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Case,
    Model,
)  # fmt: skip
from contracts.implementation import Capability, Layout

RESUMED_STEPS = 3
"""A wrong optimizer state can leave the first loss right and the second absurd, so three steps are compared."""


@dataclass(frozen=True)
class Scope:
    """What the implementation at hand can do; a strategy draws nothing it cannot."""

    capabilities: frozenset[Capability]
    layout: Layout = field(default_factory=Layout)

    def modes(self) -> list[str]:
        asynchronous = {"thread": Capability.ASYNC_THREAD, "process": Capability.ASYNC_PROCESS}
        return ["sync", *(mode for mode, needed in asynchronous.items() if needed in self.capabilities)]


@dataclass(frozen=True)
class Cases:
    """A kind of case, of which each implementation and world has its own corners.

    Attributes:
        corners: `corners(ranks, scope)` gives strategies for cases whose largest world is `ranks`, most telling first.
            What must be tried is a corner of its own, not left to chance; what else differs is drawn.
        one_world: whether the cases need a single rank only.
        weight: cases of this kind for each one that a profile asks for: more where a case is cheap and its corners are many.
    """

    name: str
    corners: Callable[[int, Scope], Sequence[SearchStrategy[Case]]] = field(repr=False)
    one_world: bool = False
    weight: int = 1

    def strategy(self, ranks: int, scope: Scope) -> SearchStrategy[Case]:
        """All corners together, to look for a smaller case in."""
        return st.one_of(*self.corners(ranks, scope)).map(_dividing)

    def draw(self, ranks: int, scope: Scope, examples: int, with_seed: int) -> list[Case]:
        """Draw up to `examples` distinct cases, from each corner in turn; the same seed draws the same ones."""
        corners = self.corners(ranks, scope)
        if not corners:  # as for changed worlds, where a single rank leaves nothing to change to
            return []
        each = -(-examples // len(corners)) + 1
        drawn = [_draw(corner.map(_dividing), each, with_seed * 1000 + number) for number, corner in enumerate(corners)]
        in_turn = {case.key: case for turn in itertools.zip_longest(*drawn) for case in turn if case is not None}
        return list(in_turn.values())[:examples]


def _draw(strategy: SearchStrategy[Case], examples: int, with_seed: int) -> list[Case]:
    found: dict[str, Case] = {}

    @seed(with_seed)
    @settings(
        max_examples=examples, phases=[Phase.generate], database=None, deadline=None,
        suppress_health_check=list(HealthCheck), derandomize=False,
    )  # fmt: skip
    @given(strategy)
    def collect(case: Case) -> None:
        found.setdefault(case.key, case)

    collect()
    # Hypothesis begins with the simplest case, which is the one that tells least.
    simplest, *others = found.values()
    return [*others, simplest]


def _dividing(case: Case) -> Case:
    """The case with a global batch that divides over every world in it, and over what is accumulated there."""
    batch = math.lcm(case.data.global_batch, *(ranks * case.optimizer.accumulation for ranks in case.worlds))
    return case if batch == case.data.global_batch else replace(case, data=replace(case.data, global_batch=batch))


def models(**fixed: SearchStrategy) -> SearchStrategy[Model]:
    free = {
        "hidden": st.sampled_from([8, 12]),
        "layers": st.integers(1, 2),
        "weights_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
    return st.builds(Model, **free | fixed)
