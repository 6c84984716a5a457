"""A checkpoint belongs to the run, not to its world size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from contracts.catalog.resume import distinct, require_twin, tiled
from contracts.checkpoint_dir import StoredTensor
from contracts.history import GenerationHistory, History, Snapshot
from contracts.implementation import Capability
from contracts.judging import Check, contract
from contracts.strategies.worlds import KEPT_WHOLE, MESH_CHANGES, RESHARDED_RUNS

ACROSS_WORLDS = 1e-3
"""How far a loss may be from the uninterrupted one, as a part of it, in the steps after the world has changed.

Another world adds the same numbers in another order. That alone moves a float32 loss by some 1e-7 of itself, and Adam turns
a gradient that is nothing but rounding into a whole step. A moment, rate or sample that is not the right one moves the loss
by more than a hundredth in three steps. State at the boundary is compared bit for bit and needs no tolerance.
"""

NEEDS = {Capability.TRAIN, Capability.RESUME, Capability.RESHARD}


@contract(cases=RESHARDED_RUNS, needs=NEEDS)
def values_across_worlds(history: History, check: Check) -> None:
    """Parameters and moments are identical when one world saves and another loads, and training goes on from there.

    In both directions, with first dimensions that leave uneven, one-row and empty shards. The losses that follow are the
    uninterrupted ones but for the order of sums.

    Seen: torchtitan#1136, pytorch/pytorch#108869, pytorch/pytorch#163480.
    """
    for saved, resumed in history.resumes():
        _same_across(history, check, saved, resumed)


@contract(cases=RESHARDED_RUNS, needs=NEEDS)
def shards_tile_exactly_once(history: History, check: Check) -> None:
    """The saved shards of every tensor cover it once: no gap, no overlap, nothing outside.

    Read from the bytes on disk. A rank that writes its padding, or a row that two ranks write, is right until another world
    reads it.

    Seen: pytorch/pytorch#163480, torchtitan#1136.
    """
    for number, generation in enumerate(history.generations):
        for name, checkpoint in generation.disk.items():
            for problem in checkpoint.problems:
                check(False, f"{name}, saved by {generation.case.ranks} ranks: {problem}")
            for key, tensor in checkpoint.tensors.items():
                trouble = _untiled(tensor)
                check(not trouble, f"{name} in generation {number}, {generation.case.ranks} ranks: {key} {trouble}")


def _untiled(tensor: StoredTensor) -> str:
    """Why the chunks of a stored tensor do not cover it exactly once, or nothing."""
    pieces = [(offsets, sizes) for offsets, sizes, _ in tensor.chunks if math.prod(sizes)]
    for offsets, sizes in pieces:
        if any(o < 0 or o + n > whole for o, n, whole in zip(offsets, sizes, tensor.shape, strict=True)):
            return f"has a piece of {list(sizes)} at {list(offsets)}, outside of {list(tensor.shape)}"
    for number, (here, sizes) in enumerate(pieces):
        for there, other in pieces[:number]:
            if all(a < b + m and b < a + n for a, n, b, m in zip(here, sizes, there, other, strict=True)):
                return f"is stored twice: pieces of {list(other)} at {list(there)} and of {list(sizes)} at {list(here)} overlap"
    stored, wanted = sum(math.prod(sizes) for _, sizes in pieces), math.prod(tensor.shape)
    # Pieces that lie inside and do not overlap leave a gap exactly where they hold less than the whole.
    return f"has {wanted} elements and its pieces hold {stored}" if stored != wanted else ""


@contract(cases=RESHARDED_RUNS, needs={*NEEDS, Capability.RANDOM_STREAMS})
def new_ranks_new_streams(history: History, check: Check) -> None:
    """After the world has changed no two ranks draw the same, and a rank that did not exist draws what none has drawn.

    A new rank has no state to restore. Given another rank's, or a seed that does not know its rank, both drop the same units.

    Seen: OpenTau#180.
    """
    for saved, resumed in history.resumes():
        draws = {event.rank: event.values for event in resumed.of("drew")}
        if saved.case.ranks == resumed.case.ranks or not draws:
            continue
        distinct(draws, check)
        earlier = {tuple(event.values): event.rank for event in saved.of("drew")}
        for rank in range(saved.case.ranks, resumed.case.ranks):
            owner = earlier.get(tuple(draws.get(rank, ())))
            check(
                owner is None,
                f"rank {rank}, new among {resumed.case.ranks}, draws what rank {owner} of {saved.case.ranks} drew"
                " before the change",
            )


@contract(cases=RESHARDED_RUNS, needs={*NEEDS, Capability.SAMPLES})
def samples_across_worlds(history: History, check: Check) -> None:
    """No sample is lost or repeated when the world changes.

    A position that counts a rank's own batches, or the state of a loader per rank, means something else on another world.

    Seen: torchtitan#811, huggingface/transformers#26549.
    """
    tiled(history, check)


@contract(cases=RESHARDED_RUNS, needs=NEEDS)
def newest_on_every_rank(history: History, check: Check) -> None:
    """Whatever worlds a run has gone through, all ranks resume the newest save.

    A rank that looks for its own file finds the newest of a world that had it, and goes on from an older step than its peers.

    Seen: NVIDIA-NeMo/Automodel#3437.
    """
    newest = -1
    for generation in history.runs["run"]:
        for event in generation.of("resume-returns"):
            check(
                event.step == newest,
                f"rank {event.rank} of {generation.case.ranks} resumed step {event.step}, the newest save is of step {newest}",
            )
        for state in (state for state in generation.states if state.label == "resumed"):
            scheduler = state.small.get("scheduler") or {}
            if "last_epoch" in scheduler:
                check(
                    scheduler["last_epoch"] == newest,
                    f"rank {state.rank} of {generation.case.ranks}: its scheduler resumed step {scheduler['last_epoch']},"
                    " the newest"
                    f" save is of step {newest}",
                )
        if generation.failure is None:
            steps = [int(found["step"]) for name in generation.disk if (found := re.fullmatch(history.layout.published, name))]
            newest = max([newest, *steps])


@contract(cases=MESH_CHANGES, needs={*NEEDS, Capability.HYBRID_SHARDING})
def mesh_change(history: History, check: Check) -> None:
    """A run goes from one-dimensional to hybrid sharding and back with the same values, and replicas hold the same bits.

    Under hybrid sharding a piece is on several ranks: restored on one of them only, the others train on from elsewhere.

    Seen: pytorch/pytorch#163480, torchtitan#1136.
    """
    for generation in history.generations:
        if not generation.case.mesh:
            continue
        replicas, shards = generation.case.mesh
        for label in ("saving", "resumed", "trained"):
            for snapshot in generation.snapshots(label):
                for name, copies in _pieces(snapshot):
                    if snapshot.ranks[0].parameters[name].shape[0] >= shards:
                        check(
                            len(copies) == replicas,
                            f"{name} has {len(copies)} copies of a piece on {generation.case.ranks} ranks of a"
                            f" {replicas} × {shards} mesh",
                        )
                for what in ("parameters", "moments"):
                    _same_replicas(check, snapshot, what)
    for saved, resumed in history.resumes():
        _same_across(history, check, saved, resumed)


@contract(cases=KEPT_WHOLE, needs={*NEEDS, Capability.WHOLE_PARAMETERS})
def whole_parameters(history: History, check: Check) -> None:
    """A parameter that FSDP does not shard is the same on every rank after every step, and resumes with its moments.

    FSDP reduces no gradient but its own. What it was told to ignore trains on each rank's samples alone, and one rank's copy is
    all that a checkpoint holds.

    Seen: verl#7493.
    """
    for generation in history.generations:
        for label in ("saving", "resumed", "trained"):
            for snapshot in generation.snapshots(label):
                whole = [n for n, shard in snapshot.ranks[0].parameters.items() if not shard.shape]
                check(whole, f"no parameter without dimensions is there at step {snapshot.step}")
                for what in ("parameters", "moments"):
                    _same_replicas(check, snapshot, what)
    for saved, resumed in history.resumes():
        _same_across(history, check, saved, resumed)


def _pieces(snapshot: Snapshot) -> Iterator[tuple[str, list[int]]]:
    """For each parameter, the ranks that hold the piece which rank 0 holds."""
    for name, shard in snapshot.ranks[0].parameters.items():
        yield name, [s.rank for s in snapshot.ranks if name in s.parameters and s.parameters[name].offset == shard.offset]


def _same_replicas(check: Check, snapshot: Snapshot, what: str) -> None:
    seen: dict = {}
    for state in snapshot.ranks:
        for name, shard in getattr(state, what).items():
            owner, first = seen.setdefault((name, shard.offset), (state.rank, shard))
            if owner != state.rank:
                check(
                    shard.same_bits(first),
                    f"{' of '.join(reversed(name)) if isinstance(name, tuple) else name} differs between ranks {owner} and"
                    f" {state.rank}, which hold the same piece, when {state.label} at step {state.step}",
                )


def _same_across(history: History, check: Check, saved: GenerationHistory, resumed: GenerationHistory) -> None:
    """Check state at the boundary bit for bit, and the losses that both generations have within ACROSS_WORLDS."""
    if saved.failure is not None:
        return  # What a broken save left cannot be resumed.
    change = f"{_world(saved)} → {_world(resumed)}"
    if not check(resumed.failure is None, f"{change}: the resumed generation failed: {resumed.failure}"):
        return
    before, after = saved.snapshot("saving"), resumed.snapshot("resumed")
    check.same(before.everything(), after.everything(), f"{change}: state at step {before.step}")
    losses = {event.step: event.loss for event in saved.of("trained", rank=0)}
    both = [event for event in resumed.of("trained", rank=0) if event.step in losses]
    if both:
        require_twin(history, saved)
    for event in both:
        wanted = losses[event.step]
        check(
            math.isclose(event.loss, wanted, rel_tol=ACROSS_WORLDS),
            f"{change}: loss of step {event.step} is {event.loss!r}, uninterrupted {wanted!r}",
        )


def _world(generation: GenerationHistory) -> str:
    return " × ".join(map(str, generation.case.mesh)) if generation.case.mesh else str(generation.case.ranks)
