"""Optimizer state keeps its declared precision."""

from __future__ import annotations

from contracts.judging import Check, contract
from contracts.history import History
from contracts.implementation import Capability
from contracts.strategies import INTERRUPTED_RUNS

ADAM_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN})
def moments_start_declared(history: History, check: Check) -> None:
    """After the first step each Adam moment and step count has its declared dtype, on its parameter's device.

    Moments are made in the dtype of the parameters they belong to. A model that is still in its checkpoint's bfloat16
    when the optimizer steps has bfloat16 moments, whatever becomes of the parameters.

    Seen: NVIDIA-NeMo/Nemotron#208.
    """
    declared = history.case.precision.moments
    for generation in history.generations:
        if (first := next(iter(generation.snapshots("trained")), None)) is None:
            continue
        for state in first.ranks:
            for (name, key), shard in state.moments.items():
                wanted = declared if key in ADAM_MOMENTS else "float32"
                seen = str(shard.dtype).removeprefix("torch.")
                check(seen == wanted, f"rank {state.rank}: {key} of {name} is {seen} after the first step, declared {wanted}")
                if key in ADAM_MOMENTS and name in state.parameters:
                    home = state.parameters[name].device
                    check(shard.device == home, f"rank {state.rank}: {key} of {name} is on {shard.device}, its parameter on {home}")


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def moments_survive_resume(history: History, check: Check) -> None:
    """After a resume in fresh processes each moment has its declared dtype and the exact bits that were saved.

    Casting back afterwards restores the label and not the bits: what bfloat16 could not hold is gone.

    Seen: NVIDIA-NeMo/Nemotron#208, pytorch/pytorch#43706, NVIDIA/Megatron-LM#1359, KempnerForge#115.
    """
    for saved, resumed in history.resumes():
        before, after = saved.snapshot("saving"), resumed.snapshot("resumed")
        check.same(before.moments(), after.moments(), f"moments at step {before.step} after the resume")


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN})
def moments_declared_on_disk(history: History, check: Check) -> None:
    """The checkpoint's own metadata records the declared dtype for every moment, in the first save and after a resume.

    Read from the bytes on disk, not through the stack that wrote them.

    Seen: NVIDIA-NeMo/Nemotron#208.
    """
    declared = history.case.precision.moments
    for run in history.runs.values():
        for name, checkpoint in run[-1].disk.items():
            moments = {key: tensor for key, tensor in checkpoint.tensors.items() if any(m in key for m in ADAM_MOMENTS)}
            check(moments, f"{name} holds no Adam moment")
            for key, tensor in moments.items():
                check(tensor.dtype == declared, f"{name}: {key} is {tensor.dtype} on disk, declared {declared}")
