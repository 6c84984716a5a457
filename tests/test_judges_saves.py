"""Contracts of publish, retention, crash and writers judge hand-written histories of saves that met with trouble."""

from __future__ import annotations

import dataclasses

import pytest
from test_judges import (
    RANKS,
    assert_broken,
    assert_kept,
    file,
    judge,
    on_every_rank,
    renamed,
    states,
    stored,
    trained,
)  # fmt: skip

from contracts import crash_points
from contracts.case import (
    Blind,
    Case,
    Checkpoint,
    Exit,
    Fail,
    Finalize,
    Generation,
    Kill,
    Overwrite,
    PowerLoss,
    Resume,
    Save,
    Tamper,
    Train,
)  # fmt: skip
from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor
from contracts.history import Event, History
from contracts.implementation import Layout
from contracts.torchrun import RankOutcome

LAYOUT = Layout(pointer="latest")
TORN = dataclasses.replace(stored(), problems=("__0_0.distcp has 50 bytes",))


def attempt(operation: str, *paths: str, rank: int = 0) -> Event:
    return Event("attempt", rank, {"operation": operation, "paths": list(paths)})


def died(history: History, generation: int = 0, *, rank: int = 1) -> History:
    history.generations[generation].launch.outcomes[rank] = RankOutcome(rank, "killed", signal="SIGKILL")
    return history


def raised(history: History, generation: int, words: str = "ValueError: no") -> History:
    history.generations[generation].launch.outcomes[0] = RankOutcome(0, "raised", error=words)
    return history


def assert_not_applicable(judgement) -> None:
    assert judgement.verdict == "not-applicable", judgement


# --- killed in the second save; resumed, saved; resumed ---------------------------------------------------------------


@dataclasses.dataclass
class Crashed:
    """A run whose rank 1 was killed before the second checkpoint was whole, and which goes on from the first."""

    resumed: int = 1
    values: int | None = None
    left: dict[str, CheckpointDirectory] = dataclasses.field(default_factory=lambda: {"step_1": stored()})
    after: dict[str, CheckpointDirectory] = dataclasses.field(default_factory=lambda: {"step_1": stored(), "step_2": stored()})
    again: int = 2
    litter: tuple[str, ...] = ("tmp_step_2/left-over.bin",)
    struck: bool = True

    def history(self) -> History:
        save = (Train(1), Save(), Finalize())
        case = Case(
            generations=(
                Generation(ranks=RANKS, steps=save * 2, faults=(Kill(rank=1, event=1, save=2),)),
                Generation(ranks=RANKS, steps=(Resume(), *save, Train(1)), faults=(Tamper(how="litter"),)),
                Generation(ranks=RANKS, steps=(Resume(),)),
            )
        )
        values = self.resumed if self.values is None else self.values
        history = History.of(
            case,
            [], on_every_rank("resume-returns", step=self.resumed), on_every_rank("resume-returns", step=self.again),
            states=[
                [*states("saving", 1), *states("saving", 2), *states("trained", 1), *states("trained", 2)],
                [*states("resumed", self.resumed, seed=values), *states("trained", self.resumed + 1)],
                [],
            ],
            disk=[self.left, self.after, self.after],
            layout=LAYOUT,
        )  # fmt: skip
        if self.struck:
            line = {"fault": "Kill", "rank": 1, "operation": "open", "paths": ["tmp_step_2/a"]}
            history.generations[0].fired.append(line)
            died(history)
        history.generations[1].tampered.append({"how": "litter", "checkpoint": "step_1", "paths": list(self.litter)})
        return history


@pytest.mark.parametrize("name", ["crash.every-crash-point", "crash.stale-leftovers"])
def test_a_run_that_goes_on_from_what_is_whole_keeps(name):
    assert_kept(judge(name, Crashed().history()))


@pytest.mark.parametrize("name", ["crash.every-crash-point", "crash.stale-leftovers"])
def test_a_kill_that_never_struck_is_no_crash_point_for(name):
    assert_not_applicable(judge(name, Crashed(struck=False).history()))


@pytest.mark.parametrize(
    ("spoilt", "words"),
    [
        (
            Crashed(left={"step_1": stored(), "step_2": stored()}),
            "lost work: resumed at step 1; the newest whole checkpoint is of step 2",
        ),
        (
            Crashed(left={"step_1": stored(), "step_2": TORN}, resumed=2),
            "silently differs: resumed at step 2; the newest whole",
        ),
        (Crashed(values=7), "silently differs: resumed at step 1: model.layers.0.weight element 0"),
        (Crashed(left={}), "no whole checkpoint was left"),
        (Crashed(again=1), "lost work: the next resume came back at step 1"),
    ],
)
def test_a_crash_point_names_its_outcome(spoilt, words):
    assert_broken(
        judge("crash.every-crash-point", spoilt.history()), "rank 1 killed at event 1, before open tmp_step_2/a", words
    )


def test_a_resume_that_refuses_to_start_after_a_crash_is_broken():
    assert_broken(
        judge("crash.every-crash-point", raised(Crashed().history(), 1)), "refuses to start: rank 0 raised ValueError: no"
    )


def test_a_resume_that_hangs_after_a_crash_is_broken():
    history = raised(Crashed().history(), 1)
    history.generations[1].launch.timed_out = True
    assert_broken(judge("crash.every-crash-point", history), "hangs")


def test_a_leftover_in_a_checkpoint_is_broken():
    mixed = CheckpointDirectory({"left-over.bin": 9, **stored().files}, stored().tensors)
    history = Crashed(after={"step_1": stored(), "step_2": mixed}).history()
    assert_broken(judge("crash.stale-leftovers", history), "step_2 holds left-over.bin, left in tmp_step_2")
    assert_kept(judge("crash.every-crash-point", history))  # the checkpoint before it has no litter, and is whole all the same


def test_a_leftover_that_blocks_the_next_save_is_broken():
    assert_broken(judge("crash.stale-leftovers", raised(Crashed().history(), 1)), "with tmp_step_2 left behind")


# --- the power lost in the second save --------------------------------------------------------------------------------

NOTHING = {"cut": {}, "gone": [], "back": [], "unseen": []}


def powerless(crashed: Crashed | None = None, *, returned: int = 1, lost: str = "names and bytes", **took) -> History:
    """The same run, which lost power instead; `took` says what went with it."""
    history = (crashed or Crashed()).history()
    first = history.generations[0]
    fault = PowerLoss(rank=1, event=1, save=2, lost=lost)
    first.case = dataclasses.replace(first.case, faults=(fault,))
    first.fired[0]["fault"] = "PowerLoss"
    first.lost = NOTHING | took
    first.events += [*on_every_rank("save-begins", step=returned), *on_every_rank("finalize-returns")]
    return died(history, rank=0)


def test_a_run_that_goes_on_from_what_was_flushed_keeps():
    assert_kept(judge("crash.power-loss", powerless()))
    assert_kept(judge("crash.power-loss", powerless(gone=["tmp_step_2"], cut={"tmp_step_2/a": [9, 0]})))


@pytest.mark.parametrize(
    ("crashed", "took", "words"),
    [
        (Crashed(), {"cut": {"step_1/a": [9, 0]}}, "the save of step 1 had returned, and is lost: step_1/a has 0 of 9 bytes"),
        (Crashed(left={}, resumed=0), {"gone": ["step_1"], "back": ["tmp_step_1"]}, "is lost: step_1 is gone"),
        (Crashed(left={}, resumed=0), {"gone": ["latest"]}, "is lost: latest is gone"),
        (
            Crashed(left={"step_1": stored(), "step_2": TORN}, resumed=2), {"cut": {"step_2/a": [90, 0]}, "lost": "bytes"},
            "silently differs: resumed at step 2; the newest whole",
        ),
        (Crashed(left={"step_1": stored(), "step_2": stored()}), {}, "lost work: resumed at step 1; the newest whole"),
        (Crashed(values=7), {}, "silently differs: resumed at step 1: model.layers.0.weight element 0"),
    ],
)  # fmt: skip
def test_a_power_loss_names_its_outcome(crashed, took, words):
    lost = took.pop("lost", "names and bytes")
    point = f"power lost at event 1 of rank 1, before open tmp_step_2/a, and unflushed {lost} with it"
    assert_broken(judge("crash.power-loss", powerless(crashed, lost=lost, **took)), point, words)


def test_a_checkpoint_that_lost_bytes_is_not_the_newest_whole_one():
    whole = {"step_1": stored(), "step_2": stored()}
    assert_kept(judge("crash.power-loss", powerless(Crashed(left=whole), cut={"step_2/tokenizer.json": [9, 0]})))


def test_a_run_that_refuses_to_start_after_a_power_loss_is_broken():
    assert_broken(judge("crash.power-loss", raised(powerless(), 1)), "refuses to start: rank 0 raised ValueError: no")


def test_a_power_loss_is_judged_only_where_it_struck_and_every_writer_is_known():
    assert_not_applicable(judge("crash.every-crash-point", Crashed(struck=False).history()))
    assert_not_applicable(judge("crash.power-loss", powerless(unseen=["step_1/native.bin"])))
    assert_broken(judge("crash.power-loss", powerless(Crashed(values=7), unseen=["step_1/native.bin"])), "silently differs")


# --- a damaged file ---------------------------------------------------------------------------------------------------


def damaged(how: str, *events: Event) -> History:
    case = Case(
        generations=(
            Generation(ranks=RANKS, steps=(Train(1), Save(), Train(1), Save())),
            Generation(ranks=RANKS, steps=(Resume(refused=True),), faults=(Tamper(how=how),)),
        )
    )
    history = History.of(case, [], events, disk=[{"step_1": stored(), "step_2": stored()}, {}])
    history.generations[1].tampered.append({"how": how, "checkpoint": "step_2", "paths": ["step_2/__1_0.distcp"]})
    return history


DAMAGES = [
    ("crash.torn-file", "truncate"),
    ("crash.torn-file", "empty"),
    ("crash.torn-file", "remove"),
    ("crash.bit-flip", "flip"),
]


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_or_refused_by_name(name, how):
    assert_kept(judge(name, damaged(how, *on_every_rank("resume-returns", step=1))))
    assert_kept(
        judge(name, damaged(how, *on_every_rank("resume-refused", error="ValueError: /run/step_2/__1_0.distcp is torn")))
    )


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_damaged_checkpoint_that_is_loaded_is_broken(name, how):
    judgement = judge(name, damaged(how, *on_every_rank("resume-returns", step=2)))
    assert_broken(judgement, "step_2/__1_0.distcp was", "rank 0 resumed at step 2, expected 1 or an error")


@pytest.mark.parametrize("how", ["truncate", "empty", "remove"])
def test_a_torn_companion_that_a_resume_does_not_need_may_be_left_to_its_readers(how):
    def history(path: str, values: int = 2) -> History:
        made = damaged(how, *on_every_rank("resume-returns", step=2))
        made.layout = Layout(companions=("tokenizer.json",))
        made.generations[0].states = states("saving", 2)
        made.generations[1].states = states("resumed", 2, seed=values)
        made.generations[1].tampered[0]["paths"] = [path]
        return made

    assert_kept(judge("crash.torn-file", history("step_2/tokenizer/tokenizer.json")))
    assert_broken(judge("crash.torn-file", history("step_2/trainer.json")), "rank 0 resumed at step 2, expected 1 or an error")
    assert_broken(judge("crash.torn-file", history("step_2/tokenizer/tokenizer.json", values=7)), "rank 0 resumed at step 2")


@pytest.mark.parametrize(("name", "how"), DAMAGES)
def test_a_refusal_that_does_not_name_the_file_is_broken(name, how):
    judgement = judge(name, damaged(how, *on_every_rank("resume-refused", error="EOFError: Ran out of input")))
    assert_broken(judgement, "refuses and does not name it: EOFError")


# --- a rank that cannot write -----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Failed:
    """A run whose rank 1 could not write its second shard; every rank raised, and it goes on from the first checkpoint."""

    events: tuple[Event, ...] = tuple(on_every_rank("raised", step=4, error="PeerError: rank 1: no space"))
    left: dict[str, CheckpointDirectory] = dataclasses.field(default_factory=lambda: {"step_1": stored()})
    mode: str = "thread"
    resumed: int = 1
    error: str = "ENOSPC"

    def history(self) -> History:
        save = (Train(1), Save(), Finalize())
        case = Case(
            generations=(
                Generation(ranks=RANKS, steps=save * 2, faults=(Fail(rank=1, error=self.error),)),
                Generation(ranks=RANKS, steps=(Resume(), *save)),
            ),
            checkpoint=Checkpoint(mode=self.mode),
        )
        begun = [event for step in (1, 2) for event in on_every_rank("save-begins", step=step)]
        after = self.left | {f"step_{self.resumed + 1}": stored()}
        resumed = on_every_rank("resume-returns", step=self.resumed)
        history = History.of(case, [*begun, *self.events], resumed, disk=[self.left, after])
        line = {"fault": "Fail", "rank": 1, "operation": "open", "paths": ["tmp_step_2/__1_0.distcp"]}
        history.generations[0].fired.append(line)
        return history


FAILED = ["crash.disk-full", "publish.background-failure-surfaces", "writers.failure-reaches-everyone"]


@pytest.mark.parametrize("name", FAILED)
def test_a_failed_save_that_every_rank_hears_of_keeps(name):
    assert_kept(judge(name, Failed().history()))


@pytest.mark.parametrize(
    ("name", "spoilt", "words"),
    [
        ("crash.disk-full", Failed(events=()), "and no rank raised"),
        ("crash.disk-full", Failed(left={}), "no whole checkpoint was left"),
        ("crash.disk-full", Failed(left={"step_1": stored(), "step_2": TORN}), "step_2 is published and torn"),
        (
            "crash.disk-full",
            Failed(left={"step_1": stored(), "step_2": stored()}, resumed=2),
            "step 2 was published all the same",
        ),
        ("publish.background-failure-surfaces", Failed(events=()), "neither save nor finalize raised on rank 0"),
        ("writers.failure-reaches-everyone", Failed(events=(Failed().events[1], Event("gave-up", 1))), "rank 0 did not raise"),
        (
            "writers.failure-reaches-everyone",
            Failed(events=(Failed().events[1], Event("gave-up", 1), Failed().events[0])), "rank 0 did not raise",
        ),
    ],
)  # fmt: skip
def test_a_failed_save_that_is_not_told(name, spoilt, words):
    assert_broken(judge(name, spoilt.history()), "rank 1", "could not write tmp_step_2/__1_0.distcp", words)


def test_a_failed_save_after_which_ranks_wait_for_ever_is_broken():
    history = Failed().history()
    launch = history.generations[0].launch
    launch.timed_out, launch.outcomes[0] = True, RankOutcome(0, "terminated", stacks="torch/distributed/distributed_c10d.py")
    words = "rank 1 could not write tmp_step_2/__1_0.distcp; rank 0 waited for its peers when it was ended"
    assert_broken(judge("crash.disk-full", history), words)


@pytest.mark.parametrize("name", FAILED)
def test_a_writer_that_was_killed_is_told_of_in_these_words(name):
    killed = Failed(events=(), error="SIGKILL", mode="process").history()
    assert_broken(judge(name, killed), "rank 1's writer was killed before it wrote tmp_step_2/__1_0.distcp, and ")


# --- retention --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Retained:
    """Two saves of three kept one after the other, the oldest removed once the newest stands; then a resume and a save."""

    events: tuple[Event, ...] = (
        *renamed("tmp_step_9", "step_9"), *renamed("tmp_step_10", "step_10", cookie=2),
        *renamed("step_9", "deleting_step_9", cookie=3),
    )  # fmt: skip
    resumed: int = 10
    first: tuple[str, ...] = ("step_10",)
    second: tuple[str, ...] = ("step_11",)
    pointer: str = "step_11"
    foreign: tuple[str, ...] = ("step_100.backup/", "step_100.backup/a", "step_abc/")

    def history(self) -> History:
        save = (Train(1), Save(), Finalize())
        case = Case(
            generations=(
                Generation(ranks=RANKS, steps=save * 2),
                Generation(ranks=RANKS, steps=(Resume(), *save), faults=(Tamper(how="foreign"), Tamper(how="older-touched"))),
            ),
            checkpoint=Checkpoint(keep_latest=1),
        )
        later = [*on_every_rank("resume-returns", step=self.resumed), *on_every_rank("save-begins", step=11)]
        history = History.of(
            case,
            [*on_every_rank("save-begins", step=9), *on_every_rank("save-begins", step=10), *self.events],
            [*later, *renamed("tmp_step_11", "step_11"), *renamed("step_10", "deleting_step_10", cookie=2)],
            disk=[dict.fromkeys(self.first, stored()), dict.fromkeys(self.second, stored())],
            layout=LAYOUT,
        )
        first, second = history.generations
        first.pointer, second.pointer = "step_10", self.pointer
        first.names = {"step_10/": 0, "step_10/a": 3}
        second.names = {name: 0 if name.endswith("/") else 3 for name in self.foreign}
        foreign = {"how": "foreign", "checkpoint": "step_10", "paths": ["step_100.backup", "step_abc"]}
        second.tampered += [foreign, {"how": "older-touched", "checkpoint": "step_10", "paths": []}]
        return history


RETENTION = ["one-whole-always", "foreign-names-untouched", "latest-kept", "steps-order-numerically"]


@pytest.mark.parametrize("name", RETENTION)
def test_a_run_that_prunes_as_it_should_keeps(name):
    assert_kept(judge(f"retention.{name}", Retained().history()))


@pytest.mark.parametrize(
    ("name", "spoilt", "words"),
    [
        (
            "one-whole-always",
            Retained(
                events=(*renamed("tmp_step_9", "step_9"), file("deleted", "step_9/a"), *renamed("tmp_step_10", "step_10"))
            ),
            "step_9/a was deleted while step_9 was the only whole checkpoint",
        ),
        ("one-whole-always", Retained(pointer="tmp_step_11"), "latest names tmp_step_11; published: step_11"),
        (
            "foreign-names-untouched",
            Retained(foreign=("step_100.backup/", "step_100.backup/a")),
            "step_abc, which is not of this run, was removed",
        ),
        (
            "foreign-names-untouched",
            Retained(
                foreign=(
                    "step_100.backup/",
                    "step_abc/",
                    "step_100.backup/b",
                )
            ),
            "files in step_100.backup",
        ),
        ("foreign-names-untouched", Retained(resumed=100), "the resume came back at step 100, expected 10"),
        (
            "latest-kept",
            Retained(second=("step_10",), pointer="step_10"),
            "whole checkpoints are of steps [10], expected [11] among them",
        ),
        (
            "latest-kept",
            Retained(second=("step_10", "step_11"), pointer="step_10"),
            "latest names step 10, and the newest is 11",
        ),
        ("steps-order-numerically", Retained(resumed=9), "with checkpoints of steps [10], the resume came back at step 9"),
    ],
)
def test_a_run_that_prunes_wrongly(name, spoilt, words):
    assert_broken(judge(f"retention.{name}", spoilt.history()), words)


def interrupted(*, resumed: int = 2, after: tuple[str, ...] = ("step_2", "step_4")) -> History:
    save = (Train(1), Save(), Finalize())
    case = Case(
        generations=(
            Generation(ranks=RANKS, steps=save * 3, faults=(Kill(rank=1, event=4, save=3),)),
            Generation(ranks=RANKS, steps=(Resume(), Train(2), Save(), Finalize())),
        ),
        checkpoint=Checkpoint(keep_latest=2),
    )
    events = [*on_every_rank("resume-returns", step=resumed), *on_every_rank("save-begins", step=4)]
    disk = [{"step_1": stored(), "step_2": stored(), "step_3": TORN}, dict.fromkeys(after, stored())]
    history = died(History.of(case, [], events, disk=disk))
    history.generations[0].fired.append({"fault": "Kill", "rank": 1, "operation": "open", "paths": ["tmp_step_3/a"]})
    return history


def test_an_incomplete_checkpoint_is_neither_resumed_nor_counted():
    assert_kept(judge("retention.incomplete-never-counts", interrupted()))
    assert_broken(judge("retention.incomplete-never-counts", interrupted(resumed=3)), "resumed at step 3; whole: [1, 2]")
    judgement = judge("retention.incomplete-never-counts", interrupted(after=("step_4",)))
    assert_broken(judgement, "whole checkpoints are of steps [4], expected [2, 4] among them")


# --- pressed saves ----------------------------------------------------------------------------------------------------


def pressed(
    *steps,
    events=(),
    resumed: int = 2,
    values: int | None = None,
    disk=("step_1", "step_2"),
    small: dict | None = None,
    saved=(1, 2),
) -> History:
    case = Case(generations=(Generation(ranks=RANKS, steps=steps), Generation(ranks=RANKS, steps=(Resume(),))))
    values = resumed if values is None else values
    saving = [dataclasses.replace(s, small={"scheduler": {"epoch": step}}) for step in saved for s in states("saving", step)]
    back = [
        dataclasses.replace(s, small=small or {"scheduler": {"epoch": saved[-1]}})
        for s in states("resumed", resumed, seed=values)
    ]
    begun = [event for step in saved for event in on_every_rank("save-begins", step=step)]
    return History.of(
        case, [*begun, *events], on_every_rank("resume-returns", step=resumed), states=[saving, back],
        disk=[dict.fromkeys(disk, stored()), {}],
    )  # fmt: skip


TWICE = (Finalize(), Train(1), Save(), Train(1), Save(), Finalize(), Finalize())


def test_a_checkpoint_that_overwriting_reached_is_broken():
    steps = (Train(2), Save(), Overwrite(), Finalize())
    assert_kept(judge("publish.snapshot-is-isolated", pressed(*steps, saved=(2,))))
    assert_broken(
        judge("publish.snapshot-is-isolated", pressed(*steps, saved=(2,), values=9)),
        "tensors were overwritten after save had returned",
    )


def test_a_checkpoint_of_two_steps_is_broken():
    assert_kept(judge("publish.one-step-per-checkpoint", pressed(*TWICE)))
    # How often it was called is nothing that a scheduler has to bring back.
    assert_kept(judge("publish.one-step-per-checkpoint", pressed(*TWICE, small={"scheduler": {"epoch": 2, "_step_count": 1}})))
    judgement = judge("publish.one-step-per-checkpoint", pressed(*TWICE, small={"scheduler": {"epoch": 3}}))
    assert_broken(judgement, "rank 0 resumed scheduler {'epoch': 3}; with the tensors of step 2 went {'epoch': 2}")


def begun(step: int) -> Event:
    return file("created", f"tmp_step_{step}", directory=True)


def test_a_save_that_overlaps_the_next_is_broken():
    in_turn = [begun(1), *renamed("tmp_step_1", "step_1"), begun(2), *renamed("tmp_step_2", "step_2", cookie=2)]
    assert_kept(judge("publish.saves-do-not-overlap", pressed(*TWICE, events=in_turn)))
    assert_broken(
        judge("publish.saves-do-not-overlap", pressed(*TWICE, events=[begun(1), begun(2)])),
        "tmp_step_2 was begun while tmp_step_1",
    )
    assert_broken(
        judge("publish.saves-do-not-overlap", pressed(*TWICE, events=in_turn, disk=("step_2",))),
        "left whole checkpoints of steps [2]",
    )


def finalized(*between: Event) -> list[Event]:
    once = [Event("finalize-begins", 0), Event("finalize-returns", 0)]
    return [*once, *once, once[0], *between, once[1]]


def test_a_second_finalize_that_does_something_is_broken():
    assert_kept(judge("publish.finalize-is-idempotent", pressed(*TWICE, events=finalized())))
    judgement = judge(
        "publish.finalize-is-idempotent", pressed(*TWICE, events=finalized(attempt("rename", ".latest.new", "latest")))
    )
    assert_broken(judgement, "finalize with nothing in flight did this: rename .latest.new latest")


def test_a_finalize_with_nothing_in_flight_that_raises_is_broken():
    history = raised(pressed(*TWICE, events=[Event("finalize-begins", 0)]), 0)
    assert_broken(judge("publish.finalize-is-idempotent", history), "finalize, before the first save, failed: rank 0 raised")


def test_a_final_save_that_nobody_published_is_broken():
    steps = (Train(2), Save(final=True), Exit())
    assert_kept(judge("publish.exit-after-save", pressed(*steps, saved=(2,), disk=("step_2",))))
    assert_broken(
        judge("publish.exit-after-save", pressed(*steps, saved=(2,), disk=())),
        "every rank ended well after the final save of step 2",
    )


def held(*events: Event) -> History:
    from contracts.case import Hold

    generation = Generation(
        ranks=RANKS, steps=(Train(1), Save(), Train(1), Save()), faults=(Hold(rank=0, at="distcp$", until="save-returns"),)
    )
    case = Case(generations=(generation, Generation(ranks=RANKS, steps=(Resume(),))), checkpoint=Checkpoint(mode="thread"))
    return History.of(case, events, [])


def test_a_save_that_waits_for_its_writer_is_broken():
    shard, returns = attempt("open", "tmp_step_1/__0_0.distcp"), Event("save-returns", 0, {"step": 1})
    assert_kept(judge("publish.save-returns-early", held(returns, *trained(2), shard)))
    assert_broken(
        judge("publish.save-returns-early", held(shard, returns)), "returned on rank 0 only after tmp_step_1/__0_0.distcp"
    )


def test_a_shard_that_is_opened_in_save_and_closed_behind_training_is_early_enough():
    opened = Event("attempt", 0, {"operation": "open", "paths": ["tmp_step_1/__0_0.distcp"], "main": True})
    returns, closed = Event("save-returns", 0, {"step": 1}), file("closed", "tmp_step_1/__0_0.distcp")
    assert_kept(judge("publish.save-returns-early", held(opened, returns, *trained(2), closed)))
    assert_not_applicable(judge("publish.save-returns-early", held(opened, closed, returns)))


# --- writers ----------------------------------------------------------------------------------------------------------


def saved(*events: Event, writers: dict[str, set[int]] | None = None, disk=None) -> History:
    case = Case(generations=(Generation(ranks=RANKS, steps=(Train(1), Save(), Finalize())),))
    return History.of(case, events, states=[states("saving", 1)], writers=[writers or {}], disk=[disk or {}])


def test_a_path_that_two_ranks_write_is_broken():
    assert_kept(judge("writers.one-writer-per-path", saved(writers={"step_1/a": {0}, "step_1/b": {1}})))
    assert_broken(
        judge("writers.one-writer-per-path", saved(writers={"step_1/a": {0, 1}})), "step_1/a was written by ranks 0, 1"
    )


def test_a_save_that_one_rank_does_not_come_out_of_is_broken():
    begins = on_every_rank("save-begins", step=1)
    assert_kept(judge("writers.collectives-on-every-rank", saved(*begins, *on_every_rank("save-returns", step=1))))
    judgement = judge("writers.collectives-on-every-rank", saved(*begins, Event("save-returns", 1, {"step": 1})))
    assert_broken(judgement, "rank 0 entered save 1 and did not come out of it")


def test_a_checkpoint_that_lacks_what_a_rank_held_is_broken():
    whole = stored()
    tensors = {
        key: dataclasses.replace(t, shape=(3, 4), chunks=(((0, 0), (2, 4), "__0_0.distcp"),))
        for key, t in whole.tensors.items()
        if key.endswith("layers.0.weight")
    }
    history = saved(disk={"step_1": CheckpointDirectory(whole.files, tensors)})
    assert_broken(
        judge("writers.collectives-on-every-rank", history),
        "step_1 holds 0 of the 4 elements of model.layers.0.weight that rank 1 had",
    )


def test_shards_that_are_tensors_of_their_own_are_counted():
    def plain(**rows: int) -> History:
        tensors = {
            f"{name}.model.layers.0.weight": StoredTensor("float32", (n, 4), (((0, 0), (n, 4), f"{name}.bin"),))
            for name, n in rows.items()
        }
        return saved(disk={"step_1": CheckpointDirectory({}, tensors)})

    assert_kept(judge("writers.collectives-on-every-rank", plain(shard_0=2, shard_1=1)))
    judgement = judge("writers.collectives-on-every-rank", plain(shard_0=2))
    assert_broken(judgement, "step_1 holds 8 of the 12 elements of model.layers.0.weight that all ranks had")


def test_a_checkpoint_that_two_ranks_rename_is_broken():
    rename = [attempt("rename", "tmp_step_1", "step_1", rank=rank) for rank in range(RANKS)]
    assert_kept(judge("writers.one-publisher", saved(rename[0])))
    assert_broken(judge("writers.one-publisher", saved(*rename)), "step_1 was given its name by ranks 0, 1")


RESUMED = Event("resume-returns", 0, {"step": 2})


def viewed(*events: Event) -> History:
    generation = Generation(ranks=RANKS, steps=(Resume(), Train(1), Save()), faults=(Blind(rank=1, at="^step_2"),))
    return History.of(Case(generations=(Generation(ranks=RANKS, steps=(Train(1), Save())), generation)), [], events)


def test_ranks_that_take_one_branch_or_all_raise_keep():
    resumed, saved = on_every_rank("resume-returns", step=2), on_every_rank("save-returns", step=3)
    assert_kept(judge("writers.no-local-view-branching", viewed(*resumed, *saved)))
    assert_kept(judge("writers.no-local-view-branching", viewed(*on_every_rank("raised", step=0, error="PeerError: rank 1"))))


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([RESUMED, Event("resume-returns", 1, {"step": 1})], "rank 0 resumed at step 2; rank 1 resumed at step 1"),
        ([RESUMED, Event("raised", 1, {"step": 0})], "rank 0 resumed at step 2; rank 1 raised in its step number 0"),
        (
            [Event("raised", 1, {"step": 0}), Event("gave-up", 1), Event("raised", 0, {"step": 0})],
            "rank 0 came back from nothing; rank 1 raised in its step number 0",
        ),
    ],
)  # fmt: skip
def test_ranks_that_each_look_for_themselves_are_broken(events, words):
    assert_broken(judge("writers.no-local-view-branching", viewed(*events)), "rank 1 does not see ^step_2", words)


def test_ranks_that_wait_for_each_other_are_broken():
    history = raised(viewed(*on_every_rank("resume-returns", step=2)), 1)
    history.generations[1].launch.timed_out = True
    assert_broken(judge("writers.no-local-view-branching", history), "the ranks wait for each other")


# --- every crash point ------------------------------------------------------------------------------------------------


WRITER = 100


class Control:
    """A lab whose control run has two file events and a flush on rank 0, and an event on rank 1, after the second save began.

    A process that writes for rank 0 has an event, too.
    """

    def run(self, case: Case) -> History:
        saves = [event for step in (1, 2) for event in on_every_rank("save-begins", step=step)]
        begins = [Event("begins", rank, {"pid": rank}) for rank in range(RANKS)]
        of_rank_0 = [("attempt", 0, "mkdir", "b"), ("attempt", 0, "open", "b/c"), ("flush", 0, "fsync", "b/c")]
        others = [("attempt", 1, "open", "b/d"), ("attempt", WRITER, "open", "b/e")]
        after = [
            Event(kind, pid % WRITER, {"operation": operation, "paths": [path], "pid": pid})
            for kind, pid, operation, path in (*of_rank_0, *others)
        ]
        before = Event("attempt", 0, {"operation": "mkdir", "paths": ["a"], "pid": 0})
        return History.of(case, [*begins, before, *saves, *after])


def test_crash_points_are_the_events_of_the_second_save_on_every_rank():
    seen = [case.generations[0].faults[0] for case in crash_points.points(Control(), RANKS, "sync")]
    assert [(fault.rank, fault.event, fault.save) for fault in seen] == [(0, 0, 2), (0, 1, 2), (1, 0, 2)]


def test_files_are_torn_that_a_rank_opens_itself():
    seen = [case.generations[0].faults[0] for case in crash_points.points(Control(), RANKS, "sync", torn=True)]
    assert [(fault.rank, fault.event, fault.torn) for fault in seen] == [(0, 0, True), (1, 0, True)]


def test_power_is_lost_at_events_and_flushes_with_names_and_without():
    seen = [case.generations[0].faults[0] for case in crash_points.points(Control(), RANKS, "sync", power_loss=True)]
    assert all(isinstance(fault, PowerLoss) and fault.save == 2 for fault in seen)
    points = [(0, 0), (0, 1), (0, 2), (1, 0)]
    expected = [(*point, lost) for point in points for lost in ("names and bytes", "bytes")]
    assert [(fault.rank, fault.event, fault.lost) for fault in seen] == expected


def test_the_outcome_of_a_crash_point_is_told_in_one_of_five_ways():
    assert crash_points.outcome(Crashed().history()).outcome == "resumes exactly"
    assert crash_points.outcome(Crashed(values=7).history()).outcome == "silently differs"
    assert crash_points.outcome(raised(Crashed().history(), 1)).outcome == "refuses to start"
    assert crash_points.outcome(powerless(Crashed(left={}, resumed=0)), "crash.power-loss").outcome == "is lost"
