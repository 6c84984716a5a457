"""Old checkpoints go only when newer ones stand."""

from __future__ import annotations

from contracts.history import GenerationHistory, History
from contracts.implementation import Capability
from contracts.judging import Check, NotApplicable, contract
from contracts.saves import kill_point, publishes, ranked, resumed_step, resumes_of, step_of, whole_steps, why
from contracts.strategies.saves import RANKED_RUNS, RETAINED_RUNS

NEEDS = {Capability.TRAIN, Capability.RESUME, Capability.PUBLISH, Capability.RETENTION}


@contract(cases=RETAINED_RUNS, needs=NEEDS)
def one_whole_always(history: History, check: Check) -> None:
    """From the first publication on, a whole checkpoint stands at every instant, and the pointer names a published one.

    A run that removes the old one first has none while the new one is being renamed, and a crash there loses everything.

    Seen: NVIDIA-NeMo/Megatron-Bridge#4678, NVIDIA-NeMo/Megatron-Bridge#5184, KempnerForge#102, volcengine/verl#4873.
    """
    standing: set[str] = set()
    for generation in history.generations:
        for event in generation.files():
            name = event.path.partition("/")[0]
            if publishes(event, history.layout):
                standing.add(name)
                continue
            goes = event.operation == "deleted" or (event.operation == "moved-from" and event.path == name)
            if goes and name in standing:
                standing.discard(name)
                check(standing, f"{event.path} was {event.operation} while {name} was the only whole checkpoint")
        for name in generation.disk:
            check(True, f"{name} stands")
        if history.layout.pointer is not None and generation.disk:
            seen = generation.pointer
            check(seen in generation.disk, f"{history.layout.pointer} names {seen}; published: {', '.join(generation.disk)}")


@contract(cases=RETAINED_RUNS, needs=NEEDS)
def incomplete_never_counts(history: History, check: Check) -> None:
    """What an interrupted save left is neither resumed nor counted among the checkpoints to keep.

    Counted, it pushes out a whole one; with a policy of one, the last.

    Seen: huggingface/transformers#35782, huggingface/transformers#35525.
    """
    first, again = history.generations
    point = kill_point(first)
    if point is None:
        raise NotApplicable("no save was interrupted")
    if again.failure:
        check(False, f"{point}: {why(again)}")
        return
    whole = whole_steps(first, history.layout)
    seen = resumed_step(again)
    check(whole and seen == whole[-1], f"{point}: resumed at step {seen}; whole: {whole}")
    _kept(check, history, again, whole, f"{point}; then step {_saved(again)} was saved: ")


@contract(cases=RETAINED_RUNS, needs=NEEDS)
def foreign_names_untouched(history: History, check: Check) -> None:
    """Names that are not this run's steps are never loaded, never deleted, and no reason to crash.

    People keep `step_100.backup` beside their checkpoints, and tools leave notes there.

    Seen: pytorch/torchtitan#4292, NVIDIA-NeMo/RL#1168.
    """
    if not any(its["how"] == "foreign" for generation in history.generations for its in generation.tampered):
        raise NotApplicable("no foreign name was added")
    for before, after in resumes_of(history):
        for tampered in after.tampered:
            if tampered["how"] != "foreign":
                continue
            names = ", ".join(tampered["paths"])
            if after.failure:
                check(False, f"with {names} beside the checkpoints, the run {why(after)}")
                continue
            wanted, seen = step_of(tampered["checkpoint"], history.layout), resumed_step(after)
            check(
                seen == wanted, f"with {names} beside the checkpoints, the resume came back at step {seen}, expected {wanted}"
            )
            original = {name for name in before.names if name.startswith(f"{tampered['checkpoint']}/")}
            for path in tampered["paths"]:
                here = {name for name in after.names if name in (path, f"{path}/") or name.startswith(f"{path}/")}
                if not check(here, f"{path}, which is not of this run, was removed"):
                    continue
                if len(here) > 1:
                    sizes = {name[len(path) :]: after.names[name] for name in here}
                    expected = {name[len(tampered["checkpoint"]) :]: before.names[name] for name in original}
                    check(sizes == expected, f"files in {path}, which is not of this run, were changed or removed")


@contract(cases=RETAINED_RUNS, needs=NEEDS)
def latest_kept(history: History, check: Check) -> None:
    """The newest checkpoints, as many as the policy says, stand whole at the end, and the pointer names the newest.

    Lookup and retention that order checkpoints differently remove what the next resume looks for.

    Seen: NVIDIA-NeMo/RL#3071.
    """
    whole: list[int] = []
    for generation in history.generations:
        if kill_point(generation) is not None:
            raise NotApplicable("a save was interrupted")
        _kept(check, history, generation, whole, f"after {generation.case}: ")
        whole = whole_steps(generation, history.layout)
        if history.layout.pointer is not None and generation.pointer is not None and whole:
            seen = step_of(generation.pointer, history.layout)
            check(seen == whole[-1], f"{history.layout.pointer} names step {seen}, and the newest is {whole[-1]}")


@contract(cases=RANKED_RUNS, needs={*NEEDS, Capability.BEST})
def latest_and_best_kept(history: History, check: Check) -> None:
    """The newest and the best checkpoints survive every prune, and the pointers name one of each; ties have one order.

    A lookup that orders checkpoints with equal metrics otherwise than retention names what retention has removed.

    Seen: NVIDIA-NeMo/RL#3071.
    """
    policy, layout = history.case.checkpoint, history.layout
    metrics: dict[int, float | None] = {}

    def kept(steps: dict[int, float | None]) -> set[int]:
        return {*sorted(steps)[-policy.keep_latest :], *ranked(steps, policy, layout)[: policy.keep_best]}

    for generation in history.generations:
        saved = {event.step: event.data.get("metric") for event in generation.of("save-begins")}
        standing = dict(metrics)
        for event in generation.files():
            name = event.path.partition("/")[0]
            step = step_of(name, layout)
            if publishes(event, layout):
                standing[step] = saved.get(step)
            elif step in standing and (
                event.operation == "deleted" or (event.operation == "moved-from" and event.path == name)
            ):
                told = f"{name} was removed while checkpoints of {_metrics(standing)} stood"
                check(step not in kept(standing), f"{told}: {_declared(history)}")
                del standing[step]
        if generation.failure:
            if metrics:
                check(False, f"after saves of {_metrics(metrics)} the run {why(generation)}")
            return
        metrics |= saved
        if not any(metric is not None for metric in metrics.values()):
            raise NotApplicable("no save was given a metric")
        whole, expected, best = whole_steps(generation, layout), kept(metrics), ranked(metrics, policy, layout)
        where = f"after saves of {_metrics(metrics)}: "
        check(
            expected <= set(whole), f"{where}steps {whole} stand, expected {sorted(expected)} among them: {_declared(history)}"
        )
        for pointer, seen, wanted in (
            (layout.pointer, generation.pointer, max(metrics)),
            (layout.best, generation.best, best[0]),
        ):
            if pointer is not None:
                check(
                    step_of(seen or "", layout) == wanted,
                    f"{where}{pointer} names {seen}, expected step {wanted}: {_declared(history)}",
                )


def _metrics(metrics: dict[int, float | None]) -> str:
    return ", ".join(f"step {step} at {metric}" for step, metric in sorted(metrics.items()))


def _declared(history: History) -> str:
    policy, ties = history.case.checkpoint, "newer" if history.layout.newer_wins_ties else "older"
    return (
        f"the newest {policy.keep_latest} and the best {policy.keep_best} stay, best is {policy.best_mode} and then the {ties}"
    )


@contract(cases=RETAINED_RUNS, needs=NEEDS)
def steps_order_numerically(history: History, check: Check) -> None:
    """Step 10 is newer than step 9, whatever their names' spelling and their files' times say.

    Copies and restores change times; a string sorts 10 before 9.

    Seen: huggingface/transformers#27138, allenai/open-instruct#542.
    """
    if not any(its["how"] == "older-touched" for generation in history.generations for its in generation.tampered):
        raise NotApplicable("names and times agree")
    for before, after in resumes_of(history):
        whole = whole_steps(before, history.layout)
        if not any(its["how"] == "older-touched" for its in after.tampered) or not whole:
            continue
        if after.failure:
            check(False, f"with checkpoints of steps {whole}, the run {why(after)}")
            continue
        seen = resumed_step(after)
        check(seen == whole[-1], f"with checkpoints of steps {whole}, the resume came back at step {seen}")
        _kept(check, history, after, whole, f"with checkpoints of steps {whole} and then {_saved(after)}: ")


def _saved(generation: GenerationHistory) -> list[int]:
    return sorted({event.step for event in generation.of("save-begins")})


def _kept(check: Check, history: History, generation: GenerationHistory, whole: list[int], where: str) -> None:
    """Check that the newest of what stood and of what was saved stand whole."""
    expected = sorted({*whole, *_saved(generation)})[-history.case.checkpoint.keep_latest :]
    seen = whole_steps(generation, history.layout)
    if not expected:
        return
    check(set(expected) <= set(seen), f"{where}whole checkpoints are of steps {seen}, expected {expected} among them")
