"""Optimizer state keeps its declared precision."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import torch

from contracts.case import Precision, Train
from contracts.checkpoint_dir import CheckpointDirectory
from contracts.history import GenerationHistory, History, Snapshot, State
from contracts.implementation import Capability
from contracts.judging import Check, NotApplicable, contract, require_readable
from contracts.saves import names
from contracts.strategies.runs import CHAINED_RUNS, DRIFTED_RUNS, INTERRUPTED_RUNS, TINY_RATE

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
                    check(
                        shard.device == home,
                        f"rank {state.rank}: {key} of {name} is on {shard.device}, its parameter on {home}",
                    )


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
            require_readable(name, checkpoint)
            if not moments:
                _declared_under_other_names(check, name, checkpoint, run[0].snapshot("saving"), history.case.precision)
            for key, tensor in moments.items():
                check(tensor.dtype == declared, f"{name}: {key} is {tensor.dtype} on disk, declared {declared}")


def _declared_under_other_names(
    check: Check, directory: str, checkpoint: CheckpointDirectory, saved: Snapshot, declared: Precision
) -> None:
    """Check that as many tensors of the declared dtype are named after each parameter as it has moments, itself not counted."""
    moments = Counter(name for name, key in saved.ranks[0].moments if key in ADAM_MOMENTS)
    check(moments, f"{directory} was saved when no parameter had an Adam moment")
    for name, count in moments.items():
        its = [t for key, t in checkpoint.tensors.items() if names(key, name) and t.shape]  # a step count has no dimension
        found = sum(tensor.dtype == declared.moments for tensor in its) - (declared.moments == declared.parameters)
        check(
            found >= count,
            f"{directory} holds no Adam moment of {name} in {declared.moments}: {found} tensors, expected {count}",
        )


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def step_counter_exact(history: History, check: Check) -> None:
    """Step counts such as 257 and 10001 come back exactly, in the dtype and on the device of a run that never stopped.

    A count that passes through bfloat16 comes back as 256 or 9984, and the bias correction with it. Counts are read
    where the optimizer keeps them: in its state, as tensors or numbers, or in its groups.

    Seen: speculators#899, pytorch/pytorch#104767.
    """
    for before, generation in _boundaries(history):
        for after in generation.snapshots("resumed"):
            _same_counts(check, before, after, "after the resume")
    uninterrupted = [
        s for s in history.generations[0].snapshots("trained") if s.order > history.generations[0].snapshot("saving").order
    ]
    for generation in history.generations[1:2]:
        for expected, seen in zip(uninterrupted, generation.snapshots("trained"), strict=False):
            _same_counts(check, expected, seen, "after the first resumed step")


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def params_declared(history: History, check: Check) -> None:
    """Parameters hold their declared dtype after the build, after each resume and after each step.

    What the published weights are in, or what a checkpoint holds, is not what was asked for.

    Seen: NVIDIA-NeMo/Nemotron#208 `force_fp32_parameters`.
    """
    moments = {"built": "after the build", "resumed": "after the resume", "trained": "after step {}"}
    for generation in history.generations:
        declared = (generation.case.precision or history.case.precision).parameters
        for state in generation.states:
            if state.label not in moments:
                continue
            when = moments[state.label].format(state.step)
            for name, shard in state.parameters.items():
                if shard.dtype.is_floating_point:
                    seen = _name(shard.dtype)
                    check(seen == declared, f"rank {state.rank}: {name} is {seen} {when}, declared {declared}")


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def small_updates_land(history: History, check: Check) -> None:
    """An update smaller than a bfloat16 step changes the parameter or its master copy.

    Where float32 is declared, or bfloat16 parameters with float32 masters, a small rate must still train. Elements are
    counted that such an update moves in float32, and not in bfloat16. Plain bfloat16 parameters cannot keep this and
    do not promise it.

    Seen: NVIDIA/apex#1728, NVIDIA-NeMo/Automodel#3444.
    """
    declared = history.case.precision
    if declared.parameters != "float32" and declared.masters == "none":
        raise NotApplicable(f"{declared.parameters} parameters without masters are declared")
    for generation in _with_rate(history, TINY_RATE):
        before, after = generation.snapshots("resumed")[-1], generation.snapshot("trained")
        values, moved_to, first = before.parameters(), after.parameters(), after.moments()
        masters, later = _masters(before), _masters(after)
        for name, value in values.items():
            if (name, "exp_avg") not in first:
                continue
            # Half a bfloat16 step is at least 1/512 of the value; a step far in the count moves up to 6 times the rate.
            counted = (first[name, "exp_avg"] != 0) & (value.float().abs() > 512 * 8 * TINY_RATE)
            if not (wanted := int(counted.sum())):
                continue
            moved = value != moved_to[name]
            if name in masters and name in later:
                moved = moved | (masters[name] != later[name])
            landed = int((moved & counted).sum())
            check.evidence += wanted - 1
            copy = "the parameter or its master" if name in later else "the parameter, which has no master"
            check(2 * landed > wanted, f"{name}: a step of rate {TINY_RATE} moved {landed} of {wanted} elements of {copy}")


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def masters_are_a_fixed_point(history: History, check: Check) -> None:
    """Saving and loading again and again without training leaves parameters, moments and master weights bit-identical.

    Twice in one process, and through a chain of processes and checkpoints. Masters that are made anew from their
    bfloat16 parameters lose what they were kept for, and nothing else shows it.

    Seen: OpenTau#185.
    """
    declared = history.case.precision
    for before, generation in _boundaries(history):
        for number, after in enumerate(generation.snapshots("resumed"), 1):
            check.same(before.everything(), after.everything(), f"state at step {before.step} after resume {number}")
        check(generation.failure is None, f"the resumed generation failed: {generation.failure}")
    first = history.generations[0].snapshot("saving")
    if declared.masters != "none":
        masters = _masters(first)
        for name in dict.fromkeys(name for name, key in first.moments() if key == "exp_avg"):
            found = _name(masters[name].dtype) if name in masters else "none"
            check(
                found == declared.masters, f"declared {declared.masters} masters, the optimizer's state of {name} holds {found}"
            )
    for generation in history.generations[2:]:
        # What lies between is a step of rate 0, which moves moments and no weight.
        last = generation.snapshot("resumed")
        check.same(_weights(first), _weights(last), f"weights after {len(history.generations) - 1} saves and loads")


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def no_stale_masters(history: History, check: Check) -> None:
    """After any load a step of rate 0 leaves the weights at their loaded values.

    A master that the load did not reach writes its old value over the loaded parameter in the next step, whatever the
    rate is.

    Seen: NVIDIA-NeMo/RL#2372, NovaSky-AI/SkyRL#2149.
    """
    for generation in _with_rate(history, 0.0):
        loaded, stepped = generation.snapshots("resumed")[-1], generation.snapshot("trained")
        # Adding 0.0 makes -0.0 and 0.0 one, which such a step may turn into each other.
        before, after = ({name: value + 0.0 for name, value in s.parameters().items()} for s in (loaded, stepped))
        check.same(before, after, "after a step of rate 0, beside the loaded values")


@contract(cases=DRIFTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.MASTER_WEIGHTS})
def master_dtype_drift_refused(history: History, check: Check) -> None:
    """Resuming under another master-weight policy raises before optimizer state is touched, and names both dtypes.

    Masters that are dropped, or made up, change what the run is; whoever changed its configuration must learn of it
    while the run is still whole.

    Seen: NVIDIA-NeMo/RL `check_master_weight_dtypes`.
    """
    saved, declared = _drift(history)
    if saved.masters == declared.masters:
        raise NotApplicable("both declare the same masters")
    resumed = history.generations[1]
    wanted = {getattr(policy, part) for part in ("parameters", "moments", "masters") for policy in (saved, declared)
              if getattr(saved, part) != getattr(declared, part)} - {"none"}  # fmt: skip
    for rank in range(resumed.case.ranks):
        for _ in resumed.of("resume-returns", rank=rank):
            check(
                False,
                f"rank {rank}: masters {saved.masters} were saved, {declared.masters} are declared, and the resume returned",
            )
        for event in resumed.of("resume-refused", rank=rank):
            missing = sorted(name for name in wanted if not re.search(_ALIASES[name], event.error))
            check(not missing, f"rank {rank}: the refusal does not name {' and '.join(missing)}: {event.error}")
    for before, after in zip(resumed.snapshots("before-refusal"), resumed.snapshots("refused"), strict=False):
        check.same(before.moments(), after.moments(), "optimizer state after the refusal")


@contract(cases=DRIFTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.BFLOAT16_POLICY})
def no_silent_cast(history: History, check: Check) -> None:
    """A checkpoint whose dtypes are not the declared ones is not converted on its way in; the load raises.

    A case never says to convert, so a resume has two honest ends: it raises, or everything is of the declared dtype
    because that is what was saved. This judges every stack that can be asked for two policies, whether or not it claims
    to refuse: bits that are lost in a load are lost to its users all the same.

    Seen: pytorch/pytorch#187138.
    """
    saved, declared = _drift(history)
    if (saved.parameters, saved.moments) == (declared.parameters, declared.moments):
        raise NotApplicable("both declare the same dtypes")
    resumed = history.generations[1]
    before = history.generations[0].snapshot("saving").everything()
    refused = {event.rank for event in resumed.of("resume-refused")}
    for rank in sorted(refused):
        check(True, f"rank {rank} refused")
    for after in resumed.snapshots("resumed"):
        seen = after.everything()
        cast = [name for name, value in before.items() if name in seen and seen[name].dtype != value.dtype]
        first = (
            f"{cast[0]} was saved as {_name(before[cast[0]].dtype)} and is {_name(seen[cast[0]].dtype)} now"
            if cast
            else "nothing was converted"
        )
        check(
            False,
            f"saved with {_policy(saved)}, declared {_policy(declared)}, and the resume returned without a word: "
            f"{first} ({len(cast)} of {len(before)} tensors)",
        )
    returned = {event.rank for event in resumed.of("resume-returns")}
    if refused and returned:
        check(False, f"ranks {sorted(refused)} refused and ranks {sorted(returned)} did not")


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.BFLOAT16_POLICY})
def declared_policy_kept(history: History, check: Check) -> None:
    """A declared bfloat16-moment policy is not promoted by a resume, and the bytes of optimizer state do not grow.

    A run that fits in memory when it starts and not when it resumes is lost at the first interruption.

    Seen: pytorch/torchtitan#4615.
    """
    if history.case.precision.moments != "bfloat16":
        raise NotApplicable("no bfloat16 moments are declared")
    expected = {state.rank: _state_bytes(state) for state in history.generations[0].snapshot("saving").ranks}
    for generation in history.generations:
        resumed = False
        for state in generation.states:
            resumed |= state.label == "resumed"
            if state.label not in ("resumed", "trained", "saving") or not state.moments:
                continue
            for (name, key), shard in state.moments.items():
                if key in ADAM_MOMENTS:
                    seen = _name(shard.dtype)
                    when = "after a resume" if resumed else "before any resume"
                    check(seen == "bfloat16", f"rank {state.rank}: {key} of {name} is {seen} {when}, declared bfloat16")
            size, wanted = _state_bytes(state), expected[state.rank]
            check(
                size <= wanted,
                f"rank {state.rank}: optimizer state is {size} bytes at step {state.step} ({state.label}), was {wanted}",
            )


@contract(cases=CHAINED_RUNS, needs={Capability.TRAIN})
def reduction_precision(history: History, check: Check) -> None:
    """Gradients are reduced in the declared reduce dtype.

    Observed at the collectives that FSDP2 calls, in every step. One rank alone reduces nothing.

    Seen: pytorch/pytorch#190626.
    """
    declared = history.case.precision.reduce
    reduced = [(g, event) for g in history.generations for event in g.of("reduced")]
    # A vector of metrics may be reduced by all ranks too; with one mesh dimension FSDP2 gives gradients to the scatter only.
    reduced = [(g, event) for g, event in reduced if g.case.mesh or event.collective.startswith("reduce_scatter")]
    if not reduced and all(generation.case.ranks == 1 for generation in history.generations):
        raise NotApplicable("one rank reduces nothing")
    for _, event in reduced:
        check(
            event.dtype == declared,
            f"rank {event.rank}: {event.collective} was given {event.elements} elements of {event.dtype}, declared {declared}",
        )


_ALIASES = {"float32": r"(?i)float32|fp32|\bf32", "bfloat16": r"(?i)bfloat16|bf16", "float16": r"(?i)(?<!b)float16|fp16"}
"""How an error may name a dtype."""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _policy(precision: Precision) -> str:
    masters = "" if precision.masters == "none" else f" and {precision.masters} masters"
    return f"{precision.parameters} parameters, {precision.moments} moments{masters}"


def _drift(history: History) -> tuple[Precision, Precision]:
    """The precision that was saved with, and the one declared at the resume."""
    return history.case.precision, history.generations[1].case.precision or history.case.precision


def _boundaries(history: History) -> Iterator[tuple[Snapshot, GenerationHistory]]:
    """Every generation that resumed, with what its run had saved last."""
    for number, later in enumerate(history.generations):
        saved = [s for g in history.generations[:number] if g.case.root == later.case.root for s in g.snapshots("saving")]
        if saved and (later.snapshots("resumed") or later.failure):
            yield saved[-1], later


def _with_rate(history: History, rate: float) -> Iterator[GenerationHistory]:
    """Generations that took one step of this rate right after a resume."""
    for generation in history.generations:
        if Train(1, rate) in generation.case.steps and generation.snapshots("resumed"):
            yield generation


def _masters(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Master weights by parameter: what the optimizer keeps in the parameter's shape and float32, and is no moment."""
    found = {}
    shapes = {name: shard.shape for name, shard in snapshot.ranks[0].parameters.items()}
    for (name, key), value in snapshot.moments().items():
        if key in ADAM_MOMENTS or key == "step" or not value.is_floating_point():
            continue
        if "master" in key or (value.dtype == torch.float32 and tuple(value.shape) == shapes.get(name)):
            found[name] = value
    return found


def _weights(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Parameters, and their masters under a name of their own."""
    return snapshot.parameters() | {f"master of {name}": value for name, value in _masters(snapshot).items()}


def _state_bytes(state: State) -> int:
    return sum(shard.local.numel() * shard.local.element_size() for shard in state.moments.values())


def _counts(state: State) -> dict[str, tuple[float, str]]:
    """Step counts by where the optimizer keeps them: the value, and its dtype and device."""
    found = {}
    for (name, key), shard in state.moments.items():
        if key == "step":
            found[f"step of {name}"] = shard.local.double().view(-1)[0].item(), f"{_name(shard.dtype)} on {shard.device}"
    for key, value in state.small.get("numbers", {}).items():
        kind, _, name = key.partition("|")
        if kind == "step":
            found[f"step of {name}"] = value, f"a Python {type(value).__name__}"
    for number, group in enumerate(state.small.get("groups", ())):
        if "step" in group:
            found[f"step of group {number}"] = group["step"], "in its group"
    return found


def _same_counts(check: Check, expected: Snapshot, seen: Snapshot, when: str) -> None:
    for before, after in zip(expected.ranks, seen.ranks, strict=True):
        counts = _counts(after)
        for where, (value, kind) in _counts(before).items():
            rank = f"rank {before.rank}: {where}"
            if not check(where in counts, f"{rank} is gone {when}"):
                continue
            check(counts[where][0] == value, f"{rank} is {counts[where][0]!r} {when}, expected {value!r}")
            check(counts[where][1] == kind, f"{rank} is {counts[where][1]} {when}, in a run that never stopped {kind}")
