"""Names map once, both ways, and nothing falls through."""

from __future__ import annotations

import re
from collections.abc import Iterator

from contracts.history import Event, History
from contracts.implementation import Capability
from contracts.judging import Check, NotApplicable, contract
from contracts.strategies.runs import MAPPINGS


@contract(cases=MAPPINGS, needs={Capability.KEY_MAPPING})
def mapping_is_idempotent(history: History, check: Check) -> None:
    """Mapping a name that is mapped already leaves it as it is.

    Names pass through a mapping twice whenever a saved checkpoint is loaded again, or a hook and a loader both map.

    Seen: huggingface/transformers#46650, modelscope/ms-swift#9877.
    """
    for event in _mapped(history):
        for once, twice in event.twice.items():
            check(twice == once, f"{event.source}: {once} maps to {twice} the second time")


@contract(cases=MAPPINGS, needs={Capability.KEY_MAPPING})
def nothing_falls_through(history: History, check: Check) -> None:
    """Every published name reaches a parameter or is declared ignored, and every parameter is filled.

    A stack's own reload proves nothing, for it saves what it can load. The names are an outside list.

    Seen: huggingface/transformers#44627, huggingface/transformers#45358, NVIDIA-NeMo/Automodel#2682.
    """
    for event in _mapped(history):
        targets = set(event.targets)
        ignored = [re.compile(pattern) for pattern in event.ignored]
        lost = [
            name
            for name, mapped in event.once.items()
            if mapped is not None and mapped not in targets and not any(p.search(name) for p in ignored)
        ]
        empty = sorted(targets - set(event.once.values()))
        names, parameters = len(event.once), len(targets)
        check.evidence += names + parameters - 2
        check(
            not lost,
            f"{event.source}: {len(lost)} of {names} published names reach no parameter, first "
            + (f"{lost[0]} (mapped to {event.once[lost[0]]})" if lost else ""),
        )
        check(
            not empty,
            f"{event.source}: {len(empty)} of {parameters} parameters are filled by no published name,"
            f" first {''.join(empty[:1])}",
        )


def _mapped(history: History) -> Iterator[Event]:
    for generation in history.generations:
        for event in generation.of("mapping-unsupported"):
            raise NotApplicable(f"the implementation does not map {event.source}")
        yield from generation.of("mapped")
