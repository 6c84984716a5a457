"""A save, in the background or not, is invisible until it is whole."""

from __future__ import annotations

import re

from contracts.case import Save
from contracts.judging import Check, contract
from contracts.history import Event, History, MissingEvidence
from contracts.implementation import Capability, Layout
from contracts.strategies import SAVED_RUNS


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.PUBLISH})
def finalize_before_rename(history: History, check: Check) -> None:
    """No byte under a checkpoint changes after its final name appears, and its temporary directory never comes back.

    A rename under a writer that still runs publishes a torn checkpoint, or the writer makes the old name anew.

    Seen: NVIDIA-NeMo/RL `finalize_async_save`.
    """
    for generation in history.generations:
        published: set[str] = set()
        retired: dict[str, str] = {}
        renamed_from: dict[int, str] = {}
        for event in generation.of("file", "attempt"):
            if event.kind == "attempt":
                name = event.paths[0].partition("/")[0]
                if event.operation == "open" and name in retired:
                    check(False, f"rank {event.rank} opened {event.paths[0]} for writing after its rename to {retired[name]}")
                continue
            name, _, below = event.path.partition("/")
            if event.operation == "moved-from" and event.directory:
                renamed_from[event.cookie] = event.path
            if _publishes(event, history.layout):
                published.add(name)
                if event.cookie in renamed_from:
                    retired[renamed_from[event.cookie]] = name
            elif name in published and below and event.operation in ("created", "modified", "closed", "moved-to"):
                check(False, f"{event.path} was {event.operation} after {name} had been published")
            elif name in retired and event.operation == "created" and not below:
                check(False, f"{name} came back after it was renamed to {retired[name]}")
        saves = sum(isinstance(step, Save) for step in generation.case.steps)
        if generation.disk and not published:
            raise MissingEvidence(f"{', '.join(generation.disk)} stands there, and no file event says when it was published")
        if saves and generation.failure is None:
            check(published, f"no name that matches {history.layout.published!r} appeared after {saves} save{'s' * (saves > 1)}")
        for name in published:
            check(True, f"{name} kept its bytes")


@contract(cases=SAVED_RUNS, needs={Capability.TRAIN, Capability.PUBLISH})
def published_is_whole(history: History, check: Check) -> None:
    """What is published has its metadata, every shard its metadata names, and optimizer state for every parameter.

    Read from the bytes on disk. A checkpoint without its optimizer state resumes, and trains like a cold start.

    Seen: NVIDIA-NeMo/RL#2828, NVIDIA-NeMo/Automodel#2469.
    """
    for generation in history.generations:
        saved = generation.snapshots("saving")
        if not saved:
            continue
        wanted = {_step(name, history): name for name in generation.disk}
        if generation.failure is None:
            for snapshot in saved[-history.case.checkpoint.keep_latest :]:  # all of them where 0 are kept
                check(snapshot.step in wanted, f"the save of step {snapshot.step} was never published")
        for name, checkpoint in generation.disk.items():
            for problem in checkpoint.problems:
                check(False, f"{name}: {problem}")
            keys = list(checkpoint.tensors)
            check(keys, f"{name} holds no tensors")
            parameters = saved[0].ranks[0].parameters
            moments = saved[0].ranks[0].moments
            # Some writers put a moment's name before its parameter's, so a key with a moment in it is no parameter.
            of_moments = [key for key in keys if any(re.search(rf"\b{moment}\b", key) for _, moment in moments)]
            of_parameters = set(keys) - set(of_moments)
            for parameter in parameters:
                check(any(_names(key, parameter) for key in of_parameters), f"{name} has no parameter {parameter}")
            for parameter, moment in moments:
                check(
                    any(_names(key, parameter) and re.search(rf"\b{moment}\b", key) for key in of_moments),
                    f"{name} has no {moment} of {parameter}",
                )


def _names(key: str, parameter: str) -> bool:
    """Whether a stored key is about a parameter, with whatever a store puts around its name."""
    return re.search(rf"(?:^|[.:/|]){re.escape(parameter)}(?:$|[.:/|])", key) is not None


def _publishes(event: Event, layout: Layout) -> bool:
    """Whether a checkpoint counts as published from this file event on."""
    name, _, below = event.path.partition("/")
    if re.fullmatch(layout.published, name) is None:
        return False
    if layout.incomplete is not None:
        return below == layout.incomplete and event.operation in ("deleted", "moved-from")
    return not below and event.directory and event.operation in ("created", "moved-to")


def _step(name: str, history: History) -> int:
    found = re.fullmatch(history.layout.published, name)
    return int(found["step"]) if found else -1
