"""Runs that are saved and resumed, and what happens to their precision and order."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Case,
    Checkpoint,
    FillGradients,
    Finalize,
    ForgetMoments,
    Generation,
    Hold,
    MapNames,
    Optimizer,
    Precision,
    Resume,
    Save,
    SetStepCount,
    Train,
)  # fmt: skip
from contracts.implementation import Capability
from contracts.strategies.drawing import RESUMED_STEPS, Cases, Scope, models


def _interrupted(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, weights_dtype: str, scaler: bool) -> Case:
        before = draw(st.integers(1, 3))
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS), Save(), Finalize()), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(models(weights_dtype=st.just(weights_dtype))),
            optimizer=Optimizer(amsgrad=draw(st.booleans()), scaler=scaler),
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    # A process is left to SAVED_RUNS: what it writes is the same, and it takes seconds to start in each generation.
    modes = scope.modes()[:2]
    scaled = Capability.SCALER in scope.capabilities
    return [
        draw_case(mode, dtype, scaled and mode == modes[-1]) for dtype in ("bfloat16", "float32") for mode in reversed(modes)
    ]


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
            model=draw(models()),
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


PLAIN = Precision()
COMPUTED_SMALLER = Precision(compute="bfloat16")
"""A reduction in float32 shows only where what is computed in is smaller."""
MASTERS = Precision(parameters="bfloat16", masters="float32", compute="bfloat16")
HALVED = Precision(parameters="bfloat16", moments="bfloat16", compute="bfloat16")

TINY_RATE = 1e-6
"""AdamW moves an element by a few times the rate at most: by less than half a bfloat16 step of any element above 0.004."""


def _policies(scope: Scope) -> list[Precision]:
    """The precision policies an implementation can be asked for, the most demanding first."""
    optional = [(MASTERS, Capability.MASTER_WEIGHTS), (HALVED, Capability.BFLOAT16_POLICY)]
    return [*(policy for policy, needed in optional if needed in scope.capabilities), PLAIN]


def _chained(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, policy: Precision) -> Case:
        count = draw(st.sampled_from([257, 10001]))
        start = (Train(2), SetStepCount(count), Save(), Finalize(), Train(1))
        again = (Resume(), Resume(), Train(1, 0.0), Save(), Finalize())
        third = (Resume(), Train(1, TINY_RATE), Save(), Finalize())
        return Case(
            generations=tuple(Generation(ranks=ranks, steps=steps, seed=i) for i, steps in enumerate((start, again, third))),
            model=draw(models(layers=st.just(1))),
            precision=policy,
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case(policy) for policy in (*_policies(scope)[:-1], COMPUTED_SMALLER, replace(PLAIN, reduce="bfloat16"))]


def _drifted(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, saved: Precision, declared: Precision) -> Case:
        first = Generation(ranks=ranks, steps=(Train(draw(st.integers(1, 2))), Save(), Finalize()))
        # The optimizer has stepped, so it has tensors which a load that is refused too late has changed.
        again = Generation(ranks=ranks, steps=(Train(1), Resume(refused=True)), seed=1, precision=declared)
        model, seed = draw(models(layers=st.just(1))), draw(st.integers(0, 99))
        return Case(generations=(first, again), model=model, precision=saved, seed=seed)

    policies = _policies(scope)
    pairs = [(MASTERS, HALVED), (PLAIN, HALVED), (MASTERS, PLAIN), (HALVED, PLAIN), (PLAIN, MASTERS)]
    return [draw_case(*pair) for pair in pairs if set(pair) <= set(policies)]


def _saved_and_not(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, before: int, pending: bool, mode: str, policy: Precision) -> Case:
        first = (Train(before),) * (before > 0) + (FillGradients(0.5),) * pending
        then = (FillGradients(None),) * pending + (Train(2),)
        return Case(
            generations=(
                Generation(ranks=ranks, steps=(*first, Save(), Finalize(), *then)),
                *(Generation(ranks=ranks, steps=(*first, *then), root=root) for root in ("twin", "other twin")),
            ),
            model=draw(models(layers=st.just(1))),
            precision=policy,
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    modes, policies = scope.modes()[:2], _policies(scope)
    corners = [(0, False, modes[0], PLAIN), (2, True, modes[-1], policies[0]), (1, False, modes[-1], PLAIN)]
    return [draw_case(*corner) for corner in corners]


def _loaded_fresh(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, pending: bool, policy: Precision) -> Case:
        fill, drop = (FillGradients(0.5),), (FillGradients(None),)
        first = (Train(draw(st.integers(1, 2))), *fill * pending, Save(), Finalize(), *drop * pending, Train(1))
        resumes = (Resume(), Train(1)), (*fill, Resume(), *drop, Train(1)), (Resume(), ForgetMoments(), Train(1))
        return Case(
            generations=tuple(Generation(ranks=ranks, steps=steps, seed=i) for i, steps in enumerate((first, *resumes))),
            model=draw(models(layers=st.just(1))),
            precision=policy,
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case(True, _policies(scope)[0]), draw_case(False, PLAIN)]


CHAINED_RUNS = Cases("chained-runs", _chained)
"""Train and count far, save; resume twice over, take a step of rate 0, save; resume, take a tiny step: under each policy."""

DRIFTED_RUNS = Cases("drifted-runs", _drifted)
"""Save under one precision policy, resume under another."""

SAVED_AND_NOT = Cases("saved-and-not", _saved_and_not)
"""Train with a save in between, before the first step too, and two twins which never save."""

FRESH_LOADS = Cases("fresh-loads", _loaded_fresh)
"""Save; resume into an optimizer that has never stepped, with gradients pending and without, and with its moments dropped."""
