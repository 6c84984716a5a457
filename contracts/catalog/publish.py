"""A save, in the background or not, is invisible until it is whole."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from contracts.case import Exit, Finalize, Overwrite, Save
from contracts.history import GenerationHistory, History, MissingEvidence
from contracts.implementation import Capability
from contracts.judging import Check, NotApplicable, contract, require_readable
from contracts.saves import failed_write, names, publishes, resumed_step, step_of, whole_steps, why
from contracts.strategies.runs import SAVED_RUNS
from contracts.strategies.saves import FAILED_SAVES, PRESSED_SAVES, SHARDS


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
            if publishes(event, history.layout):
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
            check(
                published, f"no name that matches {history.layout.published!r} appeared after {saves} save{'s' * (saves > 1)}"
            )
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
        wanted = {step_of(name, history.layout): name for name in generation.disk}
        if generation.failure is None:
            for snapshot in saved[-history.case.checkpoint.keep_latest :]:  # all of them where 0 are kept
                stands = ", ".join(sorted({name.partition("/")[0] for name in generation.names})) or "nothing"
                unseen = f"; the run's directory holds {stands}, and {history.layout.published!r} matches checkpoints"
                check(snapshot.step in wanted, f"the save of step {snapshot.step} was never published{unseen}")
        for name, checkpoint in generation.disk.items():
            for problem in checkpoint.problems:
                check(False, f"{name}: {problem}")
            keys = list(checkpoint.tensors)
            require_readable(name, checkpoint)
            check(keys, f"{name} holds no tensors")
            parameters = saved[0].ranks[0].parameters
            moments = saved[0].ranks[0].moments
            # Some writers put a moment's name before its parameter's, so a key with a moment in it is no parameter.
            of_moments = [key for key in keys if any(re.search(rf"\b{moment}\b", key) for _, moment in moments)]
            of_parameters = set(keys) - set(of_moments)
            for parameter in parameters:
                check(any(names(key, parameter) for key in of_parameters), f"{name} has no parameter {parameter}")
            if not of_moments and _as_many_as_live(keys, moments):  # They have names of the stack's own.
                check(True, f"{name} has as many tensors of each parameter as were live")
                continue
            for parameter, moment in moments:
                check(
                    any(names(key, parameter) and re.search(rf"\b{moment}\b", key) for key in of_moments),
                    f"{name} has no {moment} of {parameter}",
                )


def _as_many_as_live(keys: list[str], moments: Iterable[tuple[str, str]]) -> bool:
    """Whether each parameter's name is that of as many tensors, besides it, as it has moments; a step may be one for all."""
    counts = Counter(parameter for parameter, moment in moments if moment != "step")
    return all(sum(names(key, parameter) for key in keys) > count for parameter, count in counts.items())


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.RESUME, Capability.PUBLISH})
def snapshot_is_isolated(history: History, check: Check) -> None:
    """What lands is what the tensors held when `save` was called, though all of them are overwritten once it returns.

    Training overwrites them within milliseconds; a writer that reads live tensors lands a mixture of steps.

    Seen: pytorch/pytorch#144657.
    """
    first, again = history.generations
    if not any(isinstance(step, Overwrite) for step in first.case.steps):
        raise NotApplicable("nothing was overwritten")
    _same_as_saved(first, again, check, "tensors were overwritten after save had returned; resumed")


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.RESUME, Capability.PUBLISH})
def one_step_per_checkpoint(history: History, check: Check) -> None:
    """Everything in one checkpoint is of one training step: tensors, step, optimizer groups, scheduler.

    What is written late, behind training, is easily of a later step.

    Seen: NVIDIA/nvidia-resiliency-ext#376.
    """
    first, again = history.generations
    if sum(isinstance(step, Save) for step in first.case.steps) < 2:
        raise NotApplicable("no step was taken behind a save")
    saved, resumed = _same_as_saved(first, again, check, "steps were taken behind the save; resumed") or (None, None)
    if saved is None:
        return
    for before, after in zip(saved.ranks, resumed.ranks, strict=True):
        check(
            before.step == after.step, f"rank {after.rank} resumed at step {after.step}; the tensors are of step {before.step}"
        )
        for what, old, new in (
            ("scheduler", before.scheduler, after.scheduler),
            ("groups", before.small.get("groups"), after.small.get("groups")),
        ):
            if old:
                check(old == new, f"rank {after.rank} resumed {what} {new}; with the tensors of step {before.step} went {old}")


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def saves_do_not_overlap(history: History, check: Check) -> None:
    """A second save first completes the one before it, however slow its writer is, and both are published.

    Two writers at once share a process group, a directory for leftovers, or host memory that holds one copy.

    Seen: KempnerForge#104.
    """
    generation = history.generations[0]
    steps = [event.step for event in generation.of("save-begins", rank=0)]
    if len(steps) < 2:
        raise NotApplicable("there was one save")
    if generation.failure:
        check(False, f"saves of steps {steps}, back to back: {generation.failure.splitlines()[0]}")
        return
    unfinished: list[str] = []
    for event in generation.files("created", "moved-from", "moved-to", "deleted"):
        name, _, below = event.path.partition("/")
        begins = not below and event.directory and event.operation == "created"
        layout = history.layout
        if begins and (re.fullmatch(layout.temporary, name) or (layout.incomplete and step_of(name, layout) >= 0)):
            check(not unfinished, f"{name} was begun while {', '.join(unfinished)} was not finished")
            unfinished.append(name)
        elif name in unfinished and (publishes(event, layout) or (not below and event.operation in ("moved-from", "deleted"))):
            unfinished.remove(name)
    whole = whole_steps(generation, history.layout)
    for step in steps:
        check(step in whole, f"saves of steps {steps}, back to back, left whole checkpoints of steps {whole}")


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def finalize_is_idempotent(history: History, check: Check) -> None:
    """`finalize` with nothing in flight does nothing: before the first save, and a second time in a row.

    Loops call it at each exit they have, and a signal handler calls it once more.

    Seen: google/ml-flashpoint#104.
    """
    generation = history.generations[0]
    begins, returns = generation.of("finalize-begins", rank=0), generation.of("finalize-returns", rank=0)
    if generation.failure and len(begins) > len(returns):
        idle = "before the first save" if len(begins) == 1 else f"called {len(begins)} times"
        check(False, f"finalize, {idle}, failed: {generation.failure.splitlines()[0]}")
        return
    idle = [0] + ([2] if sum(isinstance(step, Finalize) for step in generation.case.steps) > 2 else [])
    for number in idle:
        if number >= len(returns):
            continue
        start, end = begins[number].order, returns[number].order
        done = [f"{e.operation} {' '.join(e.paths)}" for e in generation.of("attempt", rank=0) if start < e.order < end]
        check(not done, f"finalize with nothing in flight did this: {', '.join(done)}")


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def exit_after_save(history: History, check: Check) -> None:
    """A process that exits right after its last save, which it called final, has published it, or exits non-zero.

    A scheduler that sees exit code 0 starts the next job, which finds an older checkpoint or none.

    Seen: NVIDIA-NeMo/RL#2828, NVIDIA-NeMo/Automodel#2469.
    """
    generation = history.generations[0]
    if not any(isinstance(step, Exit) for step in generation.case.steps):
        raise NotApplicable("every save was finalized")
    step = generation.of("save-begins", rank=0)[-1].step
    whole = whole_steps(generation, history.layout)
    said = any(outcome.status == "raised" or outcome.exitcode for outcome in generation.launch.outcomes)
    left = ", ".join(sorted({name.partition("/")[0] for name in generation.names})) or "nothing"
    check(step in whole or said, f"every rank ended well after the final save of step {step}, and there is {left}")


@contract(cases=FAILED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def background_failure_surfaces(history: History, check: Check) -> None:
    """An error in a background writer reaches the next `save` or `finalize` on every rank, and nothing is published.

    An error that is only logged is found when the checkpoint is needed.

    Seen: pytorch/pytorch#191391, google/orbax#605.
    """
    generation = history.generations[0]
    failed = failed_write(generation, SHARDS)
    if history.case.checkpoint.mode == "sync" or failed is None:
        raise NotApplicable("no background writer failed")
    where = f"behind training, {failed[1]}"
    for rank in range(generation.case.ranks):
        check(generation.of("raised", rank=rank), f"{where}, and neither save nor finalize raised on rank {rank}")
    last = max(event.step for event in generation.of("save-begins"))
    published = [name for name in generation.disk if step_of(name, history.layout) == last]
    check(not published, f"{where}, and {', '.join(published)} was published")


@contract(cases=PRESSED_SAVES, needs={Capability.TRAIN, Capability.PUBLISH})
def save_returns_early(history: History, check: Check) -> None:
    """With a thread behind it, `save` returns before the shards have landed, and training goes on meanwhile.

    A save that waits for its writer is a synchronous one with more memory. Files may be made before it returns; what counts
    is when the last of them is closed.

    Seen: NVIDIA-NeMo/RL#1471.
    """
    generation = history.generations[0]
    if (
        history.case.checkpoint.mode != "thread"
        or not generation.case.faults
        or any(isinstance(s, Exit) for s in generation.case.steps)
    ):
        raise NotApplicable("no background writer was held")
    (hold,) = generation.case.faults
    opened = [e for e in generation.of("attempt", rank=hold.rank) if e.operation == "open" and re.search(SHARDS, e.paths[0])]
    returns, begins = generation.of("save-returns", rank=hold.rank), generation.of("save-begins", rank=hold.rank)
    if not opened or not returns:
        raise MissingEvidence(f"rank {hold.rank} wrote no shard, or its save never returned")
    end = begins[1].order if len(begins) > 1 else float("inf")
    its = {event.paths[0] for event in opened if event.order < end}
    landed = [event.order for event in generation.files("closed") if event.path in its and event.order < end]
    early = max([opened[0].order, *landed]) > returns[0].order
    if not early and opened[0].data.get("main"):
        raise NotApplicable("the shards were opened in front of training, so nothing held their writer")
    check(
        early, f"save of step {returns[0].step} returned on rank {hold.rank} only after {opened[0].paths[0]} had been written"
    )


def _same_as_saved(first: GenerationHistory, again: GenerationHistory, check: Check, where: str):
    """Check that the resume came back with the last save's tensors; both snapshots, or None where it did not come back."""
    if first.failure:
        return None
    if again.failure:
        check(False, f"{where}: {why(again)}")
        return None
    saved, resumed = first.snapshots("saving")[-1], again.snapshot("resumed")
    seen = resumed_step(again)
    if not check(seen == saved.step, f"{where} at step {seen}, and step {saved.step} was saved"):
        return None
    check.same(saved.everything(), resumed.everything(), f"{where} at step {seen}")
    return saved, resumed
