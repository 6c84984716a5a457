"""Which cases are drawn. Hypothesis runs in the process that judges, never in a rank.

Each function describes one kind of run; contracts that name the same kind share its histories. Small means few ranks,
layers and steps, so that a shrunk case reads at a glance.
"""

from __future__ import annotations

from collections.abc import Callable
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

    def mode(self) -> SearchStrategy[str]:
        """Policies; a background process is drawn less often than a thread, for it takes seconds to start."""
        modes = self.modes()
        return st.sampled_from([*modes, *modes[:2]]) if len(modes) > 2 else st.sampled_from(modes)


@dataclass(frozen=True)
class Cases:
    """A kind of case: `strategy(ranks, scope)` draws cases whose largest world is `ranks`."""

    name: str
    strategy: Callable[[int, Scope], SearchStrategy[Case]] = field(repr=False)
    one_world: bool = False
    """Whether the cases need a single rank only."""
    weight: int = 1
    """Cases of this kind for each one that a profile asks for: more where a case is cheap and its choices are many."""

    def draw(self, ranks: int, scope: Scope, examples: int, with_seed: int) -> list[Case]:
        """Draw up to `examples` distinct cases; the same seed draws the same ones."""
        found: dict[str, Case] = {}

        @seed(with_seed)
        @settings(
            max_examples=examples, phases=[Phase.generate], database=None, deadline=None,
            suppress_health_check=list(HealthCheck), derandomize=False,
        )  # fmt: skip
        @given(self.strategy(ranks, scope))
        def collect(case: Case) -> None:
            found.setdefault(case.key, case)

        collect()
        return list(found.values())


def _models() -> SearchStrategy[Model]:
    return st.builds(
        Model,
        hidden=st.sampled_from([8, 12]),
        layers=st.integers(1, 2),
        weights_dtype=st.sampled_from(["float32", "bfloat16"]),
    )


def _interrupted(ranks: int, scope: Scope) -> SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        before = draw(st.integers(1, 3))
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS), Save(), Finalize()), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(_models()),
            optimizer=Optimizer(amsgrad=draw(st.booleans())),
            checkpoint=Checkpoint(mode=draw(st.sampled_from(scope.modes()[:2]))),
            seed=draw(st.integers(0, 99)),
        )

    return draw_case()


def _saved(ranks: int, scope: Scope) -> SearchStrategy[Case]:
    @st.composite
    def draw_case(draw: st.DrawFn) -> Case:
        mode = draw(scope.mode())
        holds = [None]
        if mode == "thread":
            # The writer cannot finish before every rank has had its chance to publish without it.
            holds.append(Hold(rank=draw(st.integers(0, ranks - 1)), at=r"\.(distcp|safetensors|pt|bin)$", until="finalize-begins"))
        if scope.layout.companions and ranks > 1:
            companion = draw(st.sampled_from(scope.layout.companions)).replace(".", r"\.")
            holds.append(Hold(rank=0, at=companion + "$", until="save-returns", at_most=0.4))
        hold = draw(st.sampled_from(holds))
        steps = (Train(draw(st.integers(1, 2))), Save(), Train(draw(st.integers(0, 1)) or 1), Finalize())
        if draw(st.booleans()):
            steps += (Save(), Finalize())
        return Case(
            generations=(Generation(ranks=ranks, steps=steps, faults=(hold,) if hold else ()),),
            model=draw(_models()),
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    return draw_case()


def _mappings(ranks: int, scope: Scope) -> SearchStrategy[Case]:
    from contracts import published_names

    sources = st.sampled_from(published_names.available())
    return sources.map(lambda source: Case(generations=(Generation(ranks=1, steps=(MapNames(source),)),)))


INTERRUPTED_RUNS = Cases("interrupted-runs", _interrupted)
"""Train, save, go on; then resume in fresh processes from another seed and train the same steps again; and a twin."""

SAVED_RUNS = Cases("saved-runs", _saved, weight=2)
"""Train and save under every policy the implementation has, with writers held open so that races are lost on purpose."""

MAPPINGS = Cases("mappings", _mappings, one_world=True)
"""Map an outside list of published names."""
