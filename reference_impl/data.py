"""Examples split into training and evaluation, and the passages that each query is shown with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from reference_impl.config import Config
from reference_impl.errors import UsageError
from reference_impl.records import Example, fingerprint, read_records
from reference_impl.stdlib_docs import package_of, stdlib_examples


@dataclass(frozen=True)
class Split:
    """Training and evaluation examples; no package (stdlib) or record (files) is on both sides."""

    train: list[Example]
    evaluation: list[Example]

    @cached_property
    def identity(self) -> str:
        """sha256 of the training examples in order: what a resumed run must find again."""
        return fingerprint(self.train)


def load_split(config: Config) -> Split:
    """Read ``config.data`` and hold out evaluation examples, deterministically for ``config.seed``.

    Raises :class:`~reference_impl.records.RecordError` for files, ``UsageError`` when nothing is left to train on.
    """
    if config.data == "stdlib":
        examples = list(stdlib_examples())
        groups = [package_of(example) for example in examples]
    else:
        examples = read_records(config.data)
        groups = [example.query for example in examples]
    if config.eval_data:
        split = Split(examples, read_records(config.eval_data))
    else:
        names = sorted(set(groups))
        random.Random(f"split/{config.seed}").shuffle(names)
        held_out = _smallest_prefix(names, groups, round(len(examples) * config.eval_fraction))
        split = Split(
            [example for example, group in zip(examples, groups, strict=True) if group not in held_out],
            [example for example, group in zip(examples, groups, strict=True) if group in held_out],
        )
    if not split.train:
        raise UsageError(f"data={config.data!r} leaves no training example; lower eval_fraction={config.eval_fraction}")
    return split


def passages_for(examples: Sequence[Example], index: int, *, count: int, hard: int, key: str) -> list[str]:
    """``count`` passages for example ``index``: its positive first, then up to ``hard`` of its own negatives, then others.

    The others are positives of other examples; where those run out (tiny data), its own negatives and then repeats fill
    up, so that every query has ``count``. The choice depends on ``key`` and ``index`` alone, not on rank or history.
    """
    draw = random.Random(f"negatives/{key}/{index}")
    example = examples[index]
    chosen = draw.sample(example.negatives, min(hard, count - 1, len(example.negatives)))
    taken = {example.positive, *chosen}
    # A few dozen tries find distinct passages in any real data set and cannot loop forever in a tiny one.
    for _ in range(20 * count):
        if len(chosen) == count - 1:
            break
        other = examples[draw.randrange(len(examples))].positive
        if other not in taken:
            taken.add(other)
            chosen.append(other)
    spare = [passage for passage in example.negatives if passage not in taken] + chosen
    if len(chosen) < count - 1 and not spare:
        raise UsageError(f"{example.source}: no negative passage for {example.query!r}; give neg_doc or more records")
    chosen += [spare[slot % len(spare)] for slot in range(count - 1 - len(chosen))]
    return [example.positive, *chosen]


def _smallest_prefix(names: list[str], groups: list[str], wanted: int) -> set[str]:
    """The first names that together cover at least ``wanted`` examples."""
    held_out: set[str] = set()
    covered = 0
    for name in names:
        if covered >= wanted:
            break
        held_out.add(name)
        covered += groups.count(name)
    return held_out
