"""Which cases are drawn. Hypothesis runs in the process that judges, never in a rank.

Each function describes one kind of run; contracts that name the same kind share its histories. Small means few ranks,
layers and steps, so that a shrunk case reads at a glance.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Blind,
    Case,
    Checkpoint,
    Data,
    Draw,
    Exit,
    Fail,
    FillGradients,
    Finalize,
    ForgetMoments,
    Generation,
    Hold,
    Kill,
    MapNames,
    Model,
    Optimizer,
    Overwrite,
    PowerLoss,
    Precision,
    Resume,
    Retune,
    Save,
    SetStepCount,
    Tamper,
    Train,
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


def _models(**fixed: SearchStrategy) -> SearchStrategy[Model]:
    free = {
        "hidden": st.sampled_from([8, 12]),
        "layers": st.integers(1, 2),
        "weights_dtype": st.sampled_from(["float32", "bfloat16"]),
    }
    return st.builds(Model, **free | fixed)


def _interrupted(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, weights_dtype: str, scaler: bool) -> Case:
        before = draw(st.integers(1, 3))
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS), Save(), Finalize()), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(_models(weights_dtype=st.just(weights_dtype))),
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


# --- precision and order ---------------------------------------------------------------------------------------------

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
            model=draw(_models(layers=st.just(1))),
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
        model, seed = draw(_models(layers=st.just(1))), draw(st.integers(0, 99))
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
            model=draw(_models(layers=st.just(1))),
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
            model=draw(_models(layers=st.just(1))),
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


# --- resumed and resharded runs --------------------------------------------------------------------------------------


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
            model=draw(_models(**fixed)),
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
            model=draw(_models(architecture=st.just("odd"), tied=st.just(tied), rows=_rows(ranks))),
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
            model=draw(_models()),
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
                generations=(saved, other), model=draw(_models(architecture=st.just("odd"))), seed=draw(st.integers(0, 99))
            )
        first = Generation(ranks=ranks, steps=(Train(before), Save(), Finalize(), Train(RESUMED_STEPS)))
        again = Generation(ranks=ranks, steps=(Resume(), Train(RESUMED_STEPS)), seed=1)
        twin = Generation(ranks=ranks, steps=(Train(before + RESUMED_STEPS),), root="twin")
        return Case(
            generations=(first, again, twin),
            model=draw(_models(architecture=st.just("odd"), unused=st.just(unused), frozen=frozen)),
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
            model=draw(_models(**fixed)),
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
            model=draw(_models(architecture=st.just("odd"), rows=_rows(ranks, mesh[1]))),
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
            model=draw(_models(architecture=st.just("odd"), rows=_rows(ranks))),
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
            model=draw(_models(architecture=st.just("odd"), scalar=st.just(True))),
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


# --- saves that survive ----------------------------------------------------------------------------------------------

SMALLEST = Model(architecture="odd", layers=1)
"""Few parameters of few shapes: DTensor plans each operation anew for each, which is most of what a short run takes."""
SHARDS = r"\.(distcp|safetensors|pt|bin)$"
"""Paths of files that hold tensors, whoever writes them."""
EVENTS_OF_A_SAVE = 30
"""A save, its publication and the removal of the one before it touch about this many files on rank 0, and few on others."""


def _crashed(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    def draw_case(mode: str, rank: int, events: SearchStrategy[int], at: str = "") -> SearchStrategy[Case]:
        return st.builds(crash_case, st.just(ranks), st.just(mode), st.just(rank), events, st.just(at))

    first, early = st.integers(1, 6), st.integers(7, EVENTS_OF_A_SAVE // 2 - 1)
    late = st.integers(EVENTS_OF_A_SAVE // 2, EVENTS_OF_A_SAVE - 1)
    layout, modes = scope.layout, scope.modes()
    behind = modes[min(1, len(modes) - 1)]
    names = [rf"^{layout.published}$", *(re.escape(name) for name in (layout.pointer, layout.incomplete) if name)]
    publication = "|".join(names)
    # A small stack's save has few events, so each corner that may lie beyond its last stands behind one that does not.
    corners = [
        draw_case("sync", 0, first), draw_case("sync", 0, st.just(0), publication),
        draw_case("sync", 0, st.integers(1, 2), publication), draw_case(behind, 0, st.integers(0, 4), publication),
        draw_case(behind, 0, first), draw_case("sync", 0, late), draw_case("sync", 0, early), draw_case(behind, 0, early),
    ]  # fmt: skip
    return corners if ranks == 1 else [*corners[:2], draw_case("sync", ranks - 1, st.integers(0, 2)), *corners[2:]]


def crash_case(ranks: int, mode: str, rank: int, event: int, at: str = "", seed: int = 0) -> Case:
    """A run whose `rank` is killed at a file event of its second save, which also retires the first; then a resume."""
    return _ended_in_its_second_save(ranks, mode, Kill(rank=rank, event=event, save=2, at=at), (Tamper(how="litter"),), seed)


def power_case(ranks: int, mode: str, rank: int, event: int, lost: str = "names and bytes", at: str = "") -> Case:
    """A run that loses power at a file event or flush of `rank` in its second save; else as `crash_case`."""
    return _ended_in_its_second_save(ranks, mode, PowerLoss(rank=rank, event=event, save=2, at=at, lost=lost))


def _ended_in_its_second_save(
    ranks: int, mode: str, end: Kill | PowerLoss, then: tuple[Tamper, ...] = (), seed: int = 0
) -> Case:
    steps = (Train(1), Save(), Finalize(), Train(1), Save(), Finalize())
    again = (Resume(), Train(1), Save(), Finalize(), Train(1))
    return Case(
        generations=(
            Generation(ranks=ranks, steps=steps, faults=(end,)),
            Generation(ranks=ranks, steps=again, faults=then, seed=1),
            Generation(ranks=ranks, steps=(Resume(),), seed=2),
        ),
        model=SMALLEST,
        checkpoint=Checkpoint(mode=mode, keep_latest=1),
        seed=seed,
    )


def _powerless(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    def draw_case(mode: str, rank: int, lost: str, events: SearchStrategy[int], at: str = "") -> SearchStrategy[Case]:
        return st.builds(power_case, st.just(ranks), st.just(mode), st.just(rank), events, st.just(lost), st.just(at))

    everything, content = "names and bytes", "bytes"
    modes = scope.modes()
    behind = modes[min(1, len(modes) - 1)]
    # What a save was to have made sure shows from its first event on; the next one's own flushes, around its publication.
    start, middle = st.integers(0, 2), st.integers(3, EVENTS_OF_A_SAVE)
    published = rf"^{scope.layout.published}(/|$)|^\.$"
    return [
        draw_case("sync", 0, everything, start), draw_case("sync", 0, content, st.integers(1, 2), published),
        draw_case(behind, 0, everything, middle), draw_case("sync", ranks - 1, everything, start),
    ]  # fmt: skip


def _damaged(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, how: str, at: str = "") -> Case:
        first = Generation(ranks=ranks, steps=(Train(1), Save(), Finalize(), Train(1), Save(), Finalize()))
        damage = Tamper(how=how, file=draw(st.integers(0, 11)), at=at)
        again = Generation(ranks=ranks, steps=(Resume(refused=True),), faults=(damage,), seed=1)
        return Case(generations=(first, again), model=SMALLEST, seed=draw(st.integers(0, 99)))

    return [draw_case("flip"), draw_case("truncate", SHARDS), draw_case("remove"), draw_case("empty")]


def _failed(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, rank: int, at: str, events: SearchStrategy[int]) -> Case:
        fault = Fail(rank=rank, at=at, event=draw(events), error=draw(st.sampled_from(["ENOSPC", "EIO", "EACCES"])), save=2)
        steps = (Train(1), Save(), Finalize(), Train(1), Save(), Train(1), Finalize())
        return Case(
            generations=(
                Generation(ranks=ranks, steps=steps, faults=(fault,)),
                Generation(ranks=ranks, steps=(Resume(), Train(1), Save(), Finalize()), seed=1),
            ),
            model=SMALLEST,
            checkpoint=Checkpoint(mode=mode, keep_latest=draw(st.sampled_from([0, 1]))),
            seed=draw(st.integers(0, 99)),
        )

    first, last = st.just(0), ranks - 1
    modes = scope.modes()
    # A stack of which rank 0 alone writes never comes to the first.
    return [
        draw_case(modes[min(1, len(modes) - 1)], last, SHARDS, first), draw_case("sync", 0, "", st.integers(0, 2)),
        draw_case("sync", 0, "", st.integers(3, 9)), draw_case("sync", last, SHARDS, first),
        draw_case(modes[-1], 0, SHARDS, first), draw_case(modes[min(1, len(modes) - 1)], 0, "", st.integers(0, 9)),
    ]  # fmt: skip


def _viewed(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    if ranks == 1:
        return []

    @st.composite
    def draw_case(draw: st.DrawFn, rank: int, unseen: str) -> Case:
        save = (Train(1), Save(), Finalize())
        start, end = re.fullmatch(r"(.*)\(\?P<step>.*?\)(.*)", scope.layout.published, re.DOTALL).groups()
        at = rf"^{start}{unseen}{end}(/|$)"
        return Case(
            generations=(
                Generation(ranks=ranks, steps=save * 2),
                Generation(ranks=ranks, steps=(Resume(), *save), faults=(Blind(rank=rank, at=at),), seed=1),
            ),
            model=SMALLEST,
            checkpoint=Checkpoint(mode=draw(st.sampled_from(scope.modes()[:2]))),
            seed=draw(st.integers(0, 99)),
        )

    last = ranks - 1
    return [draw_case(last, "2"), draw_case(last, r"\d+"), draw_case(0, "2"), draw_case(0, r"\d+")]


def _pressed(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    @st.composite
    def draw_case(draw: st.DrawFn, mode: str, steps: tuple, until: str | None) -> Case:
        holds = (Hold(rank=draw(st.integers(0, ranks - 1)), at=SHARDS, until=until),) if until and mode != "sync" else ()
        first = (Finalize(), Train(draw(st.integers(1, 2))), *steps)
        return Case(
            generations=(
                Generation(ranks=ranks, steps=first, faults=holds),
                Generation(ranks=ranks, steps=(Resume(),), seed=1),
            ),
            model=SMALLEST,
            checkpoint=Checkpoint(mode=mode),
            seed=draw(st.integers(0, 99)),
        )

    twice = (Finalize(), Finalize())
    overwritten = (Save(), Overwrite(), *twice)
    overtaken = (Save(), Train(1), Save(), Train(1), *twice)
    left = (Save(final=True), Exit())
    modes = scope.modes()
    behind = modes[min(1, len(modes) - 1)]
    return [
        draw_case(behind, overtaken, "save-returns"), draw_case(behind, overwritten, "overwritten"),
        draw_case(behind, left, "save-returns"), draw_case(modes[-1], overwritten, None), draw_case("sync", overtaken, None),
    ]  # fmt: skip


def _retained(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    save = (Save(), Finalize())

    @st.composite
    def draw_case(draw: st.DrawFn, keep: int, first: tuple, faults: tuple, tampers: tuple, again: tuple) -> Case:
        return Case(
            generations=(
                Generation(ranks=ranks, steps=first, faults=faults),
                Generation(ranks=ranks, steps=again, faults=tampers, seed=1),
            ),
            model=SMALLEST,
            checkpoint=Checkpoint(mode=draw(st.sampled_from(scope.modes()[:2])), keep_latest=keep),
            seed=draw(st.integers(0, 99)),
        )

    foreign, touched = Tamper(how="foreign"), Tamper(how="older-touched")
    nine_and_ten = (Train(9), *save, Train(1), *save)
    # Killed before the writer of the third save has finished: what it leaves is not whole.
    killed = Kill(rank=0, event=4, save=3)
    return [
        draw_case(2, nine_and_ten, (), (foreign, touched), (Resume(), Train(1), *save, Train(1), *save)),
        draw_case(2, (Train(1), *save) * 3, (killed,), (), (Resume(), Train(2), *save)),
        draw_case(1, (Train(8), *save, Train(1), *save, Train(1), *save), (), (touched,), (Resume(), Train(1), *save)),
    ]


def _ranked(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    better, same, worse = 0.25, 0.5, 0.75

    @st.composite
    def draw_case(draw: st.DrawFn, latest: int, best: int, mode: str, metrics: SearchStrategy[tuple[float, ...]]) -> Case:
        values = draw(metrics)
        sign = 1 if mode == "min" else -1
        saves = [(Train(1), Save(metric=sign * value), Finalize()) for value in values]
        first, again = itertools.chain(*saves[:-3]), itertools.chain(*saves[-3:])
        return Case(
            generations=(
                Generation(ranks=ranks, steps=tuple(first)),
                Generation(ranks=ranks, steps=(Resume(), *again), seed=1),
            ),
            model=SMALLEST,
            checkpoint=Checkpoint(
                mode=draw(st.sampled_from(scope.modes()[:2])), keep_latest=latest, keep_best=best, best_mode=mode
            ),
            seed=draw(st.integers(0, 99)),
        )

    # Ties between a checkpoint that is about to be pruned and a newer one, in one process and across a resume.
    tied = st.just((worse, same, same, worse, same, worse, worse))
    tied_for_the_last_place = st.just((same, better, same, worse, same, worse, worse))
    some = st.tuples(*[st.sampled_from([better, same, worse])] * 6)
    return [draw_case(1, 1, "min", tied), draw_case(1, 2, "max", tied_for_the_last_place), draw_case(2, 1, "max", some)]


CRASHED_SAVES = Cases("crashed-saves", _crashed, weight=2)
"""Save twice, one rank killed at a file event of the second; resume amid what it left, save again, resume."""

POWER_LOSSES = Cases("power-losses", _powerless)
"""Save twice; the power is lost at a file event or flush of the second; resume from what was flushed, save again, resume."""

DIFFERENT_VIEWS = Cases("different-views", _viewed)
"""Save twice; resume where one rank does not see the newest checkpoint, or any; save again."""

DAMAGED_CHECKPOINTS = Cases("damaged-checkpoints", _damaged)
"""Save twice; one file of the newest checkpoint is damaged; resume."""

FAILED_SAVES = Cases("failed-saves", _failed, weight=2)
"""Save, and save again where one rank cannot write any more; then resume with room again."""

PRESSED_SAVES = Cases("pressed-saves", _pressed)
"""Saves that are overwritten, overtaken by steps and by the next save, finalized twice, or left at once; then a resume."""

RETAINED_RUNS = Cases("retained-runs", _retained)
"""More saves than are kept, amid foreign names, misleading times and what a killed save left."""

RANKED_RUNS = Cases("ranked-runs", _ranked)
"""More saves than are kept, each with a metric, equal ones among them; resumed, and more of them."""
