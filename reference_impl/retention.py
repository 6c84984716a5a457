"""Which checkpoints stay: the newest, and the best by a metric that stands in each of them.

One order serves the link ``best`` and pruning alike, so that no prune removes what the link names: by metric, and of two
equal ones the newer is the better. A checkpoint without a number for the metric (none was known, or it was NaN) is never best.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

ABOUT = "save.json"
"""What rank 0 writes into each checkpoint: ``step``, ``final`` and ``metrics``, a number by its name."""

Found = tuple[int, Path]
"""A whole checkpoint: its step and its directory."""


@dataclass(frozen=True)
class Retention:
    """Keep the ``latest`` newest checkpoints, at least 1, and besides the ``best`` of lowest (or highest) ``metric``."""

    latest: int = 2
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    def kept(self, whole: list[Found]) -> list[Found]:
        """The checkpoints to keep out of ``whole``, which are oldest first."""
        return [*whole[-self.latest :], *self.ranked(whole)[: self.best]]

    def ranked(self, whole: list[Found]) -> list[Found]:
        """Those that have the metric, the best first."""
        sign = 1 if self.mode == "min" else -1
        measured = [
            (sign * value, -step, path) for step, path in whole if (value := read_metric(path, self.metric)) is not None
        ]
        return [(-negative, path) for _, negative, path in sorted(measured)]


def read_metric(directory: Path, metric: str) -> float | None:
    """The metric as it was when the checkpoint was saved; None where there is no such number."""
    try:
        value = float(json.loads((directory / ABOUT).read_text())["metrics"][metric])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if math.isnan(value) else value
