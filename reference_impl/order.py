"""Which sample comes when: a position belongs to the run, never to a rank.

The run consumes samples 0, 1, 2, … by *position*. Position ``p`` is item ``p % size`` of the permutation of epoch
``p // size``. Ranks take consecutive slices of consecutive positions, so a run that changes its world size goes on with the
next unused position: no sample is lost or repeated, and an epoch's tail is finished by a batch that goes on into the next
epoch.
"""

from __future__ import annotations

import random
from functools import lru_cache

from reference_impl.errors import UsageError


class SampleOrder:
    """Seeded permutations of ``size`` samples, one per epoch, the same on every rank and in every process."""

    def __init__(self, size: int, *, seed: int = 0) -> None:
        if size < 1:
            raise UsageError(f"cannot order {size} samples; is the data empty?")
        self.size, self.seed = size, seed
        self._permutation = lru_cache(maxsize=2)(self._permute)  # A batch touches at most the end of one and the next.

    def _permute(self, epoch: int) -> list[int]:
        items = list(range(self.size))
        random.Random(f"order/{self.seed}/{epoch}").shuffle(items)
        return items

    def epoch(self, position: int) -> int:
        """The epoch that position ``position`` of the run belongs to."""
        return position // self.size

    def sample(self, position: int) -> int:
        """The sample id, 0 to size-1, at position ``position`` of the run."""
        return self._permutation(self.epoch(position))[position % self.size]


def positions_of(rank: int, world: int, *, start: int, batch_size: int, micro_batch: int = 0) -> range:
    """The ``batch_size`` positions that a rank takes in micro-batch ``micro_batch`` of the step that starts at ``start``."""
    first = start + micro_batch * world * batch_size + rank * batch_size
    return range(first, first + batch_size)
