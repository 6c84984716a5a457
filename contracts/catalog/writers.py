"""Who writes what, and nobody waits for ever."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator

from contracts.case import Blind
from contracts.checkpoint_dir import CheckpointDirectory, StoredTensor
from contracts.history import Event, GenerationHistory, History, MissingEvidence, Shard
from contracts.implementation import Capability
from contracts.judging import Check, NotApplicable, contract
from contracts.saves import failed_write, step_of
from contracts.strategies.runs import SAVED_RUNS
from contracts.strategies.saves import DIFFERENT_VIEWS, FAILED_SAVES


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.COMPANIONS})
def replicated_files_rank_0(history: History, check: Check) -> None:
    """Tokenizer, processor and configuration files have exactly one writer, rank 0.

    Ranks that write the same path tear each other's file, and on a shared file system they do it rarely.

    Seen: NVIDIA-NeMo/RL#3504.
    """
    for generation in history.generations:
        for path in sorted({event.path for event in _companions(generation, history)}):
            ranks = generation.writers.get(path)
            if ranks is None:
                # Seen from outside and by no rank: an unknown native writer. That is no evidence either way.
                continue
            check(
                ranks == {0},
                f"{path} was written by {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))}",
            )


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.COMPANIONS})
def visible_on_return(history: History, check: Check) -> None:
    """When `save` returns on any rank, the replicated files of that checkpoint are complete.

    A rank that goes on may read, copy or upload them. Without a barrier the file of a slow rank 0 is not there yet.

    Seen: NVIDIA-NeMo/RL#3504.
    """
    for generation in history.generations:
        begins, returns = _saves(generation, "save-begins"), _saves(generation, "save-returns")
        for number, returned in enumerate(returns):
            first = min(returned, key=lambda event: event.order)
            start = min(event.order for event in begins[number])
            end = min(event.order for event in begins[number + 1]) if number + 1 < len(begins) else float("inf")
            written = [event for event in _companions(generation, history) if start < event.order < end]
            for name in history.layout.companions:
                its = [event for event in written if os.path.basename(event.path) == name]
                if not check(its, f"no {name} was written by the save of step {first.step}"):
                    continue
                late = [event for event in its if event.order > first.order]
                check(not late, f"save of step {first.step} returned on rank {first.rank} before {its[-1].path} was complete")


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN})
def one_writer_per_path(history: History, check: Check) -> None:
    """Over a whole run each path has one rank that writes it, whatever file it is.

    Two writers of one path leave a mixture of both, or the shorter one's end of the longer.

    Seen: huggingface/peft#907.
    """
    for generation in history.generations:
        for path, ranks in sorted(generation.writers.items()):
            if not path.endswith(".lock"):
                check(len(ranks) == 1, f"{path} was written by ranks {', '.join(map(str, sorted(ranks)))}")


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.PUBLISH})
def collectives_on_every_rank(history: History, check: Check) -> None:
    """Every rank enters the save and comes out of it, and what each rank held is in the checkpoint.

    A save that one rank alone enters waits for ever, or holds that rank's part of the model.

    Seen: microsoft/DeepSpeed#797.
    """
    for generation in history.generations:
        begins = {rank: len(generation.of("save-begins", rank=rank)) for rank in range(generation.case.ranks)}
        returns = {rank: len(generation.of("save-returns", rank=rank)) for rank in range(generation.case.ranks)}
        for rank in filter(begins.get, begins):
            stuck = f"rank {rank} entered save {begins[rank]} and did not come out of it"
            check(returns[rank] == begins[rank], f"{stuck}: {(generation.failure or '').splitlines()[:1]}")
        if generation.failure:
            continue
        saved = {snapshot.step: snapshot for snapshot in generation.snapshots("saving")}
        for name, checkpoint in generation.disk.items():
            snapshot = saved.get(step_of(name, history.layout))
            for state in snapshot.ranks if snapshot else ():
                for parameter, shard in state.parameters.items():
                    its = _stored(checkpoint, parameter)
                    if not its or not shard.local.numel():
                        continue  # stored under a name of its own; that is the business of published-is-whole
                    if placed := next((tensor for tensor in its if tuple(tensor.shape) == tuple(shard.shape)), None):
                        held, whose = shard.local.numel(), f"that rank {state.rank} had"
                        stored = sum(_overlap(shard, offsets, sizes) for offsets, sizes, _ in placed.chunks)
                    else:  # each part a tensor of its own: where it belongs is not told, how much there is can be
                        held, whose = math.prod(shard.shape), "that all ranks had"
                        stored = sum(math.prod(tensor.shape) for tensor in its)
                    check(stored >= held, f"{name} holds {stored} of the {held} elements of {parameter} {whose}")


@contract(cases=FAILED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def failure_reaches_everyone(history: History, check: Check) -> None:
    """When one rank cannot write, `save` or `finalize` raises on every rank, within seconds.

    A peer that is not told waits in its next collective until a time-out of many minutes ends the job.

    Seen: NVIDIA-NeMo/Automodel#1601, NVIDIA-NeMo/Automodel#3686.
    """
    generation = history.generations[0]
    failed = failed_write(generation)
    if failed is None or generation.case.ranks == 1:
        raise NotApplicable("the rank that was to fail opened no such file in its second save, or was alone")
    _, where = failed
    gave_up = min((event.order for event in generation.of("gave-up")), default=float("inf"))
    for rank in range(generation.case.ranks):
        raised = [event for event in generation.of("raised", rank=rank) if event.order < gave_up]
        last = [event.kind for event in generation.events if event.rank == rank and event.kind.endswith(("begins", "returns"))][
            -1:
        ]
        check(raised, f"{where}, and rank {rank} did not raise for seconds; the last it said was {', '.join(last)}")


@contract(cases=DIFFERENT_VIEWS, needs={Capability.TRAIN, Capability.RESUME, Capability.PUBLISH})
def no_local_view_branching(history: History, check: Check) -> None:
    """Ranks that see the file system differently take one branch together, or all raise.

    On a shared file system one rank may not see yet what another has made. Ranks that each look for themselves resume at
    different steps, or wait for each other in different collectives.

    Seen: KempnerForge#49.
    """
    for generation in history.generations:
        blind = [fault for fault in generation.case.faults if isinstance(fault, Blind)]
        if not blind:
            continue
        where = f"rank {blind[0].rank} does not see {blind[0].at}"
        told = (generation.failure or "").partition("\n")[0]
        check(not generation.launch.timed_out, f"{where}, and the ranks wait for each other: {told}")
        gave_up = min((event.order for event in generation.of("gave-up")), default=float("inf"))
        branches = [_branch(generation, rank, gave_up) for rank in range(generation.case.ranks)]
        for rank, branch in enumerate(branches):
            check(branch == branches[0], f"{where}: rank 0 {branches[0]}; rank {rank} {branch}")


def _branch(generation: GenerationHistory, rank: int, gave_up: float) -> str:
    """What a rank did, in words; a failure that it had only once a peer had left it alone is none of its own."""
    words = {"resume-returns": "resumed at step {}", "save-returns": "saved step {}", "raised": "raised in its step number {}"}
    events = [event for event in generation.of(*words, rank=rank) if event.kind != "raised" or event.order < gave_up]
    return ", ".join(words[event.kind].format(event.step) for event in events) or "came back from nothing"


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.PUBLISH})
def one_publisher(history: History, check: Check) -> None:
    """Exactly one rank gives a checkpoint its final name, or takes away the mark that says it is not whole.

    Ranks that race for the rename fail by turns, and on a shared file system one may rename onto what another published.

    Seen: huggingface/transformers#28015, huggingface/transformers#36076.
    """
    for generation in history.generations:
        publishers: dict[str, list[int]] = {}
        for event in generation.of("attempt"):
            path = event.paths[-1] if event.operation == "rename" else event.paths[0]
            name, _, below = path.partition("/")
            if step_of(name, history.layout) < 0:
                continue
            if (event.operation == "rename" and not below) or (
                event.operation == "remove" and below == history.layout.incomplete
            ):
                publishers.setdefault(name, []).append(event.rank)
        if generation.disk and not publishers:
            raise MissingEvidence(
                f"{', '.join(generation.disk)} stands there, and was neither renamed to that name nor had the file that"
                " layout.incomplete names: it had its final name from the start"
            )
        for name, ranks in publishers.items():
            check(len(set(ranks)) == 1, f"{name} was given its name by ranks {', '.join(map(str, sorted(set(ranks))))}")


def _stored(checkpoint: CheckpointDirectory, parameter: str) -> list[StoredTensor]:
    """Tensors whose keys end in a parameter's name, moments left out; none where its key cannot be told."""
    named = re.compile(rf"(?:^|[.:/|]){re.escape(parameter)}$")
    others = r"optim|exp_avg|state|master"
    return [its for key, its in checkpoint.tensors.items() if named.search(key) and not re.search(others, key)]


def _overlap(shard: Shard, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Elements that a stored piece and a rank's shard have in common."""
    common = 1
    for its, length, offset, size in zip(shard.offset, shard.local.shape, offsets, sizes, strict=True):
        common *= max(0, min(its + length, offset + size) - max(its, offset))
    return common


def _companions(generation: GenerationHistory, history: History) -> Iterator[Event]:
    """Writes of replicated files, in place or under another name and then renamed."""
    events = generation.files("created", "modified", "closed", "moved-to")
    return (event for event in events if os.path.basename(event.path) in history.layout.companions)


def _saves(generation: GenerationHistory, kind: str) -> list[tuple[Event, ...]]:
    """The events of the first save on every rank, of the second, and so on; a rank may run ahead of another."""
    return list(zip(*(generation.of(kind, rank=rank) for rank in range(generation.case.ranks)), strict=False))
