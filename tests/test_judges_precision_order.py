"""The judges of precision and order on hand-written histories: kept, broken in which words, unknown without evidence."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_judges import (
    INTERRUPTED,
    NORM,
    RANKS,
    WEIGHT,
    Interrupted,
    assert_broken,
    assert_kept,
    failed,
    judge,
    moments_of,
    on_every_rank,
    sharded,
    states,
    trained,
    whole,
    without_evidence,
)  # fmt: skip

from contracts.case import (
    Case,
    FillGradients,
    Finalize,
    ForgetMoments,
    Generation,
    Precision,
    Resume,
    Save,
    SetStepCount,
    Train,
)  # fmt: skip
from contracts.history import Event, History, State
from contracts.implementation import Capability
from contracts.strategies.drawing import Scope
from contracts.strategies.runs import CHAINED_RUNS, DRIFTED_RUNS, FRESH_LOADS, HALVED, MASTERS, PLAIN, SAVED_AND_NOT, TINY_RATE
from contracts.suite import PROFILES
from reference_impl.masters import MasterAdamW

MASTER = "master"


def weights(seed: int, precision: Precision = PLAIN) -> dict[str, torch.Tensor]:
    return whole(seed, getattr(torch, precision.parameters))


def optimizer_state(seed: int, precision: Precision, count: float) -> dict[tuple[str, str], torch.Tensor]:
    """Moments of the declared dtype, masters whose rounding the parameters are, and a step count."""
    found = moments_of(seed, getattr(torch, precision.moments))
    for name in (WEIGHT, NORM):
        found[name, "step"] = torch.tensor(count)
        if precision.masters != "none":
            found[name, MASTER] = whole(seed)[name]
    return found


def labelled(label: str, step: int, *, seed: int, precision: Precision, count: float) -> list[State]:
    return states(label, step, parameters=weights(seed, precision), moments=optimizer_state(seed, precision, count))


def spoil(its: list[State], name: str, key: str, value: Any) -> None:
    """Replace one tensor on every rank: a parameter where `key` is "", else a moment."""
    for state in its:
        shard = sharded(value, state.rank) if value.dim() else dataclasses.replace(state.moments[name, key], local=value)
        if key:
            state.moments[name, key] = shard
        else:
            state.parameters[name] = shard


def in_order(*groups: list[State]) -> list[State]:
    return [dataclasses.replace(state, order=number) for number, its in enumerate(groups) for state in its]


# --- a chain: train, count far, save, train · resume twice, a step of rate 0, save · resume, a tiny step ---------------


def chain_case(precision: Precision) -> Case:
    steps = (
        (Train(2), SetStepCount(257), Save(), Finalize(), Train(1)),
        (Resume(), Resume(), Train(1, 0.0), Save(), Finalize()),
        (Resume(), Train(1, TINY_RATE), Save(), Finalize()),
    )
    return Case(
        generations=tuple(Generation(ranks=RANKS, steps=its, seed=i) for i, its in enumerate(steps)), precision=precision
    )


class Chain:
    """A chain of resumes that keeps every contract; a test spoils one piece of it."""

    def __init__(self, precision: Precision = MASTERS) -> None:
        self.precision = precision

        def at(label: str, step: int, seed: int, count: float) -> list[State]:
            return labelled(label, step, seed=seed, precision=precision, count=count)

        self.saving, self.went_on = at("saving", 2, 2, 257.0), at("trained", 3, 3, 258.0)
        self.resumed, self.resumed_again = at("resumed", 2, 2, 257.0), at("resumed", 2, 2, 257.0)
        self.still, self.saving_again = at("trained", 3, 2, 258.0), at("saving", 3, 2, 258.0)
        self.last, self.tiny = at("resumed", 3, 2, 258.0), at("trained", 4, 2, 259.0)
        if precision.masters != "none":
            for name in (WEIGHT, NORM):
                spoil(self.tiny, name, MASTER, whole(2)[name] + TINY_RATE)
        elif precision.parameters == "float32":
            for name in (WEIGHT, NORM):
                spoil(self.tiny, name, "", whole(2)[name] + TINY_RATE)
        self.reduced = [on_every_rank("reduced", collective="reduce_scatter_single", dtype="float32", elements=40)] * 3

    def history(self) -> History:
        return History.of(
            chain_case(self.precision), *self.reduced,
            states=[
                in_order(self.saving, self.went_on),
                in_order(self.resumed, self.resumed_again, self.still, self.saving_again),
                in_order(self.last, self.tiny),
            ],
        )  # fmt: skip


CHAINED = (
    "precision.step-counter-exact",
    "precision.params-declared",
    "precision.small-updates-land",
    "precision.masters-are-a-fixed-point",
    "precision.no-stale-masters",
    "precision.reduction-precision",
)


@pytest.mark.parametrize("precision", [MASTERS, PLAIN], ids=["masters", "plain"])
@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_of_resumes_as_it_should_be_keeps(name, precision):
    assert_kept(judge(name, Chain(precision).history()))


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_without_evidence_is_unknown_to(name):
    assert judge(name, without_evidence(chain_case(MASTERS))).verdict == "unknown"


@pytest.mark.parametrize("name", CHAINED)
def test_a_chain_whose_ranks_failed_is_not_kept_by(name):
    assert judge(name, failed(Chain().history(), 2)).verdict in ("unknown", "broken")


def test_a_count_that_went_through_bfloat16_breaks_step_counter_exact():
    run = Chain()
    spoil(run.resumed, WEIGHT, "step", torch.tensor(257.0).bfloat16().float())
    assert_broken(
        judge("precision.step-counter-exact", run.history()),
        f"rank 0: step of {WEIGHT} is 256.0 after the resume, expected 257.0",
    )


def test_a_count_of_another_dtype_breaks_step_counter_exact():
    run = Chain()
    spoil(run.still, NORM, "step", torch.tensor(258))
    assert_broken(
        judge("precision.step-counter-exact", run.history()),
        f"step of {NORM} is int64 on cpu after the first resumed step, in a run that never stopped float32 on cpu",
    )


def test_a_count_in_a_group_is_read_by_step_counter_exact():
    run = Chain()
    for its, count in ((run.saving, 257), (run.resumed, 2)):
        its[:] = [dataclasses.replace(state, small={"groups": [{"step": count}]}) for state in its]
    assert_broken(judge("precision.step-counter-exact", run.history()), "step of group 0 is 2 after the resume, expected 257")


def test_parameters_of_another_dtype_break_params_declared():
    run = Chain()
    spoil(run.still, WEIGHT, "", whole(2)[WEIGHT])
    assert_broken(
        judge("precision.params-declared", run.history()), f"rank 0: {WEIGHT} is float32 after step 3, declared bfloat16"
    )


def test_a_tiny_update_that_is_lost_breaks_small_updates_land():
    run = Chain()
    spoil(run.tiny, WEIGHT, MASTER, whole(2)[WEIGHT])
    assert_broken(
        judge("precision.small-updates-land", run.history()),
        f"{WEIGHT}: a step of rate {TINY_RATE} moved 0 of 12 elements of the parameter or its master",
    )


def test_a_tiny_update_that_is_lost_without_a_master_breaks_small_updates_land():
    run = Chain(PLAIN)
    spoil(run.tiny, WEIGHT, "", whole(2)[WEIGHT])
    assert_broken(judge("precision.small-updates-land", run.history()), "elements of the parameter, which has no master")


def test_plain_bfloat16_does_not_promise_small_updates_land():
    assert judge("precision.small-updates-land", Chain(HALVED).history()).verdict == "not-applicable"


def test_masters_made_anew_break_masters_are_a_fixed_point():
    run = Chain()
    spoil(run.resumed_again, WEIGHT, MASTER, whole(2)[WEIGHT].bfloat16().float())
    assert_broken(
        judge("precision.masters-are-a-fixed-point", run.history()),
        f"state at step 2 after resume 2: master of {WEIGHT} element 0",
    )


def test_a_chain_that_drifts_at_its_end_breaks_masters_are_a_fixed_point():
    run = Chain()
    for its in (run.saving_again, run.last):
        spoil(its, NORM, MASTER, whole(9)[NORM])
    assert_broken(
        judge("precision.masters-are-a-fixed-point", run.history()), f"weights after 2 saves and loads: master of {NORM}"
    )


def test_masters_that_are_declared_and_not_there_break_masters_are_a_fixed_point():
    run = Chain()
    for its in (run.saving, run.resumed, run.resumed_again, run.saving_again, run.last):
        for state in its:
            del state.moments[NORM, MASTER]
    assert_broken(
        judge("precision.masters-are-a-fixed-point", run.history()),
        f"declared float32 masters, the optimizer's state of {NORM} holds none",
    )


def test_a_step_of_rate_0_that_moves_weights_breaks_no_stale_masters():
    run = Chain()
    spoil(run.still, WEIGHT, "", whole(5, torch.bfloat16)[WEIGHT])
    assert_broken(
        judge("precision.no-stale-masters", run.history()),
        f"after a step of rate 0, beside the loaded values: {WEIGHT} element 0",
    )


def test_a_zero_that_changes_its_sign_keeps_no_stale_masters():
    run = Chain()
    for its, zero in ((run.resumed_again, 0.0), (run.still, -0.0)):
        spoil(its, NORM, "", torch.full((3,), zero, dtype=torch.bfloat16))
    assert_kept(judge("precision.no-stale-masters", run.history()))


def test_a_reduction_in_another_dtype_breaks_reduction_precision():
    run = Chain()
    run.reduced = [
        *run.reduced[:2],
        on_every_rank("reduced", collective="reduce_scatter_single", dtype="bfloat16", elements=40),
    ]
    assert_broken(
        judge("precision.reduction-precision", run.history()),
        "rank 0: reduce_scatter_single was given 40 elements of bfloat16, declared float32",
    )


def test_a_vector_of_metrics_that_is_reduced_keeps_reduction_precision():
    run = Chain()
    run.reduced = [[*its, *on_every_rank("reduced", collective="all_reduce", dtype="int64", elements=2)] for its in run.reduced]
    assert_kept(judge("precision.reduction-precision", run.history()))


def test_one_rank_has_nothing_to_do_with_reduction_precision():
    case = Case(generations=(Generation(ranks=1, steps=(Train(1),)),))
    assert judge("precision.reduction-precision", without_evidence(case)).verdict == "not-applicable"


def test_bfloat16_moments_that_stay_so_keep_declared_policy_kept():
    assert_kept(judge("precision.declared-policy-kept", Chain(HALVED).history()))


def test_float32_moments_are_no_matter_of_declared_policy_kept():
    assert judge("precision.declared-policy-kept", Chain(PLAIN).history()).verdict == "not-applicable"


def test_moments_that_a_resume_promotes_break_declared_policy_kept():
    run = Chain(HALVED)
    spoil(run.last, WEIGHT, "exp_avg", whole(2)[WEIGHT])
    assert_broken(
        judge("precision.declared-policy-kept", run.history()),
        f"rank 0: exp_avg of {WEIGHT} is float32 after a resume, declared bfloat16",
    )


def test_state_that_grows_breaks_declared_policy_kept():
    run = Chain(HALVED)
    for state in run.still:
        state.moments[WEIGHT, "scale"] = sharded(whole(1)[WEIGHT], state.rank)
    assert_broken(
        judge("precision.declared-policy-kept", run.history()), "rank 0: optimizer state is", "bytes at step 3 (trained), was"
    )


# --- a drift: save under one policy, resume under another ---------------------------------------------------------------

NAMED = "saved with bfloat16 parameters and float32 masters, declared bfloat16 without"


def drifted(saved: Precision, declared: Precision, events: list[Event], *, refused=None, resumed=None) -> History:
    case = Case(
        generations=(
            Generation(ranks=RANKS, steps=(Train(1), Save(), Finalize())),
            Generation(ranks=RANKS, steps=(Train(1), Resume(refused=True)), seed=1, precision=declared),
        ),
        precision=saved,
    )
    before = labelled("before-refusal", 1, seed=7, precision=declared, count=1.0)
    after = refused if refused is not None else labelled("refused", 1, seed=7, precision=declared, count=1.0)
    saving = labelled("saving", 1, seed=1, precision=saved, count=1.0)
    return History.of(case, [], events, states=[saving, [*before, *(resumed or after)]])


def refusal(words: str = NAMED) -> list[Event]:
    return on_every_rank("resume-refused", error=words)


DRIFTED = ("precision.master-dtype-drift-refused", "precision.no-silent-cast", "order.drift-check-first")


@pytest.mark.parametrize("name", DRIFTED)
def test_a_drift_that_is_refused_keeps(name):
    assert_kept(judge(name, drifted(MASTERS, HALVED, refusal())))


@pytest.mark.parametrize("name", DRIFTED)
def test_a_drift_of_which_nothing_was_seen_is_unknown_to(name):
    history = drifted(MASTERS, HALVED, [])
    history.generations[1].states.clear()
    assert judge(name, history).verdict == "unknown"


def test_a_refusal_that_names_dtypes_in_short_keeps_master_dtype_drift_refused():
    assert_kept(judge("precision.master-dtype-drift-refused", drifted(PLAIN, MASTERS, refusal("master weights: fp32 vs BF16"))))


def test_a_refusal_that_names_one_dtype_breaks_master_dtype_drift_refused():
    history = drifted(MASTERS, HALVED, refusal("masters were torch.bfloat16"))
    assert_broken(
        judge("precision.master-dtype-drift-refused", history),
        "rank 0: the refusal does not name float32: masters were torch.bfloat16",
    )


def test_another_masters_policy_that_is_resumed_breaks_master_dtype_drift_refused():
    history = drifted(MASTERS, HALVED, on_every_rank("resume-returns", step=1))
    assert_broken(
        judge("precision.master-dtype-drift-refused", history),
        "rank 0: masters float32 were saved, none are declared, and the resume returned",
    )


@pytest.mark.parametrize("name", ["precision.master-dtype-drift-refused", "order.drift-check-first"])
def test_a_refusal_after_the_optimizer_has_changed_breaks(name):
    late = labelled("refused", 1, seed=8, precision=HALVED, count=1.0)
    assert_broken(judge(name, drifted(MASTERS, HALVED, refusal(), refused=late)), f"('{WEIGHT}', 'exp_avg') element 0")


def test_the_same_masters_are_no_matter_of_master_dtype_drift_refused():
    assert judge("precision.master-dtype-drift-refused", drifted(PLAIN, HALVED, refusal())).verdict == "not-applicable"


def test_a_checkpoint_that_is_cast_breaks_no_silent_cast():
    cast = labelled("resumed", 1, seed=1, precision=HALVED, count=1.0)
    history = drifted(PLAIN, HALVED, on_every_rank("resume-returns", step=1), resumed=cast)
    assert_broken(
        judge("precision.no-silent-cast", history),
        "saved with float32 parameters, float32 moments, declared bfloat16 parameters, bfloat16 moments",
        f"returned without a word: {WEIGHT} was saved as float32 and is bfloat16 now (6 of 8 tensors)",
    )


def test_a_refusal_of_some_ranks_breaks_no_silent_cast():
    history = drifted(PLAIN, HALVED, [*refusal()[:1], Event("resume-returns", 1, {"step": 1})])
    assert_broken(judge("precision.no-silent-cast", history), "ranks [0] refused and ranks [1] did not")


def test_a_drift_that_nobody_checks_breaks_drift_check_first():
    history = drifted(MASTERS, HALVED, on_every_rank("resume-returns", step=1))
    assert_broken(
        judge("order.drift-check-first", history),
        "rank 0: the resume under another declared precision returned; nothing was checked",
    )


# --- a run that saves, and twins that do not ----------------------------------------------------------------------------


class SavedAndNot:
    """A run with a save in between and two twins without; a test spoils one piece of it."""

    def __init__(self) -> None:
        self.saving, self.saved = (self.with_more(states(label, 1)) for label in ("saving", "saved"))
        self.trained = [states("trained", step) for step in (1, 2, 3)]
        self.twin = [states("trained", step) for step in (1, 2, 3)]
        self.other = [states("trained", step) for step in (1, 2, 3)]

    @staticmethod
    def with_more(its: list[State]) -> list[State]:
        small = {"groups": [{"lr": 0.1, "betas": [0.9, 0.99]}], "scheduler": {"last_epoch": 1}, "numbers": {}}
        gradients = whole(50)
        return [
            dataclasses.replace(
                state, small=small, gradients={name: sharded(value, state.rank) for name, value in gradients.items()}
            )
            for state in its
        ]

    def history(self) -> History:
        fill, drop = FillGradients(0.5), FillGradients(None)
        run = Generation(ranks=RANKS, steps=(Train(1), fill, Save(), Finalize(), drop, Train(2)))
        twins = [Generation(ranks=RANKS, steps=(Train(1), fill, drop, Train(2)), root=root) for root in ("twin", "other twin")]
        flat = [[state for its in each for state in its] for each in (self.trained, self.twin, self.other)]
        return History.of(
            Case(generations=(run, *twins)), [], [], [], states=[[*self.saving, *self.saved, *flat[0]], *flat[1:]]
        )


PURE = "order.saving-is-a-pure-read"


def test_a_save_that_changes_nothing_keeps_saving_is_a_pure_read():
    assert_kept(judge(PURE, SavedAndNot().history()))


def test_without_evidence_saving_is_a_pure_read_is_unknown():
    assert judge(PURE, without_evidence(SavedAndNot().history().case)).verdict == "unknown"


def test_a_moment_that_a_save_makes_breaks_saving_is_a_pure_read():
    run = SavedAndNot()
    for state in run.saving:
        del state.moments[NORM, "step"]
    assert_broken(judge(PURE, run.history()), f"rank 0, after the save of step 1: step of {NORM} is unexpected")


def test_room_for_moments_that_a_save_makes_keeps_saving_is_a_pure_read():
    run = SavedAndNot()
    for before, after in zip(run.saving, run.saved, strict=True):
        for name, key in [key for key in before.moments if key[0] == NORM]:
            del before.moments[name, key]
            after.moments[name, key] = dataclasses.replace(
                after.moments[name, key], local=torch.zeros_like(after.moments[name, key].local)
            )
    assert_kept(judge(PURE, run.history()))


def test_a_gradient_that_a_save_drops_breaks_saving_is_a_pure_read():
    run = SavedAndNot()
    for state in run.saved:
        del state.gradients[WEIGHT]
    assert_broken(judge(PURE, run.history()), f"gradient of {WEIGHT} is missing")


def test_a_rate_that_a_save_moves_breaks_saving_is_a_pure_read():
    run = SavedAndNot()
    run.saved = [dataclasses.replace(s, small=s.small | {"groups": [{"lr": 0.0, "betas": [0.9, 0.99]}]}) for s in run.saved]
    assert_broken(judge(PURE, run.history()), "rank 0, after the save of step 1: groups 0 lr was 0.1 and is 0.0")


def test_a_next_update_that_differs_breaks_saving_is_a_pure_read():
    run = SavedAndNot()
    run.trained[1] = states("trained", 2, seed=9)
    assert_broken(judge(PURE, run.history()), f"after step 2, beside a run that never saves: {WEIGHT} element 0")


def test_twins_that_differ_leave_saving_is_a_pure_read_unknown():
    run = SavedAndNot()
    run.other[1] = states("trained", 2, seed=9)
    judgement = judge(PURE, run.history())
    assert (judgement.verdict, judgement.message) == ("unknown", "two runs that never save differ at step 2: cannot judge")


# --- small state and random streams after a load ------------------------------------------------------------------------

SMALL = {"groups": [{"lr": 0.1, "size": 2}], "scheduler": {"last_epoch": 2, "_last_lr": [0.1], "_flag": 1}, "random": "abc"}


def with_small(step: int = 2, **changes: Any) -> History:
    run = Interrupted()
    run.saving = [dataclasses.replace(state, small=SMALL) for state in run.saving]
    run.resumed = [dataclasses.replace(state, step=step, small=SMALL | changes) for state in run.resumed]
    return run.history()


@pytest.mark.parametrize("name", ["order.loading-leaves-small-state", "order.loading-leaves-random-streams"])
def test_a_load_that_restores_every_small_state_keeps(name):
    assert_kept(judge(name, with_small(scheduler={"last_epoch": 2, "_last_lr": [0.1], "_flag": 7})))
    assert judge(name, without_evidence(INTERRUPTED)).verdict == "unknown"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 3}, "rank 0: step is 3 after the resume, 2 was saved"),
        ({"groups": [{"lr": 0.3, "size": 2}]}, "rank 0: lr of group 0 is 0.3 after the resume, 0.1 was saved"),
        ({"groups": []}, "rank 0: 0 parameter groups after the resume, 1 were saved"),
        (
            {"scheduler": {"last_epoch": 3, "_last_lr": [0.1]}},
            "rank 0: the scheduler's last_epoch is 3 after the resume, 2 was saved",
        ),
        ({"scheduler": None}, "rank 0: the scheduler's last_epoch is 'absent' after the resume"),
    ],
)
def test_small_state_that_moved_breaks_loading_leaves_small_state(changes, words):
    assert_broken(judge("order.loading-leaves-small-state", with_small(**changes)), words)


def test_a_stream_that_was_drawn_from_breaks_loading_leaves_random_streams():
    assert_broken(
        judge("order.loading-leaves-random-streams", with_small(random="def")),
        "rank 0: the random stream is def after the resume, abc was saved",
    )


# --- loads into an optimizer that has never stepped ---------------------------------------------------------------------


class FreshLoads:
    """Saved; resumed plainly, with gradients pending, and with the moments thrown away; a test spoils one piece."""

    def __init__(self) -> None:
        self.saving = [
            dataclasses.replace(state, gradients={n: sharded(v, state.rank) for n, v in whole(50).items()})
            for state in states("saving", 1)
        ]
        self.went_on = states("trained", 2)
        self.resumed = [states("resumed", 1) for _ in range(3)]
        self.trained = [states("trained", 2), states("trained", 2), states("trained", 2, seed=30)]

    def history(self) -> History:
        fill, drop = FillGradients(0.5), FillGradients(None)
        steps = (
            (Train(1), fill, Save(), Finalize(), drop, Train(1)),
            (Resume(), Train(1)), (fill, Resume(), drop, Train(1)), (Resume(), ForgetMoments(), Train(1)),
        )  # fmt: skip
        case = Case(generations=tuple(Generation(ranks=RANKS, steps=its, seed=i) for i, its in enumerate(steps)))
        later = [[*resumed, *after] for resumed, after in zip(self.resumed, self.trained, strict=True)]
        return History.of(case, *[trained(2)] * 4, states=[[*self.saving, *self.went_on], *later])


FRESH = ("order.pending-gradients-harmless", "order.fresh-optimizer-loads")


@pytest.mark.parametrize("name", FRESH)
def test_a_load_into_a_fresh_optimizer_as_it_should_be_keeps(name):
    assert_kept(judge(name, FreshLoads().history()))


@pytest.mark.parametrize("name", FRESH)
def test_a_fresh_load_without_evidence_is_unknown_to(name):
    assert judge(name, without_evidence(FreshLoads().history().case)).verdict == "unknown"


def test_moments_that_a_pending_gradient_keeps_out_break_pending_gradients_harmless():
    run = FreshLoads()
    run.resumed[1] = states("resumed", 1, moments={})
    assert_broken(
        judge(FRESH[0], run.history()), "resumed with gradients pending, beside a resume without: exp_avg of", "is missing"
    )


def test_a_save_that_takes_pending_gradients_along_breaks_pending_gradients_harmless():
    run = FreshLoads()
    run.resumed[0] = run.resumed[1] = states("resumed", 1, moments=moments_of(4))
    assert_broken(
        judge(FRESH[0], run.history()), f"saved at step 1 with gradients pending, and resumed: exp_avg of {WEIGHT} element 0"
    )


def test_a_step_after_pending_gradients_that_differs_breaks_pending_gradients_harmless():
    run = FreshLoads()
    run.trained[1] = states("trained", 2, seed=8)
    assert_broken(judge(FRESH[0], run.history()), f"step 2 after a resume with gradients pending: {WEIGHT} element 0")


def test_a_resume_that_fails_over_pending_gradients_breaks_pending_gradients_harmless():
    assert_broken(
        judge(FRESH[0], failed(FreshLoads().history(), 2)),
        "the resume with gradients pending failed: rank 1 raised ValueError: no room",
    )


def test_a_plain_resume_that_fails_leaves_pending_gradients_harmless_unknown():
    judgement = judge(FRESH[0], failed(FreshLoads().history(), 1))
    assert judgement.verdict == "unknown"


def test_a_fresh_optimizer_that_stays_empty_breaks_fresh_optimizer_loads():
    run = FreshLoads()
    run.resumed[0], run.trained[0] = states("resumed", 1, moments={}), run.trained[2]
    history = run.history()
    assert_broken(judge(FRESH[1], history), "moments of step 1 after the resume:", "is missing", "(and 2 more)")


def test_a_first_update_like_a_cold_start_breaks_fresh_optimizer_loads():
    run = FreshLoads()
    run.trained[0] = run.trained[2]
    assert_broken(judge(FRESH[1], run.history()), f"{WEIGHT}: the first update after the resume is a cold start's, bit for bit")


def test_moments_that_are_all_zero_leave_fresh_optimizer_loads_unknown():
    run = FreshLoads()
    run.saving = states("saving", 1, moments={key: torch.zeros_like(value) for key, value in moments_of(1).items()})
    assert judge(FRESH[1], run.history()).message == "no moment of the saved run is other than zero"


# --- what is drawn ------------------------------------------------------------------------------------------------------

EVERYTHING = Scope(frozenset(Capability))
BARE = Scope(frozenset({Capability.TRAIN, Capability.RESUME}))


def drawn(kind: Any, scope: Scope, with_seed: int) -> list[Case]:
    return kind.draw(2, scope, PROFILES["ci"].examples * kind.weight, with_seed)


@pytest.mark.parametrize("with_seed", range(5))
def test_every_policy_and_drift_is_tried_within_the_ci_profile(with_seed):
    policies = {case.precision for case in drawn(CHAINED_RUNS, EVERYTHING, with_seed)}
    assert policies >= {MASTERS, HALVED, Precision(compute="bfloat16"), Precision(reduce="bfloat16")}
    pairs = {(case.precision, case.generations[1].precision) for case in drawn(DRIFTED_RUNS, EVERYTHING, with_seed)}
    assert pairs >= {(MASTERS, HALVED), (PLAIN, HALVED), (MASTERS, PLAIN), (HALVED, PLAIN)}
    firsts = {case.generations[0].steps[0] for case in drawn(SAVED_AND_NOT, EVERYTHING, with_seed)}
    assert Save() in firsts
    pending = {
        any(isinstance(s, FillGradients) for s in c.generations[0].steps) for c in drawn(FRESH_LOADS, EVERYTHING, with_seed)
    }
    assert pending == {True, False}


@pytest.mark.parametrize("kind", [CHAINED_RUNS, SAVED_AND_NOT, FRESH_LOADS], ids=lambda kind: kind.name)
def test_no_policy_is_drawn_that_an_implementation_does_not_declare(kind):
    cases = drawn(kind, BARE, 0)
    assert cases
    assert {(case.precision.parameters, case.precision.moments, case.precision.masters) for case in cases} == {
        ("float32", "float32", "none")
    }


def test_a_case_with_these_steps_reads_as_a_script():
    case = chain_case(PLAIN)
    assert str(case).splitlines()[0] == "2 ranks: train 2, count 257 optimizer steps, save, finalize, train 1"
    assert "forget moments" in str(FreshLoads().history().case)
    assert Case.from_json(case.to_json()) == case


# --- the reference's optimizer ------------------------------------------------------------------------------------------


def updates(parameter: torch.nn.Parameter, optimizer: torch.optim.Optimizer, steps: int, start: int = 0) -> None:
    for number in range(start, start + steps):
        draw = torch.Generator().manual_seed(number)
        parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("amsgrad", [False, True])
def test_masters_are_trained_as_adamw_trains_float32_parameters(amsgrad):
    start = whole(1)[WEIGHT].bfloat16()
    small, wide = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    ours, theirs = (
        MasterAdamW([small], lr=0.01, amsgrad=amsgrad),
        torch.optim.AdamW([wide], lr=0.01, foreach=False, amsgrad=amsgrad),
    )
    for number in range(4):
        updates(small, ours, 1, number)
        wide.grad = small.grad.float()
        theirs.step()
    assert torch.equal(ours.state[small][MASTER], wide)
    assert torch.equal(small, wide.bfloat16())


def test_masters_and_moments_go_through_a_state_dict_bit_for_bit():
    first = torch.nn.Parameter(whole(1)[WEIGHT].bfloat16())
    optimizer = MasterAdamW([first], lr=0.01)
    updates(first, optimizer, 3)
    second = torch.nn.Parameter(first.detach().clone())
    again = MasterAdamW([second], lr=0.5)
    again.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[first].items():
        assert again.state[second][key].dtype == torch.float32
        assert torch.equal(again.state[second][key], value)
    for parameter, its in ((first, optimizer), (second, again)):
        updates(parameter, its, 2, start=3)
    assert torch.equal(first, second)
