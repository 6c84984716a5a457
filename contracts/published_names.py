"""Lists of tensor names that checkpoints were published with.

A stack that reloads its own checkpoint proves nothing about names: both directions can be wrong together. These lists
come from outside any stack under test, and each says where from in its `source`. They live as JSON beside this module,
one file per list:

    {"source": str, "architecture": str, "config": {...}, "names": [str], "ignored": [str]}

`config` is what the model's own `config.json` says, as far as names depend on it. Repetition is folded the way a shell
would write it, both ends included: "model.layers.{0..27}.self_attn.q_proj.weight" is 28 names.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LISTS = Path(__file__).parent / "data" / "published_names"
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


@dataclass(frozen=True, kw_only=True)
class PublishedNames:
    """The names of one published checkpoint.

    Attributes:
        source: what was published, and how the list was obtained.
        architecture: name of the transformers class the checkpoint is for.
        config: the model's transformers configuration; its `architectures` names that class.
        names: every tensor name, none twice.
        ignored: the names among them that the model does not have on purpose.
    """

    source: str
    architecture: str
    config: Mapping[str, Any]
    names: tuple[str, ...]
    ignored: frozenset[str] = frozenset()


def available() -> tuple[str, ...]:
    """Return what `read` accepts, sorted."""
    return tuple(sorted(path.stem for path in _LISTS.glob("*.json")))


def read(source: str) -> PublishedNames:
    """Read the list called `source`.

    Raises:
        ValueError: there is no such list, or it names a tensor twice, or it ignores a name which it does not hold.
    """
    if source not in available():
        raise ValueError(f"no list of published names is called {source!r}; available: {', '.join(available())}")
    data = json.loads((_LISTS / f"{source}.json").read_text())
    names = tuple(itertools.chain.from_iterable(map(expand, data["names"])))
    ignored = frozenset(itertools.chain.from_iterable(map(expand, data["ignored"])))
    if len(set(names)) < len(names):
        repeated = next(name for name, times in Counter(names).items() if times > 1)
        raise ValueError(f"{source}.json names {repeated!r} more than once")
    if strangers := sorted(ignored.difference(names)):
        raise ValueError(f"{source}.json ignores {strangers[0]!r}, which is not among its names")
    return PublishedNames(
        source=data["source"],
        architecture=data["architecture"],
        config={**data["config"], "architectures": [data["architecture"]]},
        names=names,
        ignored=ignored,
    )


def expand(pattern: str) -> tuple[str, ...]:
    """Return the names that a pattern stands for; several ranges multiply, the first one slowest."""
    head, *rest = _RANGE.split(pattern)
    ranges = [range(int(low), int(high) + 1) for low, high in zip(rest[0::3], rest[1::3], strict=True)]
    if not all(ranges):
        raise ValueError(f"{pattern!r} has a range that ends before it begins")
    texts = rest[2::3]
    return tuple(
        head + "".join(f"{number}{text}" for number, text in zip(numbers, texts, strict=True))
        for numbers in itertools.product(*ranges)
    )


def fold(names: Iterable[str]) -> list[str]:
    """Return patterns, sorted, that `expand` turns back into `names`, in whatever order.

    Only whole parts between dots are folded, and only numbers that follow each other.
    """
    rows = {tuple(name.split(".")) for name in names}
    for place in reversed(range(max(map(len, rows), default=0))):
        numbers: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
        folded = set()
        for row in rows:
            if place < len(row) and re.fullmatch(r"0|[1-9]\d*", row[place]):
                numbers.setdefault((row[:place], row[place + 1 :]), []).append(int(row[place]))
            else:
                folded.add(row)
        for (before, after), seen in numbers.items():
            for low, high in _runs(sorted(seen)):
                folded.add((*before, str(low) if low == high else f"{{{low}..{high}}}", *after))
        rows = folded
    return sorted(map(".".join, rows))


def _runs(numbers: list[int]) -> Iterable[tuple[int, int]]:
    """Yield first and last of each run of numbers that follow each other."""
    for _, run in itertools.groupby(enumerate(numbers), lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield members[0], members[-1]
