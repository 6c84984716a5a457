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
        for path in sorted({event.path for event in _companions(generation, history, "created", "modified", "closed")}):
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
        begins, returns = generation.of("save-begins"), generation.of("save-returns")
        ranks = generation.case.ranks
        saves = list(zip(_chunks(begins, ranks), _chunks(returns, ranks), strict=False))
        for number, (begun, returned) in enumerate(saves):
            first = returned[0]
            start = begun[0].order
            end = saves[number + 1][0][0].order if number + 1 < len(saves) else float("inf")
            written = [e for e in _companions(generation, history, "created", "modified", "closed") if start < e.order < end]
            for name in history.layout.companions:
                its = [event for event in written if os.path.basename(event.path) == name]
                if not check(its, f"no {name} was written by the save of step {first.step}"):
                    continue
                late = [event for event in its if event.order > first.order]
                check(not late, f"save of step {first.step} returned on rank {first.rank} before {its[-1].path} was complete")


def _companions(generation: GenerationHistory, history: History, *operations: str) -> Iterator[Event]:
    return (e for e in generation.files(*operations) if os.path.basename(e.path) in history.layout.companions)


def _chunks(events: list[Event], size: int) -> list[list[Event]]:
    return [events[i : i + size] for i in range(0, len(events) - size + 1, size)]
