"""Loading happens in the order that keeps values."""

from __future__ import annotations

from typing import Any

import torch

from contracts.history import History, MissingEvidence, State, first_difference, same_bits, without_room
from contracts.implementation import Capability
from contracts.judging import Check, contract
from contracts.strategies.runs import DRIFTED_RUNS, FRESH_LOADS, INTERRUPTED_RUNS, SAVED_AND_NOT


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def params_final_before_optimizer(history: History, check: Check) -> None:
    """When optimizer state starts to load, every parameter already holds its loaded value and final dtype.

    Moments take the dtype of the parameters they are loaded against. Casting the model afterwards repairs the
    parameters and leaves the moments rounded.

    Seen: NVIDIA-NeMo/Nemotron#208, huggingface/transformers#26159.
    """
    for _, resumed in history.resumes():
        final = resumed.snapshot("resumed")
        for load in resumed.snapshots("optimizer-load-begins"):
            for state, end in zip(load.ranks, final.ranks, strict=True):
                for name, shard in state.parameters.items():
                    last = end.parameters.get(name)
                    if not check(last is not None, f"rank {state.rank} · {name} is gone after the resume"):
                        continue
                    if check(
                        shard.dtype == last.dtype,
                        f"rank {state.rank} · {name} was {shard.dtype} when optimizer state loaded (final: {last.dtype})",
                    ):
                        check(
                            shard.same_bits(last),
                            f"rank {state.rank} · {name} changed value after optimizer state loaded",
                        )


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.SCHEDULER})
def scheduler_after_optimizer(history: History, check: Check) -> None:
    """Scheduler state loads after optimizer state, and the first rate after a resume is the uninterrupted one.

    Loading optimizer state brings back the saved groups, rates included; a scheduler loaded before it is overruled.

    Seen: huggingface/transformers#34053, speculators#1048.
    """
    for saved, resumed in history.resumes():
        for rank in range(resumed.case.ranks):
            optimizer = resumed.of("optimizer-load-ends", rank=rank)
            scheduler = resumed.of("scheduler-load-begins", rank=rank)
            if optimizer and scheduler:
                check(
                    scheduler[-1].order > optimizer[-1].order,
                    f"rank {rank}: scheduler state loaded before optimizer state",
                )
            expected = {event.step: event.lr for event in saved.of("trained", rank=rank)}
            for event in resumed.of("trained", rank=rank)[:1]:
                if event.step in expected:
                    wanted = expected[event.step]
                    check(
                        event.lr == wanted,
                        f"rank {rank}: step {event.step} after the resume used rate {event.lr!r}, uninterrupted {wanted!r}",
                    )


@contract(cases=DRIFTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.DECLARED_DTYPES})
def drift_check_first(history: History, check: Check) -> None:
    """The check of declared dtypes runs before any optimizer tensor changes.

    A run that goes on after a refusal, or saves once more on its way out, must still be the run it was.

    Seen: NVIDIA-NeMo/RL `check_master_weight_dtypes`.
    """
    resumed = history.generations[1]
    for rank in range(resumed.case.ranks):
        for _ in resumed.of("resume-returns", rank=rank):
            check(False, f"rank {rank}: the resume under another declared precision returned; nothing was checked")
    for before, after in zip(resumed.snapshots("before-refusal"), resumed.snapshots("refused"), strict=False):
        check.same(before.moments(), after.moments(), "optimizer state changed before the resume was refused")


@contract(cases=SAVED_AND_NOT, needs={Capability.TRAIN})
def saving_is_a_pure_read(history: History, check: Check) -> None:
    """Parameters, moments, step counts, gradients and the next update are the same with and without a save.

    What a save takes to read state may be a step: a hidden one that makes room for moments which are not there yet
    counts, and the first real update is then corrected as the second. Room alone, zeros of step 0, is what that update
    would have made.

    Seen: pytorch/pytorch#164929, NVIDIA/Megatron-LM#5976, pytorch/torchtitan#4382.
    """
    run = history.generations[0]
    for saving, saved in zip(run.snapshots("saving"), run.snapshots("saved"), strict=False):
        for before, after in zip(saving.ranks, saved.ranks, strict=True):
            where = f"rank {before.rank}, after the save of step {before.step}"
            old, new = _tensors(before), _tensors(after)
            check.same(old, without_room(new, beside=old), where)
            for kind in ("groups", "scheduler", "numbers"):
                old, new = before.small.get(kind), after.small.get(kind)
                check(old == new, f"{where}: {kind} {_where_it_differs(old, new)}")
    for with_save, without, again in zip(*(g.snapshots("trained") for g in history.generations), strict=False):
        # Two runs that never save must agree before a third one can be said to differ.
        if first_difference(without.everything(), again.everything()) is not None:
            raise MissingEvidence(f"two runs that never save differ at step {without.step}: cannot judge")
        check.same(without.everything(), with_save.everything(), f"after step {without.step}, beside a run that never saves")


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def loading_leaves_small_state(history: History, check: Check) -> None:
    """At the end of a load every small state equals what was saved: scheduler, gradient scaler, counters, values of groups.

    A hidden step during the load, or an optimizer's groups that are loaded last, must not move them.

    Seen: huggingface/transformers#34053, speculators#1048.
    """
    for saved, resumed in history.resumes():
        saving, after = saved.snapshot("saving"), resumed.snapshot("resumed")
        for rank in range(min(saved.case.ranks, resumed.case.ranks)):
            before, now = saving.ranks[rank], after.ranks[rank]
            check(now.step == before.step, f"rank {rank}: step is {now.step} after the resume, {before.step} was saved")
            old, new = before.small.get("groups") or (), now.small.get("groups") or ()
            check(len(new) == len(old), f"rank {rank}: {len(new)} parameter groups after the resume, {len(old)} were saved")
            for number, (one, other) in enumerate(zip(old, new, strict=False)):
                for key, value in one.items():
                    seen = other.get(key, "absent")
                    check(
                        seen == value, f"rank {rank}: {key} of group {number} is {seen!r} after the resume, {value!r} was saved"
                    )
            for key, value in (before.small.get("scaler") or {}).items():
                seen = (now.small.get("scaler") or {}).get(key, "absent")
                check(seen == value, f"rank {rank}: the scaler's {key} is {seen!r} after the resume, {value!r} was saved")
            for key, value in before.scheduler.items():
                seen = now.scheduler.get(key, "absent")
                check(seen == value, f"rank {rank}: the scheduler's {key} is {seen!r} after the resume, {value!r} was saved")


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.RANDOM_STREAMS})
def loading_leaves_random_streams(history: History, check: Check) -> None:
    """At the end of a load each rank's random stream stands where it stood at the save.

    A stream that is restored first and drawn from afterwards, by a model that is built or a step that is hidden, is not.

    Seen: NVIDIA-NeMo/Automodel#3437.
    """
    for saved, resumed in history.resumes():
        saving, after = saved.snapshot("saving"), resumed.snapshot("resumed")
        for before, now in zip(saving.ranks, after.ranks, strict=False):
            old, new = before.small.get("random"), now.small.get("random")
            check(new == old, f"rank {before.rank}: the random stream is {new} after the resume, {old} was saved")


@contract(cases=FRESH_LOADS, needs={Capability.TRAIN, Capability.RESUME})
def pending_gradients_harmless(history: History, check: Check) -> None:
    """Save and load give the same result whether or not gradients are pending.

    Some readers of optimizer state take a hidden step to make room for it, and leave it out where they find a gradient.

    Seen: pytorch/pytorch#140898.
    """
    saved, plain, pending, _ = history.generations
    if plain.failure is not None:
        raise MissingEvidence("the resume without pending gradients failed, so nothing can be compared with it")
    saving, expected = saved.snapshot("saving"), plain.snapshot("resumed")
    if saving.ranks[0].gradients:
        check.same(
            saving.everything(), expected.everything(), f"saved at step {saving.step} with gradients pending, and resumed"
        )
    if not check(pending.failure is None, f"the resume with gradients pending failed: {pending.failure}"):
        return
    seen = pending.snapshot("resumed")
    check.same(expected.everything(), seen.everything(), "resumed with gradients pending, beside a resume without")
    after, same = plain.snapshot("trained"), pending.snapshot("trained")
    if first_difference(saved.snapshot("trained", after.step).everything(), after.everything()) is None:
        check.same(after.everything(), same.everything(), f"step {after.step} after a resume with gradients pending")


@contract(cases=FRESH_LOADS, needs={Capability.TRAIN, Capability.RESUME})
def fresh_optimizer_loads(history: History, check: Check) -> None:
    """Loading into an optimizer that has never stepped restores every moment, and the next update is no cold start's.

    The negative control is a resume whose moments are thrown away: a comparison that cannot tell the two apart compares
    empty with empty.

    Seen: KempnerForge#114, speculators#1049.
    """
    saved, plain, _, cold = history.generations
    saving = saved.snapshot("saving")
    moments = {key: value for key, value in saving.moments().items() if bool((value != 0).any())}
    if not any(key == "exp_avg" for _, key in moments):
        raise MissingEvidence("no moment of the saved run is other than zero")
    if not check(plain.failure is None, f"the resume into an optimizer that has never stepped failed: {plain.failure}"):
        return
    check.same(saving.moments(), plain.snapshot("resumed").moments(), f"moments of step {saving.step} after the resume")
    warm, control = plain.snapshot("trained").everything(), cold.snapshot("trained").everything()
    for name, key in moments:
        if key == "exp_avg":
            copies = [name, *(f"{other} of {name}" for of, other in saving.moments() if of == name and "master" in other)]
            moved = any(not same_bits(warm[copy], control[copy]) for copy in copies if copy in warm and copy in control)
            check(moved, f"{name}: the first update after the resume is a cold start's, bit for bit")


def _tensors(state: State) -> dict[str, torch.Tensor]:
    """Everything a rank holds, by what it is."""
    found = {f"parameter {name}": shard.local for name, shard in state.parameters.items()}
    found |= {f"{key} of {name}": shard.local for (name, key), shard in state.moments.items()}
    found |= {f"gradient of {name}": shard.local for name, shard in state.gradients.items()}
    return found | {f"buffer {name}": shard.local for name, shard in state.buffers.items()}


def _where_it_differs(old: Any, new: Any) -> str:
    """Say where two pieces of plain data first differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            if old.get(key) != new.get(key):
                return f"{key} {_where_it_differs(old.get(key), new.get(key))}"
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (one, other) in enumerate(zip(old, new, strict=True)):
            if one != other:
                return f"{number} {_where_it_differs(one, other)}"
    return f"was {old!r} and is {new!r}"
