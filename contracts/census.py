"""What a history held that there was to judge: how much of it, and of which shapes.

Evidence counts checks; a census says of what. A suite that has seen no empty shard has not shown that one comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from contracts.history import History, Shard, Snapshot

LABELS = ("built", "saving", "saved", "resumed", "trained", "before-refusal", "refused")


@dataclass
class Census:
    """Counts over one history, or over several.

    Attributes:
        generations: launches of fresh ranks.
        steps: optimizer steps, each counted once however many ranks took it.
        samples: records that the ranks say they consumed.
        tensors: parameters, moments and buffers, each counted whenever it was recorded.
        elements: numbers in these tensors, replicated ones once.
        uneven: sharded tensors of which the ranks held pieces of different sizes.
        empty: pieces that held nothing of a tensor which has elements.
    """

    generations: int = 0
    steps: int = 0
    samples: int = 0
    tensors: int = 0
    elements: int = 0
    uneven: int = 0
    empty: int = 0

    def __add__(self, other: Census) -> Census:
        return Census(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Census)))


def census(history: History) -> Census:
    """Count what a history holds."""
    found = Census()
    for generation in history.generations:
        found.generations += 1
        trained = generation.of("trained")
        found.steps += sum(event.rank == 0 for event in trained)
        found.samples += sum(len(event.data.get("samples", ())) for event in trained)
        for label in LABELS:
            for snapshot in generation.snapshots(label):
                found += _of_snapshot(snapshot)
    return found


def _of_snapshot(snapshot: Snapshot) -> Census:
    found = Census()
    for kind in ("parameters", "moments", "buffers"):
        per_rank = [getattr(state, kind) for state in snapshot.ranks]
        for name in per_rank[0]:
            pieces: list[Shard] = [of_rank[name] for of_rank in per_rank if name in of_rank]
            whole, sizes = math.prod(pieces[0].shape), [piece.local.numel() for piece in pieces]
            found.tensors += 1
            found.elements += whole
            found.uneven += len(set(sizes)) > 1
            found.empty += sum(size == 0 for size in sizes) if whole else 0
    return found
