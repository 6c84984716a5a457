"""Names map once, both ways, and nothing falls through."""

from __future__ import annotations

import re

from contracts.contract import Check, contract
from contracts.history import History
from contracts.implementation import Capability
from contracts.strategies import MAPPINGS


@contract(cases=MAPPINGS, needs={Capability.KEY_MAPPING})
def mapping_is_idempotent(history: History, check: Check) -> None:
    """Mapping a name that is mapped already leaves it as it is.

    Names pass through a mapping twice whenever a saved checkpoint is loaded again, or a hook and a loader both map.

    Seen: huggingface/transformers#46650, modelscope/ms-swift#9877.
    """
    for generation in history.generations:
        for event in generation.of("mapped"):
            for once, twice in event.twice.items():
                check(twice == once, f"{event.source}: {once} maps to {twice} the second time")


@contract(cases=MAPPINGS, needs={Capability.KEY_MAPPING})
def nothing_falls_through(history: History, check: Check) -> None:
    """Every published name reaches a parameter or is declared ignored, and every parameter is filled.

    A stack's own reload proves nothing, for it saves what it can load. The names are an outside list.

    Seen: huggingface/transformers#44627, huggingface/transformers#45358, NVIDIA-NeMo/Automodel#2682.
    """
    for generation in history.generations:
        for event in generation.of("mapped"):
            targets = set(event.targets)
            ignored = [re.compile(pattern) for pattern in event.ignored]
            lost = [
                name
                for name, mapped in event.once.items()
                if mapped is not None and mapped not in targets and not any(p.search(name) for p in ignored)
            ]
            check.evidence += len(event.once) + len(targets)
            if lost:
                check(False, f"{event.source}: {len(lost)} of {len(event.once)} published names reach no parameter, first {lost[0]} → {event.once[lost[0]]}")
            if empty := sorted(targets - set(event.once.values())):
                check(False, f"{event.source}: {len(empty)} of {len(targets)} parameters are filled by no published name, first {empty[0]}")
