"""The contract about the best checkpoints judges hand-written histories of saves with metrics, equal ones among them."""

from __future__ import annotations

import dataclasses

import pytest
from test_judges import RANKS, assert_broken, assert_kept, judge, on_every_rank, renamed, stored

from contracts.case import Case, Checkpoint, Finalize, Generation, Resume, Save, Train
from contracts.history import Event, History
from contracts.implementation import Layout
from contracts.saves import ranked

NAME = "retention.latest-and-best-kept"


@dataclasses.dataclass
class Ranked:
    """Four saves at 0.7, 0.5, 0.5 and 0.9, the newest and the best of which are kept; then a resume, and a save at 0.6."""

    removed: dict[int, int] = dataclasses.field(default_factory=lambda: {2: 1, 3: 2})
    """What goes after which save."""
    left: tuple[int, ...] = (3, 4)
    best: str | None = "step_3"
    latest: str = "step_4"
    newer_wins_ties: bool = True
    after: tuple[int, ...] = (3, 5)
    mode: str = "min"

    def history(self) -> History:
        def save(metric: float) -> tuple:
            return Train(1), Save(metric=metric), Finalize()

        sign = 1 if self.mode == "min" else -1
        metrics = {step: sign * metric for step, metric in {1: 0.7, 2: 0.5, 3: 0.5, 4: 0.9, 5: 0.6}.items()}
        case = Case(
            generations=(
                Generation(ranks=RANKS, steps=tuple(step for n in range(1, 5) for step in save(metrics[n]))),
                Generation(ranks=RANKS, steps=(Resume(), *save(metrics[5]))),
            ),
            checkpoint=Checkpoint(keep_latest=1, keep_best=1, best_mode=self.mode),
        )
        events: list[Event] = []
        for step in range(1, 5):
            events += on_every_rank("save-begins", step=step, metric=metrics[step])
            events += renamed(f"tmp_step_{step}", f"step_{step}", cookie=step)
            if gone := self.removed.get(step):
                events += renamed(f"step_{gone}", f"deleting_step_{gone}", cookie=10 + step)
        later = [
            *on_every_rank("resume-returns", step=4), *on_every_rank("save-begins", step=5, metric=metrics[5]),
            *renamed("tmp_step_5", "step_5", cookie=5), *renamed("step_4", "deleting_step_4", cookie=6),
        ]  # fmt: skip
        history = History.of(
            case, events, later,
            disk=[dict.fromkeys((f"step_{step}" for step in steps), stored()) for steps in (self.left, self.after)],
            layout=Layout(pointer="latest", best="best", newer_wins_ties=self.newer_wins_ties),
        )  # fmt: skip
        first, second = history.generations
        first.pointer, first.best, second.pointer, second.best = self.latest, self.best, "step_5", self.best
        return history


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_run_whose_pointers_and_prunes_agree_keeps(mode):
    assert_kept(judge(NAME, Ranked(mode=mode).history()))
    assert_kept(judge(NAME, Ranked(removed={2: 1}, left=(2, 3, 4), after=(2, 3, 5)).history()))  # one more than has to be


def test_a_stack_that_declares_that_the_older_wins_is_judged_by_that():
    older = Ranked(removed={2: 1, 4: 3}, left=(2, 4), best="step_2", after=(2, 5), newer_wins_ties=False)
    assert_kept(judge(NAME, older.history()))
    assert_broken(
        judge(NAME, dataclasses.replace(older, newer_wins_ties=True).history()), "step_3 was removed", "then the newer"
    )


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (
            Ranked(removed={2: 1, 4: 3}, left=(2, 4), after=(2, 5)),
            "step_3 was removed while checkpoints of step 2 at 0.5, step 3 at 0.5, step 4 at 0.9 stood",
        ),
        (Ranked(removed={}, left=(2, 4)), "steps [2, 4] stand, expected [3, 4] among them"),
        (Ranked(best="step_2"), "best names step_2, expected step 3"),
        (Ranked(best=None), "best names None, expected step 3"),
        (Ranked(latest="step_3"), "latest names step_3, expected step 4"),
        (Ranked(after=(5,)), "step 5 at 0.6: steps [5] stand, expected [3, 5]"),
    ],
)
def test_a_run_that_loses_or_misnames_the_best(spoilt, words):
    assert_broken(judge(NAME, spoilt.history()), words, "the newest 1 and the best 1 stay, best is min and then the newer")


def test_checkpoints_are_ranked_by_metric_and_then_by_step():
    metrics = {1: 0.5, 2: None, 3: 0.2, 4: 0.5}
    assert ranked(metrics, Checkpoint(best_mode="min"), Layout()) == [3, 4, 1]
    assert ranked(metrics, Checkpoint(best_mode="max"), Layout(newer_wins_ties=False)) == [1, 4, 3]
