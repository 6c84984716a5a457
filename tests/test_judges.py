"""Contracts judge hand-written histories: what each calls kept, what broken and in which words, and what it cannot tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import contracts.catalog  # noqa: F401  fills the registry
from contracts.case import Case, Checkpoint, Finalize, Generation, Kill, MapNames, Precision, Resume, Save, Train
from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor
from contracts.history import Event, History, MissingEvidence, Shard, Snapshot, State, first_difference
from contracts.implementation import Layout
from contracts.judging import REGISTRY, Check, Contract, Judgement
from contracts.strategies.runs import MAPPINGS
from contracts.torchrun import RankOutcome

RANKS = 2
WEIGHT, NORM = "model.layers.0.weight", "model.norm.weight"


# --- words to write a history with -----------------------------------------------------------------------------------


def judge(name: str, history: History) -> Judgement:
    return REGISTRY[name](history)


def whole(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A (3, 4) weight and a (3,) norm, other values for another seed."""
    draw = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in ((WEIGHT, (3, 4)), (NORM, (3,)))}


def sharded(tensor: torch.Tensor, rank: int) -> Shard:
    """What `rank` of two holds under FSDP: rows 0 and 1 on the first, row 2 on the second."""
    pieces = tensor.split(2)
    offset = (2 * rank, *[0] * (tensor.dim() - 1))
    return Shard(pieces[rank].clone(), tuple(tensor.shape), offset)


def moments_of(seed: int, dtype: torch.dtype = torch.float32) -> dict[tuple[str, str], torch.Tensor]:
    first, second = whole(seed + 1000, dtype), whole(seed + 2000, dtype)
    found = {}
    for name in first:
        found[name, "exp_avg"], found[name, "exp_avg_sq"] = first[name], second[name]
        found[name, "step"] = torch.tensor(float(seed))
    return found


def states(label: str, step: int, *, seed: int | None = None, parameters=None, moments=None) -> list[State]:
    """Every rank's state under `label` at `step`; its values follow from the step unless told otherwise."""
    seed = step if seed is None else seed
    parameters = whole(seed) if parameters is None else parameters
    moments = moments_of(seed) if moments is None else moments

    def piece(tensor: torch.Tensor, rank: int) -> Shard:
        return sharded(tensor, rank) if tensor.dim() else Shard(tensor, (), ())

    return [
        State(
            label, rank, step,
            {name: piece(tensor, rank) for name, tensor in parameters.items()},
            {key: piece(tensor, rank) for key, tensor in moments.items()},
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def trained(*steps: int, loss: Callable[[int], float] = float, lr: Callable[[int], float] = float) -> list[Event]:
    return [
        Event("trained", rank, {"step": step, "loss": loss(step), "lr": lr(step)}) for step in steps for rank in range(RANKS)
    ]


def on_every_rank(kind: str, **data: Any) -> list[Event]:
    return [Event(kind, rank, data) for rank in range(RANKS)]


def file(operation: str, path: str, *, directory: bool = False, cookie: int = 0) -> Event:
    return Event("file", None, {"operation": operation, "path": path, "directory": directory, "cookie": cookie})


def written(path: str) -> list[Event]:
    return [file("created", path), file("modified", path), file("closed", path)]


def renamed(old: str, new: str, *, cookie: int = 1, directory: bool = True) -> list[Event]:
    return [
        file("moved-from", old, directory=directory, cookie=cookie),
        file("moved-to", new, directory=directory, cookie=cookie),
    ]


def failed(history: History, generation: int = 0, words: str = "ValueError: no room") -> History:
    """The same history, in which rank 1 of one generation raised."""
    history.generations[generation].launch.outcomes[1] = RankOutcome(1, "raised", error=words)
    return history


def without_evidence(case: Case) -> History:
    nothing = [[] for _ in case.generations]
    return History.of(case, *nothing, layout=Layout(companions=("tokenizer.json",)))


def assert_broken(judgement: Judgement, *words: str) -> None:
    assert judgement.verdict == "broken", judgement
    assert judgement.evidence > 0
    for word in words:
        assert word in judgement.message, judgement.message


def assert_kept(judgement: Judgement) -> None:
    assert judgement.verdict == "kept", judgement
    assert judgement.evidence > 0


# --- an interrupted run: train 2, save, train 3 more · resume, train the same 3 · a twin of the first -------------------

INTERRUPTED = Case(
    generations=(
        Generation(ranks=RANKS, steps=(Train(2), Save(), Finalize(), Train(3))),
        Generation(ranks=RANKS, steps=(Resume(), Train(3), Save(), Finalize()), seed=1),
        Generation(ranks=RANKS, steps=(Train(5),), root="twin"),
    )
)


@dataclasses.dataclass
class Interrupted:
    """An interrupted run that keeps every contract; a test spoils one piece of it."""

    first_events: list[Event] = dataclasses.field(default_factory=lambda: trained(1, 2, 3, 4, 5))
    again_events: list[Event] = dataclasses.field(
        default_factory=lambda: [
            *on_every_rank("optimizer-load-begins"), *on_every_rank("optimizer-load-ends"),
            *on_every_rank("scheduler-load-begins"), *on_every_rank("scheduler-load-ends"),
            *trained(3, 4, 5),
        ]
    )  # fmt: skip
    saving: list[State] = dataclasses.field(default_factory=lambda: states("saving", 2))
    first_trained: dict[int, list[State]] = dataclasses.field(
        default_factory=lambda: {step: states("trained", step) for step in range(1, 6)}
    )
    loading: list[State] = dataclasses.field(default_factory=lambda: states("optimizer-load-begins", 0, seed=2))
    resumed: list[State] = dataclasses.field(default_factory=lambda: states("resumed", 2))
    again_trained: dict[int, list[State]] = dataclasses.field(
        default_factory=lambda: {step: states("trained", step) for step in range(3, 6)}
    )
    twin_trained: dict[int, list[State]] = dataclasses.field(
        default_factory=lambda: {step: states("trained", step) for step in range(1, 6)}
    )
    disk: dict[str, CheckpointDirectory] = dataclasses.field(default_factory=lambda: {"step_2": stored(), "step_5": stored()})
    case: Case = INTERRUPTED

    def history(self) -> History:
        def flat(by_step: dict[int, list[State]]) -> list[State]:
            return [state for its in by_step.values() for state in its]

        return History.of(
            self.case, self.first_events, self.again_events, trained(1, 2, 3, 4, 5),
            states=[
                [*flat(self.first_trained), *self.saving],
                [*self.loading, *self.resumed, *flat(self.again_trained)],
                flat(self.twin_trained),
            ],
            disk=[{"step_2": stored()}, self.disk, {}],
        )  # fmt: skip


def stored(keys: Iterable[str] | None = None, *, dtype: str = "float32", problems: tuple[str, ...] = ()) -> CheckpointDirectory:
    """A checkpoint that holds tensors under these keys: by default both parameters and all their moments."""
    if keys is None:
        keys = [f"model.{name}" for name in (WEIGHT, NORM)]
        keys += [f"optimizer.state.{name}.{moment}" for name in (WEIGHT, NORM) for moment in ("exp_avg", "exp_avg_sq", "step")]
    tensors = {key: StoredTensor(dtype, (3,), (((0,), (3,), "__0_0.distcp"),)) for key in keys}
    return CheckpointDirectory({"__0_0.distcp": 100, ".metadata": 10}, tensors, problems)


RESUME_CONTRACTS = (
    "precision.moments-start-declared",
    "precision.moments-survive-resume",
    "precision.moments-declared-on-disk",
    "order.params-final-before-optimizer",
    "order.scheduler-after-optimizer",
    "resume.trajectory",
)


@pytest.mark.parametrize("name", RESUME_CONTRACTS)
def test_a_run_that_was_resumed_as_it_should_keeps(name):
    assert_kept(judge(name, Interrupted().history()))


@pytest.mark.parametrize("name", RESUME_CONTRACTS)
def test_a_resume_whose_ranks_failed_is_not_kept_by(name):
    judgement = judge(name, failed(Interrupted().history(), 2))
    assert judgement.verdict == "unknown"
    assert "generation 2 (2 ranks: train 5 (in twin)): rank 1 raised ValueError: no room" in judgement.message


# precision


def test_moments_that_start_in_bfloat16_break_moments_start_declared():
    run = Interrupted()
    run.first_trained[1] = states("trained", 1, moments=moments_of(1, torch.bfloat16))
    assert_broken(
        judge("precision.moments-start-declared", run.history()),
        f"rank 0: exp_avg of {WEIGHT} is bfloat16 after the first step, declared float32",
        "(and 7 more)",
    )


def test_moments_in_bfloat16_keep_moments_start_declared_where_that_is_declared():
    run = Interrupted(case=dataclasses.replace(INTERRUPTED, precision=Precision(moments="bfloat16")))
    for by_step in (run.first_trained, run.again_trained, run.twin_trained):
        by_step.update({step: states("trained", step, moments=moments_of(step, torch.bfloat16)) for step in by_step})
    assert_kept(judge("precision.moments-start-declared", run.history()))


def test_a_moment_on_another_device_than_its_parameter_breaks_moments_start_declared():
    run = Interrupted()
    moments = run.again_trained[3][1].moments
    moments[NORM, "exp_avg"] = dataclasses.replace(moments[NORM, "exp_avg"], device="cuda:0")
    assert_broken(
        judge("precision.moments-start-declared", run.history()),
        f"rank 1: exp_avg of {NORM} is on cuda:0, its parameter on cpu",
    )


def test_moments_that_went_through_bfloat16_break_moments_survive_resume():
    run = Interrupted()
    rounded = {key: value.bfloat16().float() for key, value in moments_of(2).items()}
    run.resumed = states("resumed", 2, moments=rounded)
    seen, wanted = rounded[WEIGHT, "exp_avg"].view(-1)[0].item(), moments_of(2)[WEIGHT, "exp_avg"].view(-1)[0].item()
    assert_broken(
        judge("precision.moments-survive-resume", run.history()),
        f"moments at step 2 after the resume: ('{WEIGHT}', 'exp_avg') element 0 is {seen!r}, expected {wanted!r}",
        "4 of 6 tensors differ",
    )


def test_a_moment_in_another_dtype_breaks_moments_survive_resume():
    run = Interrupted()
    run.resumed = states("resumed", 2, moments=moments_of(2, torch.bfloat16))
    assert_broken(
        judge("precision.moments-survive-resume", run.history()), "is torch.bfloat16 [3, 4], expected torch.float32 [3, 4]"
    )


def test_a_moment_that_is_gone_breaks_moments_survive_resume():
    run = Interrupted()
    run.resumed = states("resumed", 2, moments={k: v for k, v in moments_of(2).items() if k != (NORM, "exp_avg_sq")})
    assert_broken(judge("precision.moments-survive-resume", run.history()), f"('{NORM}', 'exp_avg_sq') is missing")


def test_a_moment_in_another_dtype_on_disk_breaks_moments_declared_on_disk():
    run = Interrupted()
    run.disk["step_5"] = stored(dtype="bfloat16")
    assert_broken(
        judge("precision.moments-declared-on-disk", run.history()),
        f"step_5: optimizer.state.{WEIGHT}.exp_avg is bfloat16 on disk, declared float32",
    )


def test_a_checkpoint_without_moments_breaks_moments_declared_on_disk():
    run = Interrupted()
    run.disk["step_2"] = stored([f"model.{WEIGHT}"])
    assert_broken(judge("precision.moments-declared-on-disk", run.history()), "step_2 holds no Adam moment")


def otherwise_named(*dtypes: str) -> CheckpointDirectory:
    """Both parameters and, under names of a store's own, their first and second moments in these dtypes, and step counts."""
    kinds = {"model": "float32", "adam/m": dtypes[0], "adam/v": dtypes[1]}
    tensors = {f"{kind}/{name}": StoredTensor(dtype, (3,), ()) for kind, dtype in kinds.items() for name in (WEIGHT, NORM)}
    steps = {f"adam/t/{name}": StoredTensor("float32", (), ()) for name in (WEIGHT, NORM)}
    return CheckpointDirectory({".metadata": 10}, tensors | steps)


def test_moments_of_other_names_keep_moments_declared_on_disk_and_published_is_whole():
    run = Interrupted()
    run.disk["step_5"] = otherwise_named("float32", "float32")
    assert_kept(judge("precision.moments-declared-on-disk", run.history()))
    assert_kept(judge("publish.published-is-whole", saved_run(disk={"step_1": run.disk["step_5"]})))


def test_a_moment_of_another_name_in_another_dtype_breaks_moments_declared_on_disk():
    run = Interrupted()
    run.disk["step_5"] = otherwise_named("bfloat16", "float32")
    assert_broken(
        judge("precision.moments-declared-on-disk", run.history()),
        f"step_5 holds no Adam moment of {WEIGHT} in float32: 1 tensors, expected 2",
    )


# order


def test_a_cast_after_the_optimizer_has_loaded_breaks_params_final_before_optimizer():
    run = Interrupted()
    run.loading = states("optimizer-load-begins", 0, seed=2, parameters=whole(2, torch.bfloat16))
    assert_broken(
        judge("order.params-final-before-optimizer", run.history()),
        f"rank 0 · {WEIGHT} was torch.bfloat16 when optimizer state loaded (final: torch.float32)",
    )


def test_parameters_that_load_after_the_optimizer_break_params_final_before_optimizer():
    run = Interrupted()
    run.loading[1] = states("optimizer-load-begins", 0, seed=7)[1]
    assert_broken(
        judge("order.params-final-before-optimizer", run.history()),
        f"rank 1 · {WEIGHT} changed value after optimizer state loaded",
        "(and 1 more)",
    )


def test_a_parameter_that_is_gone_after_the_resume_breaks_params_final_before_optimizer():
    run = Interrupted()
    del run.resumed[0].parameters[NORM]
    assert_broken(judge("order.params-final-before-optimizer", run.history()), f"rank 0 · {NORM} is gone after the resume")


def test_a_resume_in_which_no_optimizer_was_seen_to_load_is_unknown_to_params_final_before_optimizer():
    run = Interrupted(loading=[])
    assert judge("order.params-final-before-optimizer", run.history()).verdict == "unknown"


def test_a_scheduler_that_loads_first_breaks_scheduler_after_optimizer():
    run = Interrupted()
    run.again_events = [
        *on_every_rank("scheduler-load-begins"), *on_every_rank("optimizer-load-begins"), *on_every_rank("optimizer-load-ends"),
        *trained(3, 4, 5),
    ]  # fmt: skip
    assert_broken(
        judge("order.scheduler-after-optimizer", run.history()),
        "rank 0: scheduler state loaded before optimizer state",
        "(and 1 more)",
    )


def test_a_first_rate_that_is_not_the_uninterrupted_one_breaks_scheduler_after_optimizer():
    run = Interrupted()
    run.again_events = trained(3, 4, 5, lr=lambda step: 0.5 if step == 3 else float(step))
    assert_broken(
        judge("order.scheduler-after-optimizer", run.history()),
        "rank 0: step 3 after the resume used rate 0.5, uninterrupted 3.0",
    )


def test_a_stack_that_reports_no_rate_is_unknown_to_scheduler_after_optimizer():
    run = Interrupted()
    for event in run.again_events:
        if event.kind == "trained":
            del event.data["lr"]
    judgement = judge("order.scheduler-after-optimizer", run.history())
    assert (judgement.verdict, judgement.message) == ("unknown", "event 'trained' of rank 0 has no 'lr'")


# resume


def test_a_parameter_that_was_restored_wrong_breaks_trajectory():
    run = Interrupted()
    wrong = whole(2) | {NORM: whole(2)[NORM] + torch.tensor([0.0, 1.0, 0.0])}
    run.resumed = states("resumed", 2, parameters=wrong)
    assert_broken(judge("resume.trajectory", run.history()), f"state at step 2: {NORM} element 1 is ", "1 of 8 tensors differ")


def test_a_second_step_that_diverges_breaks_trajectory():
    run = Interrupted()
    run.again_trained[4] = states("trained", 4, seed=40)
    assert_broken(judge("resume.trajectory", run.history()), f"after step 4: {WEIGHT} element 0 is ", ", expected ")


def test_a_rate_that_explains_a_divergence_is_said_first_by_trajectory():
    run = Interrupted()
    run.again_trained[3] = states("trained", 3, seed=40)
    run.again_events = trained(3, 4, 5, lr=lambda step: 0.5 if step == 3 else float(step))
    assert_broken(
        judge("resume.trajectory", run.history()), f"step 3 used rate 0.5, uninterrupted 3.0; after it: {WEIGHT} element 0 is "
    )


def test_a_loss_that_differs_breaks_trajectory():
    run = Interrupted()
    run.again_events = trained(3, 4, 5, loss=lambda step: step + (step == 5))
    assert_broken(judge("resume.trajectory", run.history()), "loss of step 5 is 6, uninterrupted 5.0")


def test_a_wrong_step_count_breaks_trajectory_though_every_tensor_is_right():
    run = Interrupted()
    run.resumed = states("resumed", 0, seed=2)
    assert_broken(judge("resume.trajectory", run.history()), "resumed at step 0, saved at step 2")


def test_a_resume_that_failed_breaks_trajectory():
    assert_broken(
        judge("resume.trajectory", failed(Interrupted().history(), 1)),
        "the resumed generation failed: rank 1 raised ValueError: no room",
    )


def test_a_resume_from_a_save_that_failed_is_unknown_to_trajectory():
    judgement = judge("resume.trajectory", failed(failed(Interrupted().history(), 0), 1))
    assert judgement.verdict == "unknown"
    assert "generation 0" in judgement.message


def test_a_divergence_that_fault_free_runs_show_too_is_unknown_to_trajectory():
    run = Interrupted()
    run.twin_trained[3] = states("trained", 3, seed=30)
    run.again_trained[3] = states("trained", 3, seed=31)
    judgement = judge("resume.trajectory", run.history())
    assert judgement.verdict == "unknown"
    assert "cannot judge: two fault-free runs differ after step 3" in judgement.message


def test_without_a_twin_trajectory_is_unknown():
    generations = INTERRUPTED.generations[:2]
    run = Interrupted().history()
    history = dataclasses.replace(
        run, case=dataclasses.replace(INTERRUPTED, generations=generations), generations=run.generations[:2]
    )
    judgement = judge("resume.trajectory", history)
    assert (judgement.verdict, judgement.message) == (
        "unknown",
        "no twin run from the same seed, so a divergence could not be judged",
    )


# --- a saved run: train, save, train, finalize ---------------------------------------------------------------------------

SAVED = Case(generations=(Generation(ranks=RANKS, steps=(Train(1), Save(), Train(1), Finalize())),))
COMPANION = "tokenizer.json"


def saved_run(
    *events: Event, case: Case = SAVED, disk: dict | None = None, writers: dict | None = None, layout: Layout | None = None
) -> History:
    layout = layout or Layout(companions=(COMPANION,))
    saving = states("saving", 1)
    return History.of(
        case, events, layout=layout, states=[saving], writers=[writers or {}],
        disk=[{"step_1": stored()} if disk is None else disk],
    )  # fmt: skip


def a_save(*, temporary: str = "tmp_step_1", final: str = "step_1") -> list[Event]:
    """What a save that keeps every contract looks like from outside."""
    return [
        *on_every_rank("save-begins", step=1),
        file("created", temporary, directory=True),
        *written(f"{temporary}/{COMPANION}"),
        *on_every_rank("save-returns", step=1),
        *written(f"{temporary}/__0_0.distcp"),
        *renamed(temporary, final),
    ]


WRITTEN_BY_RANK_0 = {f"tmp_step_1/{COMPANION}": {0}}
SAVE_CONTRACTS = (
    "publish.finalize-before-rename",
    "publish.published-is-whole",
    "writers.replicated-files-rank-0",
    "writers.visible-on-return",
)


@pytest.mark.parametrize("name", SAVE_CONTRACTS)
def test_a_save_as_it_should_be_keeps(name):
    assert_kept(judge(name, saved_run(*a_save(), writers=WRITTEN_BY_RANK_0)))


@pytest.mark.parametrize("name", SAVE_CONTRACTS)
def test_a_save_whose_ranks_failed_is_unknown_to(name):
    judgement = judge(name, failed(saved_run(*a_save(), writers=WRITTEN_BY_RANK_0)))
    assert (judgement.verdict, judgement.evidence > 0) == ("unknown", True)
    assert "rank 1 raised ValueError: no room" in judgement.message


@pytest.mark.parametrize("name", SAVE_CONTRACTS)
def test_a_save_that_failed_before_it_wrote_is_unknown_to(name):
    history = failed(saved_run(*on_every_rank("save-begins", step=1), disk={}))
    assert judge(name, history).verdict == "unknown"


@pytest.mark.parametrize("name", SAVE_CONTRACTS)
def test_a_save_whose_file_events_were_lost_is_unknown_to(name):
    history = saved_run(*a_save(), writers=WRITTEN_BY_RANK_0)
    history.generations[0].notes.append("inotify's queue overflowed: file events are missing")
    judgement = judge(name, history)
    assert (judgement.verdict, judgement.message) == ("unknown", "inotify's queue overflowed: file events are missing")


# publish


@pytest.mark.parametrize("operation", ["created", "modified", "closed", "moved-to"])
def test_a_byte_that_changes_after_publication_breaks_finalize_before_rename(operation):
    history = saved_run(*a_save(), file(operation, "step_1/__1_0.distcp"))
    assert_broken(
        judge("publish.finalize-before-rename", history), f"step_1/__1_0.distcp was {operation} after step_1 had been published"
    )


def test_a_temporary_directory_that_comes_back_breaks_finalize_before_rename():
    history = saved_run(*a_save(), file("created", "tmp_step_1", directory=True))
    assert_broken(judge("publish.finalize-before-rename", history), "tmp_step_1 came back after it was renamed to step_1")


def attempt(operation: str, *paths: str, rank: int = 1) -> Event:
    return Event("attempt", rank, {"operation": operation, "paths": list(paths)})


def test_a_writer_that_turns_to_the_old_name_breaks_finalize_before_rename_though_it_fails():
    history = saved_run(*a_save(), attempt("open", "tmp_step_1/__1_0.distcp"))
    assert_broken(
        judge("publish.finalize-before-rename", history),
        "rank 1 opened tmp_step_1/__1_0.distcp for writing after its rename to step_1",
    )


def test_attempts_before_the_rename_keep_finalize_before_rename():
    history = saved_run(
        attempt("open", "tmp_step_1/__1_0.distcp"), *a_save(), attempt("rename", "tmp_step_2", "step_2", rank=0)
    )
    assert_kept(judge("publish.finalize-before-rename", history))


def test_a_save_that_publishes_nothing_breaks_finalize_before_rename():
    history = saved_run(file("created", "tmp_step_1", directory=True), disk={})
    assert_broken(judge("publish.finalize-before-rename", history), r"'step_(?P<step>\\d+)' appeared after 1 save")


def test_a_checkpoint_that_no_event_announced_is_unknown_to_finalize_before_rename():
    judgement = judge("publish.finalize-before-rename", saved_run())
    assert judgement.verdict == "unknown"
    assert "step_1 stands there, and no file event says when it was published" in judgement.message


def test_deleting_an_old_checkpoint_keeps_finalize_before_rename():
    history = saved_run(*a_save(), file("deleted", "step_1/__0_0.distcp"), file("deleted", "step_1", directory=True))
    assert_kept(judge("publish.finalize-before-rename", history))


def test_another_save_under_the_same_temporary_name_for_another_step_keeps_finalize_before_rename():
    history = saved_run(
        file("created", "tmp_a", directory=True), *renamed("tmp_a", "step_1", cookie=1),
        file("created", "tmp_b", directory=True), *renamed("tmp_b", "step_2", cookie=2),
    )  # fmt: skip
    assert_kept(judge("publish.finalize-before-rename", history))


MARKED = Layout(companions=(COMPANION,), incomplete=".incomplete")


def test_a_stack_that_writes_in_place_publishes_when_its_mark_goes():
    history = saved_run(
        file("created", "step_1", directory=True), *written("step_1/.incomplete"), *written("step_1/__0_0.distcp"),
        file("deleted", "step_1/.incomplete"), layout=MARKED,
    )  # fmt: skip
    assert_kept(judge("publish.finalize-before-rename", history))


def test_a_byte_that_changes_after_the_mark_has_gone_breaks_finalize_before_rename():
    history = saved_run(
        file("created", "step_1", directory=True), *written("step_1/.incomplete"), file("deleted", "step_1/.incomplete"),
        *written("step_1/__0_0.distcp"), layout=MARKED,
    )  # fmt: skip
    assert_broken(
        judge("publish.finalize-before-rename", history), "step_1/__0_0.distcp was created after step_1 had been published"
    )


def test_a_shard_that_its_metadata_names_and_is_not_there_breaks_published_is_whole():
    history = saved_run(disk={"step_1": stored(problems=("__1_0.distcp is named by .metadata and missing",))})
    assert_broken(judge("publish.published-is-whole", history), "step_1: __1_0.distcp is named by .metadata and missing")


def test_a_checkpoint_without_optimizer_state_breaks_published_is_whole():
    history = saved_run(disk={"step_1": stored([f"model.{WEIGHT}", f"model.{NORM}"])})
    assert_broken(judge("publish.published-is-whole", history), f"step_1 has no exp_avg of {WEIGHT}", "(and 5 more)")


def test_one_moment_that_is_not_stored_breaks_published_is_whole():
    keys = [key for key in stored().tensors if key != f"optimizer.state.{NORM}.exp_avg"]
    assert_broken(
        judge("publish.published-is-whole", saved_run(disk={"step_1": stored(keys)})), f"step_1 has no exp_avg of {NORM}"
    )


def test_moments_alone_are_no_parameters():
    # Keys that end in a parameter's name and yet are moments, as Megatron writes them.
    keys = [f"optimizer.state.{moment}.{name}" for name in (WEIGHT, NORM) for moment in ("exp_avg", "exp_avg_sq", "step")]
    assert_broken(
        judge("publish.published-is-whole", saved_run(disk={"step_1": stored(keys)})), f"step_1 has no parameter {WEIGHT}"
    )


def test_moments_named_before_their_parameters_keep_published_is_whole():
    keys = [f"optimizer.state.{moment}.{name}" for name in (WEIGHT, NORM) for moment in ("exp_avg", "exp_avg_sq", "step")]
    assert_kept(judge("publish.published-is-whole", saved_run(disk={"step_1": stored([*keys, WEIGHT, NORM])})))


def test_a_parameter_whose_name_only_ends_alike_is_missing_to_published_is_whole():
    keys = [key.replace(f"model.{NORM}", f"model.input_{NORM}") for key in stored().tensors]
    assert_broken(
        judge("publish.published-is-whole", saved_run(disk={"step_1": stored(keys)})), f"step_1 has no parameter {NORM}"
    )


def test_a_save_that_was_never_published_breaks_published_is_whole():
    assert_broken(judge("publish.published-is-whole", saved_run(disk={})), "the save of step 1 was never published")


def test_saves_that_the_policy_has_deleted_need_not_be_published():
    case = dataclasses.replace(SAVED, checkpoint=Checkpoint(keep_latest=1))
    history = saved_run(case=case, disk={"step_2": stored()})
    history.generations[0].states += states("saving", 2)
    assert_kept(judge("publish.published-is-whole", history))


# writers


def test_a_companion_that_every_rank_writes_breaks_replicated_files_rank_0():
    history = saved_run(*a_save(), writers={f"tmp_step_1/{COMPANION}": {0, 1}})
    assert_broken(judge("writers.replicated-files-rank-0", history), f"tmp_step_1/{COMPANION} was written by ranks 0, 1")


def test_a_companion_that_another_rank_writes_breaks_replicated_files_rank_0():
    history = saved_run(*a_save(), writers={f"tmp_step_1/{COMPANION}": {1}})
    assert_broken(judge("writers.replicated-files-rank-0", history), f"tmp_step_1/{COMPANION} was written by rank 1")


def test_a_shard_that_every_rank_writes_for_itself_is_nothing_to_replicated_files_rank_0():
    history = saved_run(*a_save(), writers=WRITTEN_BY_RANK_0 | {"tmp_step_1/__1_0.distcp": {1}})
    assert_kept(judge("writers.replicated-files-rank-0", history))


def test_a_companion_whose_writer_was_not_seen_is_unknown_to_replicated_files_rank_0():
    judgement = judge("writers.replicated-files-rank-0", saved_run(*a_save()))
    assert (judgement.verdict, judgement.message) == ("unknown", "the history holds no evidence for it")


def test_a_companion_that_is_written_aside_and_renamed_keeps_both_contracts_of_writers():
    history = saved_run(
        *on_every_rank("save-begins", step=1), *written("tmp_step_1/part"),
        *renamed("tmp_step_1/part", f"tmp_step_1/{COMPANION}", directory=False),
        *on_every_rank("save-returns", step=1), writers=WRITTEN_BY_RANK_0,
    )  # fmt: skip
    assert_kept(judge("writers.visible-on-return", history))
    assert_kept(judge("writers.replicated-files-rank-0", history))


def test_a_companion_that_is_complete_only_after_a_rank_has_returned_breaks_visible_on_return():
    history = saved_run(
        *on_every_rank("save-begins", step=1), file("created", f"tmp_step_1/{COMPANION}"),
        Event("save-returns", 1, {"step": 1}), file("closed", f"tmp_step_1/{COMPANION}"),
        Event("save-returns", 0, {"step": 1}),
    )  # fmt: skip
    assert_broken(
        judge("writers.visible-on-return", history),
        f"save of step 1 returned on rank 1 before tmp_step_1/{COMPANION} was complete",
    )


def test_a_companion_that_is_never_written_breaks_visible_on_return():
    history = saved_run(*on_every_rank("save-begins", step=1), *on_every_rank("save-returns", step=1))
    assert_broken(judge("writers.visible-on-return", history), f"no {COMPANION} was written by the save of step 1")


def test_a_rank_that_runs_ahead_into_the_next_save_breaks_visible_on_return():
    history = saved_run(
        Event("save-begins", 1, {"step": 1}), Event("save-returns", 1, {"step": 1}),
        Event("save-begins", 1, {"step": 2}), Event("save-returns", 1, {"step": 2}),
        Event("save-begins", 0, {"step": 1}), *written(f"step_1/{COMPANION}"), Event("save-returns", 0, {"step": 1}),
        Event("save-begins", 0, {"step": 2}), *written(f"step_2/{COMPANION}"), Event("save-returns", 0, {"step": 2}),
    )  # fmt: skip
    assert_broken(judge("writers.visible-on-return", history), "step 1")


def test_a_second_save_needs_its_own_companion():
    history = saved_run(*a_save(), *on_every_rank("save-begins", step=2), *on_every_rank("save-returns", step=2))
    assert_broken(judge("writers.visible-on-return", history), f"no {COMPANION} was written by the save of step 2")


# --- a mapping -----------------------------------------------------------------------------------------------------------

MAPPING = Case(generations=(Generation(ranks=1, steps=(MapNames("bert"),)),))


def mapped(
    once: dict[str, str | None], *, targets: list[str], twice: dict[str, str | None] | None = None, ignored: tuple = ()
) -> History:
    twice = {name: name for name in once.values() if name} if twice is None else twice
    return History.of(
        MAPPING, [Event("mapped", 0, {"source": "bert", "once": once, "twice": twice, "targets": targets, "ignored": ignored})]
    )


@pytest.mark.parametrize("name", ["keys.mapping-is-idempotent", "keys.nothing-falls-through"])
def test_a_mapping_that_fills_every_parameter_keeps(name):
    assert_kept(judge(name, mapped({"bert.a": "model.a", "bert.b": "model.b"}, targets=["model.a", "model.b"])))


def test_a_prefix_that_is_added_once_more_breaks_mapping_is_idempotent():
    history = mapped({"a": "model.a"}, targets=["model.a"], twice={"model.a": "model.model.a"})
    assert_broken(judge("keys.mapping-is-idempotent", history), "bert: model.a maps to model.model.a the second time")


def test_a_name_that_reaches_no_parameter_breaks_nothing_falls_through():
    history = mapped({"bert.a": "model.a", "visual.b": "model.visual.b"}, targets=["model.a"])
    assert_broken(
        judge("keys.nothing-falls-through", history),
        "bert: 1 of 2 published names reach no parameter, first visual.b (mapped to model.visual.b)",
    )


def test_a_parameter_that_no_name_fills_breaks_nothing_falls_through():
    history = mapped({"bert.a": "model.a"}, targets=["model.a", "lm_head.weight"])
    assert_broken(
        judge("keys.nothing-falls-through", history),
        "bert: 1 of 2 parameters are filled by no published name, first lm_head.weight",
    )


def test_names_that_are_declared_ignored_keep_nothing_falls_through():
    history = mapped(
        {"a": "model.a", "rotary.inv_freq": "rotary.inv_freq", "pooler": None}, targets=["model.a"], ignored=(r"inv_freq$",)
    )
    assert_kept(judge("keys.nothing-falls-through", history))


@pytest.mark.parametrize("name", ["keys.mapping-is-idempotent", "keys.nothing-falls-through"])
def test_a_model_that_is_not_supported_is_not_applicable_to(name):
    history = History.of(MAPPING, [Event("mapping-unsupported", 0, {"source": "bert"})])
    judgement = judge(name, history)
    assert (judgement.verdict, judgement.message) == ("not-applicable", "the implementation does not map bert")


# --- every contract ------------------------------------------------------------------------------------------------------


def its_case(contract: Contract) -> Case:
    if contract.cases is MAPPINGS:
        return MAPPING
    return INTERRUPTED if contract.name in RESUME_CONTRACTS else SAVED


TWELVE = (*RESUME_CONTRACTS, *SAVE_CONTRACTS, "keys.mapping-is-idempotent", "keys.nothing-falls-through")


def test_the_twelve_contracts_of_the_first_families_are_in_the_registry():
    assert len(TWELVE) == 12
    assert set(TWELVE) <= set(REGISTRY)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_history_without_evidence_is_never_kept_by(name):
    history = without_evidence(its_case(REGISTRY[name]))
    judgement = judge(name, history)
    # A run that ended well and published nothing is itself what one contract forbids; others judge declared policies only.
    allowed = (
        {"broken"}
        if name == "publish.finalize-before-rename"
        else {"unknown"}
        if name in TWELVE
        else {"unknown", "not-applicable"}
    )
    assert judgement.verdict in allowed, judgement
    assert judgement.message


@pytest.mark.parametrize("name", REGISTRY)
def test_a_generation_that_failed_is_never_kept_by(name):
    case = its_case(REGISTRY[name])
    history = without_evidence(case)
    history.generations[0].launch.outcomes[0] = RankOutcome(0, "killed", signal="SIGKILL")
    judgement = judge(name, history)
    assert judgement.verdict in ({"unknown"} if name in TWELVE else {"unknown", "not-applicable"}), judgement
    assert judgement.verdict == "not-applicable" or "rank 0 was killed by SIGKILL" in judgement.message


@pytest.mark.parametrize("name", REGISTRY)
def test_a_judge_that_raises_knows_nothing(name):
    def judge_and_fail(history: History, check: Check) -> None:
        check(True, "")
        raise KeyError("layers.7")

    judgement = dataclasses.replace(REGISTRY[name], judge=judge_and_fail)(without_evidence(its_case(REGISTRY[name])))
    assert judgement.verdict == "unknown"
    assert "the judge raised" in judgement.message
    assert "KeyError: 'layers.7'" in judgement.message


@pytest.mark.parametrize("name", TWELVE)
def test_each_of_the_twelve_says_what_why_and_who_has_seen_it(name):
    contract = REGISTRY[name]
    assert contract.statement.endswith(".")
    assert contract.why
    assert contract.seen
    assert contract.needs


def test_what_was_broken_stays_broken_where_the_judge_then_raises():
    def judge_and_fail(history: History, check: Check) -> None:
        check(False, "rank 1 lost a tensor")
        raise MissingEvidence("no more")

    judgement = dataclasses.replace(REGISTRY["resume.trajectory"], judge=judge_and_fail)(without_evidence(SAVED))
    assert (judgement.verdict, judgement.message) == ("broken", "rank 1 lost a tensor")


# --- reading a history ---------------------------------------------------------------------------------------------------


def test_a_snapshot_puts_the_ranks_shards_together():
    snapshot = Snapshot(tuple(states("saving", 2)))
    assert first_difference(whole(2), snapshot.parameters()) is None
    assert first_difference(moments_of(2), snapshot.moments()) is None


def test_a_snapshot_with_a_hole_is_no_evidence():
    one, other = states("saving", 2)
    other.parameters[WEIGHT] = Shard(torch.empty(0, 4), (3, 4), (3, 4))
    with pytest.raises(MissingEvidence, match=r"the ranks' shards of model\.layers\.0\.weight leave 4 elements uncovered"):
        Snapshot((one, other)).parameters()


@pytest.mark.parametrize(
    ("expected", "seen", "words"),
    [
        (
            {"a": torch.tensor([0.0, 1.0])},
            {"a": torch.tensor([0.0, 2.0])},
            "a element 1 is 2.0, expected 1.0; 1 of 1 tensors differ",
        ),
        ({"a": torch.zeros(2)}, {}, "a is missing; 1 of 1 tensors differ"),
        ({}, {"a": torch.zeros(2)}, "a is unexpected; 1 of 1 tensors differ"),
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}, "a element 0 is -0.0, expected 0.0; 1 of 1 tensors differ"),
        (
            {"a": torch.zeros(2)},
            {"a": torch.zeros(3)},
            "a is torch.float32 [3], expected torch.float32 [2]; 1 of 1 tensors differ",
        ),
        ({"a": torch.tensor([1.0, float("nan")])}, {"a": torch.tensor([1.0, float("nan")])}, None),
        (
            {"a": torch.tensor([float("nan"), 0.0])},
            {"a": torch.tensor([float("nan"), -0.0])},
            "a element 1 is -0.0, expected 0.0",
        ),
    ],
)
def test_the_first_difference_is_told_by_name_element_and_value(expected, seen, words):
    told = first_difference(expected, seen)
    assert told is None if words is None else told.startswith(words)


def test_a_kill_that_the_case_asked_for_is_no_failure():
    generation = Generation(ranks=RANKS, steps=(Train(1),), faults=(Kill(rank=1, event=0),))
    history = History.of(Case(generations=(generation,)), [])
    history.generations[0].launch.outcomes[:] = [
        RankOutcome(0, "raised", error="RuntimeError: Connection closed by peer"), RankOutcome(1, "killed", signal="SIGKILL"),
    ]  # fmt: skip
    assert history.failures == []


def test_a_kill_that_never_came_is_a_failure():
    generation = Generation(ranks=RANKS, steps=(Train(1),), faults=(Kill(rank=1, event=99),))
    (failure,) = History.of(Case(generations=(generation,)), []).failures
    assert "rank 1 was to be killed at a file event, and had fewer" in failure


def test_a_rank_that_failed_by_itself_is_a_failure_though_another_was_to_be_killed():
    generation = Generation(ranks=RANKS, steps=(Train(1),), faults=(Kill(rank=1, event=0),))
    assert "no room" in failed(History.of(Case(generations=(generation,)), [])).failures[0]
