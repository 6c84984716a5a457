"""Runs that go on: over epochs and odd tensors, in other worlds, in wrappers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Case,
    Checkpoint,
    Data,
    Draw,
    Finalize,
    Generation,
    Optimizer,
    Resume,
    Retune,
    Save,
    Train,
)  # fmt: skip
from contracts.implementation import Capability
from contracts.strategies.drawing import RESUMED_STEPS, Cases, Scope, models


def _rows(*worlds: int) -> SearchStrategy[tuple[int, ...]]:
    """First dimensions that shard unevenly, down to empty shards, on at least one of these worlds."""
    around = {rows for world in worlds for rows in (1, world - 1, world, world + 1) if rows > 0}
    return st.lists(st.sampled_from(sorted({*around, 7})), min_size=2, max_size=2, unique=True).map(tuple)


def _continued(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    accumulation = 2
    batch = 8 if 8 % (ranks * accumulation) == 0 else 2 * ranks * accumulation
    streams = Capability.RANDOM_STREAMS in scope.capabilities

    @st.composite
    def draw_case(draw: st.DrawFn, architecture: str, records: int, before: int) -> Case:
        resumes = [
            Generation(ranks=ranks, steps=(Resume(), Draw(), Train(2), Save(), Finalize()), seed=1),
            Generation(ranks=ranks, steps=(Resume(), Train(2), Save(), Finalize()), seed=2),
            Generation(ranks=ranks, steps=(Resume(), Train(2)), seed=3),
        ]
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Draw(), Train(6)))
        twin = Generation(ranks=ranks, steps=(Train(before), Draw(), Train(6)), root="twin")
        fixed = {"architecture": st.just(architecture)}
        if architecture == "odd":
            fixed |= {"dropout": st.just(0.25 if streams else 0.0), "rows": _rows(ranks)}
        return Case(
            generations=(first, *resumes, twin),
            model=draw(models(**fixed)),
            optimizer=Optimizer(accumulation=accumulation, warmup_steps=draw(st.integers(2, 5)), total_steps=before + 8),
            checkpoint=Checkpoint(mode=draw(st.sampled_from(scope.modes()[:2]))),
            data=Data(records=records, global_batch=batch),
            seed=draw(st.integers(0, 99)),
        )

    # An epoch of exactly three steps, saved at its end; and one of two and a half, saved in the middle of the second.
    return [draw_case("odd", 3 * batch, 3), draw_case("llama", 2 * batch + batch // 2, 4)]


def _odd(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, tied: str) -> Case:
        first = Generation(ranks=ranks, steps=(Train(draw(st.integers(2, 3))), Save(), Finalize()))
        again = Generation(ranks=ranks, steps=(Resume(),), seed=1)
        return Case(
            generations=(first, again),
            model=draw(models(architecture=st.just("odd"), tied=st.just(tied), rows=_rows(ranks))),
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case("shared"), draw_case("declared"), draw_case("no")]


def _regrouped(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, empty_group: bool) -> Case:
        first = Generation(ranks=ranks, steps=(Train(1), Retune(), Train(draw(st.integers(1, 2))), Save(), Finalize()))
        again = Generation(ranks=ranks, steps=(Resume(),), seed=1)
        return Case(
            generations=(first, again),
            model=draw(models()),
            optimizer=Optimizer(empty_group=empty_group),
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case(True), draw_case(False)]


def _partly_trained(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, unused: bool, frozen: SearchStrategy[str], changes: bool = False) -> Case:
        before = draw(st.integers(1, 2))
        if changes:
            now, then = draw(st.permutations(["norm", r"layers\.0\.", ""]))[:2]
            saved = Generation(ranks=ranks, frozen=now, steps=(Train(before), Save(), Finalize()))
            other = Generation(ranks=ranks, frozen=then, steps=(Resume(), Train(RESUMED_STEPS)), seed=1)
            return Case(
                generations=(saved, other), model=draw(models(architecture=st.just("odd"))), seed=draw(st.integers(0, 99))
            )
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS)), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(models(architecture=st.just("odd"), unused=st.just(unused), frozen=frozen)),
            seed=draw(st.integers(0, 99)),
        )

    some = st.sampled_from(["embed_tokens", r"layers\.0\.", "norm"])
    return [draw_case(False, some), draw_case(True, some), draw_case(False, some, changes=True), draw_case(True, st.just(""))]


def _resharded(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    if ranks == 1:
        return []
    half = ranks // 2
    smaller = st.integers(1, ranks - 1)

    @st.composite
    def draw_case(draw: st.DrawFn, worlds: SearchStrategy[tuple[int, ...]], architecture: str) -> Case:
        sizes = draw(worlds)
        batch = math.lcm(4, *sizes)
        before = draw(st.integers(1, 3))
        fixed = {"architecture": st.just(architecture)} | ({"rows": _rows(*set(sizes))} if architecture == "odd" else {})
        # Each generation but the first begins where the one before it saved, which is not the first save of the run.
        first = Generation(ranks=sizes[0], steps=(Train(before), Save(), Finalize(), Draw(), Train(RESUMED_STEPS)))
        middle = [
            Generation(
                ranks=world,
                steps=(Resume(), Draw(), Train(RESUMED_STEPS if number == 1 else 1), Save(), Finalize()),
                seed=number,
            )
            for number, world in enumerate(sizes[1:-1], 1)
        ]
        last = Generation(ranks=sizes[-1], steps=(Resume(), Train(1)), seed=len(sizes))
        twin = Generation(ranks=sizes[0], steps=(Train(before), Draw(), Train(RESUMED_STEPS)), root="twin")
        return Case(
            generations=(first, *middle, last, twin),
            model=draw(models(**fixed)),
            checkpoint=Checkpoint(mode=draw(st.sampled_from(scope.modes()[:2]))),
            data=Data(records=2 * batch + batch // 2, global_batch=batch),
            seed=draw(st.integers(0, 99)),
        )

    up, down = st.just((half, ranks, half)), st.just((ranks, half, ranks))
    some = smaller.flatmap(lambda world: st.sampled_from([(ranks, world, ranks), (world, ranks, world)]))
    walk = st.just((half, ranks, 1, half)) if ranks > 2 else some
    return [draw_case(down, "odd"), draw_case(up, "llama"), draw_case(walk, "odd"), draw_case(some, "odd")]


def _mesh_changes(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    meshes = [(replicas, ranks // replicas) for replicas in range(2, ranks + 1) if ranks % replicas == 0]
    if not meshes:
        return []
    if len(meshes) > 1:
        meshes.pop()  # one that shards at all, where there is one

    @st.composite
    def draw_case(draw: st.DrawFn, flat_first: bool) -> Case:
        before, mesh = draw(st.integers(1, 3)), draw(st.sampled_from(meshes))
        flat = ()
        first, second = (flat, mesh) if flat_first else (mesh, flat)
        batch = math.lcm(4, ranks)
        return Case(
            generations=(
                Generation(ranks=ranks, mesh=first, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS))),
                Generation(ranks=ranks, mesh=second, steps=(Resume(), Train(RESUMED_STEPS), Save(), Finalize()), seed=1),
                Generation(ranks=ranks, mesh=first, steps=(Resume(), Train(1)), seed=2),
                Generation(ranks=ranks, mesh=first, steps=(Train(before + RESUMED_STEPS),), root="twin"),
            ),
            model=draw(models(architecture=st.just("odd"), rows=_rows(ranks, mesh[1]))),
            data=Data(global_batch=batch),
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case(True), draw_case(False)]


def _wrapped(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, before: tuple[str, ...], after: tuple[str, ...]) -> Case:
        steps = (Train(draw(st.integers(1, 2))), Save(), Finalize())
        again = (Resume(), Train(1), Save(), Finalize())
        return Case(
            generations=(
                Generation(ranks=ranks, wrapped=before, steps=steps),
                Generation(ranks=ranks, wrapped=after, steps=again, seed=1),
                Generation(ranks=ranks, steps=steps, root="bare"),
            ),
            model=draw(models(architecture=st.just("odd"), rows=_rows(ranks))),
            seed=draw(st.integers(0, 99)),
        )

    both = ("recompute", "compile")
    return [draw_case(both, ()), draw_case(("recompute",), both), draw_case(("compile",), ("recompute",))]


def _kept_whole(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, then: int) -> Case:
        before = draw(st.integers(1, 3))
        return Case(
            generations=(
                Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS))),
                Generation(ranks=then, steps=(Resume(), Train(RESUMED_STEPS)), seed=1),
                Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin"),
            ),
            model=draw(models(architecture=st.just("odd"), scalar=st.just(True))),
            data=Data(global_batch=math.lcm(4, ranks, then)),
            seed=draw(st.integers(0, 99)),
        )

    return [draw_case(max(1, ranks // 2)), draw_case(ranks)] if ranks > 1 else []


CONTINUED_RUNS = Cases("continued-runs", _continued)
"""A run over more than two epochs, resumed three times in a row in fresh processes; the first generation goes on and is the
oracle of them all; and a twin. Gradients accumulate, and numbers are drawn after the save and after the first resume."""

ODD_RUNS = Cases("odd-runs", _odd)
"""Tied, or only said to be, or not; buffers; matrices of few rows: save, and resume."""

REGROUPED_RUNS = Cases("regrouped-runs", _regrouped)
"""The settings of parameter groups, one of which may be empty, are changed in mid-run: save, and resume."""

PARTLY_TRAINED_RUNS = Cases("partly-trained-runs", _partly_trained)
"""Parameters that are frozen, and parameters that never get a gradient: save, go on; resume, train the same steps; and a twin.
Or others are frozen after the resume than before the save."""

RESHARDED_RUNS = Cases("resharded-runs", _resharded)
"""Save on one world and resume on another, and from there on a third: down, up, and down and up again; and a twin."""

WRAPPED_RUNS = Cases("wrapped-runs", _wrapped)
"""Blocks are wrapped for activation checkpointing, torch.compile or both when it saves, and otherwise when it resumes; and a
run from the same seed whose blocks are bare."""

KEPT_WHOLE = Cases("kept-whole", _kept_whole)
"""A parameter without dimensions, which FSDP2 does not shard: save, go on; resume on fewer ranks, or as many; and a twin."""

MESH_CHANGES = Cases("mesh-changes", _mesh_changes)
"""From one-dimensional to hybrid sharding and back, or the other way round; and a twin."""
