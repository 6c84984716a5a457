"""Which cases are drawn. Hypothesis runs in the process that judges, never in a rank.

Each function describes one kind of run; contracts that name the same kind share its histories. Small means few ranks,
layers and steps, so that a shrunk case reads at a glance.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Case, Checkpoint, Finalize, Generation, Hold, MapNames, Model, Optimizer, Resume, Save, Train,
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
        return st.one_of(*self.corners(ranks, scope))

    def draw(self, ranks: int, scope: Scope, examples: int, with_seed: int) -> list[Case]:
        """Draw up to `examples` distinct cases, from each corner in turn; the same seed draws the same ones."""
        corners = self.corners(ranks, scope)
        each = -(-examples // len(corners)) + 1
        drawn = [_draw(corner, each, with_seed * 1000 + number) for number, corner in enumerate(corners)]
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


def _models(**fixed: SearchStrategy) -> SearchStrategy[Model]:
    free = {
        "hidden": st.sampled_from([8, 12]),
        "layers": st.integers(1, 2),
        "weights_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
    return st.builds(Model, **free | fixed)


def _interrupted(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, weights_dtype: str) -> Case:
        before = draw(st.integers(1, 3))
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS), Save(), Finalize()), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(_models(weights_dtype=st.just(weights_dtype))),
            optimizer=Optimizer(amsgrad=draw(st.booleans())),
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    # A process is left to SAVED_RUNS: what it writes is the same, and it takes seconds to start in each generation.
    modes = scope.modes()[:2]
    return [draw_case(mode, dtype) for dtype in ("bfloat16", "float32") for mode in reversed(modes)]


def _saved(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    # The writer cannot finish before every rank has had its chance to publish without it.
    writer = st.builds(
        Hold, rank=st.integers(0, ranks - 1), at=st.just(r"\.(distcp|safetensors|pt|bin)$"), until=st.just("finalize-begins")
    )
    # Rank 0 cannot finish before every other rank has had its chance to return without it.
    companion = st.builds(
        Hold, rank=st.just(0), at=st.sampled_from([rf"{re.escape(name)}$" for name in scope.layout.companions] or ["$"]),
        until=st.just("save-returns"), at_most=st.just(0.4),
    )  # fmt: skip
    no_hold = st.none()
    hold_companion = companion if scope.layout.companions and ranks > 1 else no_hold

    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, holds: SearchStrategy[Hold | None]) -> Case:
        hold = draw(holds)
        steps = (Train(draw(st.integers(1, 2))), Save(), Train(1), Finalize())
        if draw(st.booleans()):
            steps += (Save(), Finalize())
        return Case(
            generations=(Generation(ranks=ranks, steps=steps, faults=(hold,) if hold else ()),),
            model=draw(_models()),
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    wanted = [
        ("thread", writer), ("sync", hold_companion), ("process", no_hold | hold_companion),
        ("thread", hold_companion), ("sync", no_hold), ("thread", no_hold),
    ]  # fmt: skip
    return [draw_case(mode, hold) for mode, hold in wanted if mode in scope.modes()]


def _mappings(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    from contracts import published_names

    return [
        st.just(Case(generations=(Generation(ranks=1, steps=(MapNames(source),)),))) for source in published_names.available()
    ]


INTERRUPTED_RUNS = Cases("interrupted-runs", _interrupted)
"""Train, save, go on; then resume in fresh processes from another seed and train the same steps again; and a twin."""

SAVED_RUNS = Cases("saved-runs", _saved, weight=2)
"""Train and save under every policy the implementation has, with writers held open so that races are lost on purpose."""

MAPPINGS = Cases("mappings", _mappings, one_world=True)
"""Map an outside list of published names."""
