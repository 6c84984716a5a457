"""Whatever dies, the run resumes."""

from __future__ import annotations

import os
import re

from contracts.history import GenerationHistory, History, first_difference
from contracts.implementation import Capability, Layout
from contracts.judging import Check, NotApplicable, contract
from contracts.lab.tamper import LITTER
from contracts.saves import failed_write, kill_point, newest, resumed_step, returned_step, step_of, whole_steps, why
from contracts.strategies.saves import CRASHED_SAVES, DAMAGED_CHECKPOINTS, FAILED_SAVES, POWER_LOSSES

NEEDS = {Capability.TRAIN, Capability.RESUME, Capability.PUBLISH}


@contract(cases=CRASHED_SAVES, needs=NEEDS)
def every_crash_point(history: History, check: Check) -> None:
    """Whichever rank is killed at whichever file event of a save, the resume takes the newest whole checkpoint, exactly.

    Any other outcome is one of: lost work (an older checkpoint was taken), refuses to start, silently differs, hangs. The
    events are those of a save, its publication and the removal of the checkpoint before it.

    Seen: NVIDIA-NeMo/Megatron-Bridge#4678, KempnerForge#102.
    """
    _goes_on(history, check, _point(history.generations[0]))


@contract(cases=POWER_LOSSES, needs=NEEDS)
def power_loss(history: History, check: Check) -> None:
    """At whichever moment of a save the power is lost, and with it what was not flushed, the resume goes on exactly.

    A save that had returned is on the disk: every file, its name, and the name of each directory above it. The disk is one
    that POSIX allows: bytes are safe once their file was flushed with fsync, a name once its directory was. What else is
    left is never taken for a checkpoint, whatever its name: on many file systems a rename gets to the disk before the
    bytes of what was renamed.

    Seen: NVIDIA/NVFlare#5011.
    """
    first, again, *_ = history.generations
    point = _point(first)
    saved = returned_step(first)
    if not check(saved, f"{point}: no save had returned before"):
        return
    whole = _whole_after(first, again, history.layout)
    lost = f"{point}: the save of step {saved} had returned, and is lost: {_losses(first, saved, history.layout)}"
    if not check(whole and whole[-1] >= saved, lost):
        return
    _goes_on(history, check, point)
    if first.lost["unseen"] and not check.failures:
        raise NotApplicable(f"{first.lost['unseen'][0]} was written by what this lab does not see, nor its flushes")


def _goes_on(history: History, check: Check, point: str) -> None:
    first, again, *more = history.generations
    if again.failure:
        check(False, f"{point}: {why(again)}")
        return
    seen = resumed_step(again)
    whole = _whole_after(first, again, history.layout)
    if not check(whole, f"{point}: no whole checkpoint was left; the resume came back at step {seen}"):
        return
    outcome = "lost work" if seen < whole[-1] else "silently differs"
    if not check(
        seen == whole[-1], f"{point}: {outcome}: resumed at step {seen}; the newest whole checkpoint is of step {whole[-1]}"
    ):
        return
    saved = first.snapshot("saving", seen)
    check.same(saved.everything(), again.snapshot("resumed").everything(), f"{point}: silently differs: resumed at step {seen}")
    for trained in first.snapshots("trained"):
        if trained.step == seen + 1:
            expected, found = trained.everything(), again.snapshot("trained", seen + 1).everything()
            check.same(expected, found, f"{point}: silently differs: step {seen + 1} after the resume")
    for third in more:
        if third.failure:
            check(False, f"{point}, resumed, saved and ended: {why(third)}")
            return
        last = resumed_step(third)
        check(
            last == seen + 1, f"{point}, resumed and saved step {seen + 1}: lost work: the next resume came back at step {last}"
        )


@contract(cases=CRASHED_SAVES, needs=NEEDS)
def stale_leftovers(history: History, check: Check) -> None:
    """What an interrupted save left never blocks the next one, and nothing of it gets into a checkpoint.

    A shard of the old save beside those of the new one is a checkpoint of two steps.

    Seen: NVIDIA-NeMo/Automodel#3261.
    """
    first, again, _ = history.generations
    point = _point(first)
    left = [path for its in again.tampered if its["how"] == "litter" for path in its["paths"]]
    if not left:
        raise NotApplicable(f"{point}: nothing was left behind")
    if again.failure:
        check(False, f"{point}, with {', '.join(map(os.path.dirname, left))} left behind: {why(again)}")
        return
    check(again.disk, f"{point}: nothing was published by the run that followed")
    for name, checkpoint in again.disk.items():
        stale = [file for file in checkpoint.files if os.path.basename(file) == LITTER]
        check(not stale, f"{name} holds {', '.join(stale)}, left in {os.path.dirname(left[0])} by a save that was interrupted")


@contract(cases=DAMAGED_CHECKPOINTS, needs=NEEDS)
def torn_file(history: History, check: Check) -> None:
    """A checkpoint with a truncated, empty or missing file is passed over, or refused by an error that names the file.

    It is never loaded: what its other files hold is of a checkpoint that does not exist. The companions are an exception, as
    far as a resume has no need of them: with a torn tokenizer a run goes on exactly, and whoever reads it hears of it then.

    Seen: facebookresearch/metaseq#53, pytorch/torchtitan#4011.
    """
    _damage(history, check, {"truncate": "truncated", "empty": "emptied", "remove": "removed"})


@contract(cases=DAMAGED_CHECKPOINTS, needs={*NEEDS, Capability.INTEGRITY})
def bit_flip(history: History, check: Check) -> None:
    """Where integrity is claimed, a checkpoint in which one bit has changed is passed over, or refused by file name.

    Every size still agrees; only a checksum tells.

    Seen: vllm-project/vllm#53537.
    """
    _damage(history, check, {"flip": "changed by one bit"})


@contract(cases=FAILED_SAVES, needs=NEEDS)
def disk_full(history: History, check: Check) -> None:
    """A save that cannot be written raises, publishes nothing, and leaves the checkpoint before it whole.

    With room again, the run resumes from that one, and saves.

    Seen: ByteDance-Seed/VeOmni#1172.
    """
    first, again = history.generations
    failed = failed_write(first)
    if failed is None:
        raise NotApplicable("the rank that was to fail opened fewer files in its second save, so nothing failed")
    path, where = failed
    raised = first.of("raised")
    check(raised, f"{where}, and no rank raised")
    if first.launch.timed_out:
        waiting = [str(outcome) for outcome in first.launch.outcomes if outcome.waits_for_peers]
        check(False, f"{where}; {', '.join(waiting) or 'the run had no end'}")
    for name, checkpoint in first.disk.items():
        torn = "; ".join(checkpoint.problems[:2]) or "it holds no tensors"
        check(checkpoint.tensors and not checkpoint.problems, f"{where}; {name} is published and torn: {torn}")
    whole = whole_steps(first, history.layout)
    if not check(whole, f"{where}, and no whole checkpoint was left"):
        return
    layout = history.layout
    if _is_unpublished(path, layout):
        check(whole[-1] < _last_saved(first), f"{where}, and step {whole[-1]} was published all the same")
    if again.failure:
        check(False, f"{where}; with room again the run {why(again)}")
        return
    seen = resumed_step(again)
    check(seen == whole[-1], f"{where}; the resume came back at step {seen}, and step {whole[-1]} stood there whole")
    check(seen is not None and seen + 1 in whole_steps(again, layout), f"{where}; with room again, nothing was published")


def _whole_after(first: GenerationHistory, again: GenerationHistory, layout: Layout) -> list[int]:
    """Steps of the checkpoints that an interrupted run left whole, in order: none of their files has lost bytes."""
    cut = {step_of(path.partition("/")[0], layout) for path in first.lost.get("cut", ())}
    return [step for step in whole_steps(first, layout, like=newest(again, layout)) if step not in cut]


def _losses(generation: GenerationHistory, step: int, layout: Layout) -> str:
    """What the power loss took of the checkpoint of `step`, or of everything where nothing of that one is missing."""
    told = {path: f"{path} has {after} of {before} bytes" for path, (before, after) in generation.lost["cut"].items()}
    told |= {path: f"{path} is gone" for path in generation.lost["gone"]}
    its = [text for path, text in told.items() if step_of(path.partition("/")[0], layout) == step] or list(told.values())
    more = f" and {len(its) - 3} more" if len(its) > 3 else ""
    return ", ".join(its[:3]) + more if its else "no bytes were cut and no name was lost"


def _is_unpublished(path: str, layout: Layout) -> bool:
    """Whether a path that is being written lies in a checkpoint which is not published yet."""
    name = path.partition("/")[0]
    return re.fullmatch(layout.temporary, name) is not None or (layout.incomplete is not None and step_of(name, layout) >= 0)


def _last_saved(generation: GenerationHistory) -> int:
    return max(event.step for event in generation.of("save-begins"))


def _point(generation: GenerationHistory) -> str:
    point = kill_point(generation)
    if point is None:
        raise NotApplicable("the save has fewer file events on that rank")
    return point


def _damage(history: History, check: Check, kinds: dict[str, str]) -> None:
    first, again = history.generations
    (damage,) = again.tampered
    if damage["how"] not in kinds:
        raise NotApplicable("another damage")
    if not damage["paths"]:
        check(first.disk, "two saves published nothing")
        return
    (path,) = damage["paths"]
    what = f"{path} was {kinds[damage['how']]}"
    refused = again.of("resume-refused")
    if again.failure:
        check(
            False,
            f"{what}, and the resume {'hangs' if again.launch.timed_out else 'ends otherwise than by an error on every rank'}",
        )
    for event in refused:
        told = f"{event.error}\n{event.data.get('traceback', '')}"
        check(
            os.path.basename(path) in told,
            f"{what}; rank {event.rank} refuses and does not name it: {event.error.splitlines()[0]}",
        )
    needless = "flip" not in kinds and os.path.basename(path) in history.layout.companions
    if needless and _came_back(first, again, damage["checkpoint"], history):
        check(True, f"{what}, and everything came back without it")
        return
    for event in again.of("resume-returns"):
        older = [step for step in whole_steps(first, history.layout) if step < step_of(damage["checkpoint"], history.layout)]
        expected = older[-1] if older else 0
        check(
            event.step == expected,
            f"{what}, and rank {event.rank} resumed at step {event.step}, expected {expected} or an error",
        )


def _came_back(first: GenerationHistory, again: GenerationHistory, checkpoint: str, history: History) -> bool:
    """Whether every rank resumed from that checkpoint with exactly the state that was saved in it."""
    if again.failure or resumed_step(again) != step_of(checkpoint, history.layout):
        return False
    saved, resumed = first.snapshot("saving", resumed_step(again)), again.snapshot("resumed")
    pairs = zip(saved.ranks, resumed.ranks, strict=True)
    small = all(b.scheduler == a.scheduler and b.small.get("groups") == a.small.get("groups") for b, a in pairs)
    return small and first_difference(saved.everything(), resumed.everything()) is None
