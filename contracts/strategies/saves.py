"""Saves that have to survive: kills, lost power, full disks, damaged files, haste, retention."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from contracts.case import (
    Blind,
    Case,
    Checkpoint,
    Exit,
    Fail,
    Finalize,
    Generation,
    Hold,
    Kill,
    Model,
    Overwrite,
    PowerLoss,
    Resume,
    Save,
    Tamper,
    Train,
)  # fmt: skip
from contracts.strategies.drawing import Cases, Scope

SMALLEST = Model(architecture="odd", layers=1)
"""Few parameters of few shapes: DTensor plans each operation anew for each, which is most of what a short run takes."""
SHARDS = r"\.(distcp|safetensors|pt|bin)$"
"""Paths of files that hold tensors, whoever writes them."""
EVENTS_OF_A_SAVE = 30
"""A save, its publication and the removal of the one before it touch about this many files on rank 0, and few on others."""


ERRORS = ["ENOSPC", "EIO", "EACCES"]
"""What a write fails with: a full disk, a broken one, one that somebody has made read-only."""


def _crashed(ranks: int, scope: Scope) -> Sequence[SearchStrategy[Case]]:
    def draw_case(mode: str, rank: int, events: SearchStrategy[int], at: str = "", torn: bool = False) -> SearchStrategy[Case]:
        return st.builds(crash_case, st.just(ranks), st.just(mode), st.just(rank), events, st.just(at), torn=st.just(torn))

    first, early = st.integers(1, 6), st.integers(7, EVENTS_OF_A_SAVE // 2 - 1)
    late = st.integers(EVENTS_OF_A_SAVE // 2, EVENTS_OF_A_SAVE - 1)
    layout, modes = scope.layout, scope.modes()
    behind = modes[min(1, len(modes) - 1)]
    names = [rf"^{layout.published}$", *(re.escape(name) for name in (layout.pointer, layout.incomplete) if name)]
    publication = "|".join(names)
    # A small stack's save has few events, so each corner that may lie beyond its last stands behind one that does not.
    corners = [
        draw_case("sync", 0, first), draw_case("sync", 0, st.just(0), publication),
        draw_case("sync", 0, st.just(0), publication, torn=True) if layout.pointer else draw_case("sync", 0, first, torn=True),
        draw_case("sync", 0, st.integers(1, 2), publication), draw_case(behind, 0, st.integers(0, 4), publication),
        draw_case("sync", 0, st.integers(0, 9), torn=True), draw_case(behind, 0, first), draw_case("sync", 0, late),
        draw_case("sync", 0, early), draw_case(behind, 0, early),
    ]  # fmt: skip
    return corners if ranks == 1 else [*corners[:2], draw_case("sync", ranks - 1, st.integers(0, 2)), *corners[2:]]


def crash_case(ranks: int, mode: str, rank: int, event: int, at: str = "", seed: int = 0, torn: bool = False) -> Case:
    """A run whose `rank` is killed at a file event of its second save, which also retires the first; then a resume."""
    kill = Kill(rank=rank, event=event, save=2, at=at, torn=torn)
    return _ended_in_its_second_save(ranks, mode, kill, (Tamper(how="litter"),), seed)


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
    def draw_case(draw: st.DrawFn, mode: str, rank: int, at: str, events: SearchStrategy[int], errors=ERRORS) -> Case:
        fault = Fail(rank=rank, at=at, event=draw(events), error=draw(st.sampled_from(errors)), save=2)
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
    killed = [draw_case("process", last, SHARDS, first, ["SIGKILL"])] if "process" in modes else []
    # A stack of which rank 0 alone writes never comes to the first.
    return [
        draw_case(modes[min(1, len(modes) - 1)], last, SHARDS, first), draw_case("sync", 0, "", st.integers(0, 2)),
        draw_case("sync", 0, "", st.integers(3, 9)), draw_case("sync", last, SHARDS, first),
        draw_case(modes[-1], 0, SHARDS, first), *killed, draw_case(modes[min(1, len(modes) - 1)], 0, "", st.integers(0, 9)),
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


CRASHED_SAVES = Cases("crashed-saves", _crashed, weight=3)
"""Save twice, one rank killed at a file event of the second; resume amid what it left, save again, resume."""

POWER_LOSSES = Cases("power-losses", _powerless)
"""Save twice; the power is lost at a file event or flush of the second; resume from what was flushed, save again, resume."""

DIFFERENT_VIEWS = Cases("different-views", _viewed)
"""Save twice; resume where one rank does not see the newest checkpoint, or any; save again."""

DAMAGED_CHECKPOINTS = Cases("damaged-checkpoints", _damaged)
"""Save twice; one file of the newest checkpoint is damaged; resume."""

FAILED_SAVES = Cases("failed-saves", _failed, weight=2)
"""Save, and save again where one rank cannot write any more, or has its writer killed; then resume with room again."""

PRESSED_SAVES = Cases("pressed-saves", _pressed)
"""Saves that are overwritten, overtaken by steps and by the next save, finalized twice, or left at once; then a resume."""

RETAINED_RUNS = Cases("retained-runs", _retained)
"""More saves than are kept, amid foreign names, misleading times and what a killed save left."""

RANKED_RUNS = Cases("ranked-runs", _ranked)
"""More saves than are kept, each with a metric, equal ones among them; resumed, and more of them."""
