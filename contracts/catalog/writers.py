"""Who writes what, and nobody waits for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator

from contracts.judging import Check, contract
from contracts.history import Event, GenerationHistory, History
from contracts.implementation import Capability
from contracts.strategies import SAVED_RUNS


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
            check(ranks == {0}, f"{path} was written by {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))}")


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


def _companions(generation: GenerationHistory, history: History) -> Iterator[Event]:
    """Writes of replicated files, in place or under another name and then renamed."""
    events = generation.files("created", "modified", "closed", "moved-to")
    return (event for event in events if os.path.basename(event.path) in history.layout.companions)


def _saves(generation: GenerationHistory, kind: str) -> list[tuple[Event, ...]]:
    """The events of the first save on every rank, of the second, and so on; a rank may run ahead of another."""
    return list(zip(*(generation.of(kind, rank=rank) for rank in range(generation.case.ranks)), strict=False))
