"""Contracts on what wraps a model's blocks, and on what FSDP does not shard, judge hand-written histories."""

from __future__ import annotations

import pytest
import torch
from test_judges import assert_broken, judge

import contracts.catalog  # noqa: F401  fills the registry
from contracts.case import Case, Finalize, Generation, Model, Resume, Save, Train
from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor
from contracts.history import Event, History, Shard, State
from contracts.implementation import Capability
from contracts.strategies.drawing import Scope
from contracts.strategies.runs import INTERRUPTED_RUNS
from contracts.strategies.worlds import KEPT_WHOLE, WRAPPED_RUNS

BLOCK = "model.layers.0.up.weight"


def states(label: str, step: int, *gains: float, moment: float = 0.5, **small: object) -> list[State]:
    """A state of as many ranks as there are values of a parameter without dimensions."""
    return [
        State(label, rank, step, {"gain": Shard(torch.tensor(gain), (), ())},
              {("gain", "exp_avg"): Shard(torch.tensor(moment), (), ())}, {}, small)
        for rank, gain in enumerate(gains)
    ]  # fmt: skip


# --- wrappers --------------------------------------------------------------------------------------------------------


def stored(*keys: str) -> CheckpointDirectory:
    return CheckpointDirectory({".metadata": 1}, {key: StoredTensor("float32", (2,), ()) for key in keys})


def wrapped(first: CheckpointDirectory, second: CheckpointDirectory | None = None, resumed: float = 1.0) -> History:
    steps = (Train(1), Save(), Finalize())
    case = Case(
        generations=(
            Generation(ranks=1, wrapped=("recompute", "compile"), steps=steps),
            Generation(ranks=1, steps=(Resume(), Train(1), Save(), Finalize())),
            Generation(ranks=1, steps=steps, root="bare"),
        )
    )
    bare = stored(f"model.{BLOCK}", f"optimizer.{BLOCK}.exp_avg")
    return History.of(
        case, [], [], [], states=[states("saving", 1, 1.0), states("resumed", 1, resumed), []],
        disk=[{"step_1": first}, {"step_2": second or bare}, {"step_1": bare}],
    )  # fmt: skip


def test_bare_names_keep_wrappers_leave_no_trace():
    judgement = judge("resume.wrappers-leave-no-trace", wrapped(stored(f"model.{BLOCK}", f"optimizer.{BLOCK}.exp_avg")))
    assert judgement.verdict == "kept" and judgement.evidence > 4


@pytest.mark.parametrize("prefix", ["_orig_mod.", "_checkpoint_wrapped_module.", "_orig_mod._checkpoint_wrapped_module."])
def test_a_prefix_in_a_saved_name_breaks_wrappers_leave_no_trace(prefix):
    name = f"optimizer.model.layers.0.{prefix}up.weight.exp_avg"
    assert_broken(
        judge("resume.wrappers-leave-no-trace", wrapped(stored(f"model.{BLOCK}", name))),
        f"step_1: 1 of 2 names show a wrapper, first {name}",
    )


def test_a_name_that_only_the_wrapped_model_has_breaks_wrappers_leave_no_trace():
    assert_broken(
        judge("resume.wrappers-leave-no-trace", wrapped(stored(f"model.compiled.{BLOCK}", f"optimizer.{BLOCK}.exp_avg"))),
        "step_1: 2 names are not those of a run whose blocks are bare, first model.compiled.model.layers.0",
    )


def test_another_value_under_other_wrappers_breaks_wrappers_leave_no_trace():
    history = wrapped(stored(f"model.{BLOCK}", f"optimizer.{BLOCK}.exp_avg"), resumed=2.0)
    assert_broken(
        judge("resume.wrappers-leave-no-trace", history), "state at step 1, resumed under other wrappers: gain element 0"
    )


# --- parameters that are not sharded -----------------------------------------------------------------------------------


def kept_whole(trained: tuple[float, float] = (1.2, 1.2), resumed: float = 1.0, moment: float = 0.5) -> History:
    steps = (Train(1), Save(), Finalize(), Train(1))
    case = Case(
        generations=(
            Generation(ranks=2, steps=steps),
            Generation(ranks=2, steps=(Resume(),)),
            Generation(ranks=2, steps=(Train(2),), root="twin"),
        ),
        model=Model(architecture="odd", scalar=True),
    )  # fmt: skip
    first = [*states("saving", 1, 1.0, 1.0), *states("trained", 2, *trained)]
    return History.of(case, [], [], [], states=[first, states("resumed", 1, resumed, resumed, moment=moment), []])


def test_equal_copies_keep_whole_parameters():
    judgement = judge("reshard.whole-parameters", kept_whole())
    assert judgement.verdict == "kept" and judgement.evidence > 4


def test_copies_that_differ_break_whole_parameters():
    assert_broken(
        judge("reshard.whole-parameters", kept_whole(trained=(1.2, 1.3))),
        "gain differs between ranks 0 and 1, which hold the same piece, when trained at step 2",
    )


def test_a_moment_that_was_not_restored_breaks_whole_parameters():
    assert_broken(
        judge("reshard.whole-parameters", kept_whole(moment=0.0)), "2 → 2: state at step 1: exp_avg of gain element 0 is 0.0"
    )


# --- gradient scaler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seen", "verdict"), [(4.0, "kept"), (1.0, "broken")])
def test_a_scale_that_begins_again_breaks_loading_leaves_small_state(seen, verdict):
    steps = (Train(1), Save(), Finalize())
    case = Case(generations=(Generation(ranks=1, steps=steps), Generation(ranks=1, steps=(Resume(),))))
    before, after = states("saving", 1, 1.0, scaler={"scale": 4.0}), states("resumed", 1, 1.0, scaler={"scale": seen})
    history = History.of(case, [], [Event("resume-returns", 0, {"step": 1})], states=[before, after])
    judgement = judge("order.loading-leaves-small-state", history)
    assert judgement.verdict == verdict
    if verdict == "broken":
        assert judgement.message == "rank 0: the scaler's scale is 1.0 after the resume, 4.0 was saved"


# --- cases -------------------------------------------------------------------------------------------------------------


def test_what_a_stack_does_not_declare_is_not_asked_of_it():
    plain, able = Scope(frozenset({Capability.TRAIN})), Scope(frozenset(Capability))
    assert not any(case.optimizer.scaler for case in INTERRUPTED_RUNS.draw(2, plain, 4, 0))
    assert any(case.optimizer.scaler for case in INTERRUPTED_RUNS.draw(2, able, 1, 0))
    assert {g.wrapped for case in WRAPPED_RUNS.draw(2, able, 3, 0) for g in case.generations} == {
        (), ("recompute",), ("compile",), ("recompute", "compile"),
    }  # fmt: skip
    assert [case.worlds for case in KEPT_WHOLE.draw(2, able, 2, 0)] == [(1, 2), (2,)]


def test_a_case_with_wrappers_reads_like_a_script_and_comes_back_from_json():
    case = Case(generations=(Generation(ranks=2, wrapped=("recompute", "compile"), steps=(Train(1),)),))
    assert "2 ranks wrapped to recompute and compile: train 1" in str(case)
    assert Case.from_json(case.to_json()) == case
