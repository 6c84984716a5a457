"""Reading saves out of a history: what was published when, what is whole, what a resume took."""

from __future__ import annotations

import os
import re

from contracts.case import Checkpoint, Fail, Kill, PowerLoss
from contracts.checkpoint_dir import CheckpointDirectory
from contracts.history import Event, GenerationHistory, History
from contracts.implementation import Layout
from contracts.lab.tamper import LITTER


def publishes(event: Event, layout: Layout) -> bool:
    """Whether a checkpoint counts as published from this file event on."""
    name, _, below = event.path.partition("/")
    if re.fullmatch(layout.published, name) is None:
        return False
    if layout.incomplete is not None:
        return below == layout.incomplete and event.operation in ("deleted", "moved-from")
    return not below and event.directory and event.operation in ("created", "moved-to")


def step_of(name: str, layout: Layout) -> int:
    """The step in a published checkpoint's name; -1 where it is none."""
    found = re.fullmatch(layout.published, name)
    return int(found["step"]) if found else -1


def whole_steps(generation: GenerationHistory, layout: Layout, like: CheckpointDirectory | None = None) -> list[int]:
    """Steps of the checkpoints that stand whole at the end of a generation, in order.

    Whole is what our own reader finds no fault with; and where `like` is given, a whole checkpoint of the same run, what
    has every file that it has, but for litter that got into it.
    """
    wanted = {path for path in like.files if os.path.basename(path) != LITTER} if like else set()
    return sorted(
        step_of(name, layout)
        for name, found in generation.disk.items()
        if found.tensors and not found.problems and wanted <= set(found.files)
    )


def ranked(metrics: dict[int, float | None], policy: Checkpoint, layout: Layout) -> list[int]:
    """Steps of the checkpoints that have a metric, the best first: by metric, ties in the order that the layout declares."""
    sign, newer = (1 if policy.best_mode == "min" else -1), (-1 if layout.newer_wins_ties else 1)
    return [step for _, _, step in sorted((sign * m, newer * step, step) for step, m in metrics.items() if m is not None)]


def newest(generation: GenerationHistory, layout: Layout) -> CheckpointDirectory | None:
    """The published checkpoint of the highest step at the end of a generation."""
    return max(generation.disk.items(), key=lambda item: step_of(item[0], layout), default=("", None))[1]


def resumed_step(generation: GenerationHistory) -> int | None:
    """The step that the generation's first resume came back with on rank 0; None where it did not come back."""
    returned = generation.of("resume-returns", rank=0)
    return returned[0].step if returned else None


def why(generation: GenerationHistory) -> str:
    """One line on how a generation failed: it hangs, or what its first rank to fail said."""
    if generation.launch.timed_out:
        return "hangs: " + (generation.failure or "").splitlines()[0]
    return "refuses to start: " + (generation.failure or "").splitlines()[0]


def returned_step(generation: GenerationHistory) -> int:
    """The step of the newest save that was complete when any rank went on; 0 where there is none."""
    steps = [0]
    for rank in range(generation.case.ranks):
        saved = 0
        for event in generation.of("save-begins", "finalize-returns", rank=rank):
            saved = event.step if event.kind == "save-begins" else saved
            if event.kind == "finalize-returns":
                steps.append(saved)
    return max(steps)


def names(key: str, parameter: str) -> bool:
    """Whether a stored key is about a parameter, with whatever a store puts around its name."""
    return re.search(rf"(?:^|[.:/|]){re.escape(parameter)}(?:$|[.:/|])", key) is not None


def kill_point(generation: GenerationHistory) -> str | None:
    """Where the generation's kill struck, or its power loss, in words; None where none did."""
    for line in generation.fired:
        if line["fault"] in ("Kill", "PowerLoss"):
            (fault,) = (fault for fault in generation.case.faults if isinstance(fault, Kill | PowerLoss))
            before = f"before {line['operation']} {' → '.join(line['paths'])}"
            if line["fault"] == "Kill" and fault.torn:
                return f"rank {line['rank']} killed while it wrote {line['paths'][0]}"
            if line["fault"] == "Kill":
                return f"rank {line['rank']} killed at event {fault.event}, {before}"
            return f"power lost at event {fault.event} of rank {line['rank']}, {before}, and unflushed {fault.lost} with it"
    return None


def resumes_of(history: History) -> list[tuple[GenerationHistory, GenerationHistory]]:
    return list(zip(history.generations, history.generations[1:], strict=False))


def failed_write(generation: GenerationHistory, at: str = "") -> tuple[str, str] | None:
    """The first path, of those in which `at` is found, that a rank or its writer could not write, and that in words."""
    errors = {fault.rank: fault.error for fault in generation.case.faults if isinstance(fault, Fail)}
    for line in generation.fired:
        path = line["paths"][0]
        if line["fault"] == "Fail" and re.search(at, path):
            what = "'s writer was killed before it wrote" if errors[line["rank"]] == "SIGKILL" else " could not write"
            return path, f"rank {line['rank']}{what} {path}"
    return None
