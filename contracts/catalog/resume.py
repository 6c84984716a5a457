"""An interrupted run continues the uninterrupted one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from contracts.history import GenerationHistory, History, MissingEvidence, Snapshot, first_difference, without_room
from contracts.implementation import Capability
from contracts.judging import Check, contract, require_readable
from contracts.saves import names
from contracts.strategies.runs import INTERRUPTED_RUNS
from contracts.strategies.worlds import CONTINUED_RUNS, ODD_RUNS, PARTLY_TRAINED_RUNS, REGROUPED_RUNS, WRAPPED_RUNS


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def trajectory(history: History, check: Check) -> None:
    """State at the boundary is exact, and loss, parameters and moments of the next three steps are the uninterrupted ones.

    The oracle is the continuation of the very run that wrote the checkpoint. A first loss that agrees proves little:
    it is computed before the restored optimizer has acted. Divergence counts only where a twin run from the same seed
    agrees with the first bit for bit; otherwise nothing can be said.

    Seen: flashoptim#3, KempnerForge#115, speculators#1049.
    """
    for saved, resumed in history.resumes():
        if saved.failure is not None:
            continue  # What a broken save left cannot be resumed; that is no evidence about resuming.
        check(resumed.failure is None, f"the resumed generation failed: {resumed.failure}")
        boundary, restored = saved.snapshot("saving"), resumed.snapshot("resumed")
        check(restored.step == boundary.step, f"resumed at step {restored.step}, saved at step {boundary.step}")
        check.same(boundary.everything(), restored.everything(), f"state at step {boundary.step}")
        if saved.case.ranks != resumed.case.ranks:
            continue
        require_twin(history, saved)
        rates = {event.step: event.data.get("lr") for event in saved.of("trained", rank=0)}
        used = {event.step: event.data.get("lr") for event in resumed.of("trained", rank=0)}
        for after in resumed.snapshots("trained"):
            where, rate, wanted = f"after step {after.step}", used.get(after.step), rates.get(after.step)
            if rate != wanted:  # It explains the rest, so it is said first.
                where = f"step {after.step} used rate {rate!r}, uninterrupted {wanted!r}; after it"
            check.same(saved.snapshot("trained", after.step).everything(), after.everything(), where)
        losses = {event.step: event.loss for event in saved.of("trained", rank=0)}
        for event in resumed.of("trained", rank=0):
            check(
                event.loss == losses[event.step],
                f"loss of step {event.step} is {event.loss!r}, uninterrupted {losses[event.step]!r}",
            )


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def chain_of_resumes(history: History, check: Check) -> None:
    """Three resumes in a row, each of what the one before it saved, match the one run that was never stopped.

    What a single resume loses may be too small to see, or may be what it saves again: a second generation shows it.

    Seen: OpenTau#185, flashoptim#3.
    """
    first, *resumed = history.runs["run"]
    require_twin(history, first)
    for number, generation in enumerate(resumed, 1):
        if not check(generation.failure is None, f"resume {number} of {len(resumed)} failed: {generation.failure}"):
            return  # what follows is a consequence
        generation.snapshot("trained")  # a resume that was not seen to train proves nothing
        for after in generation.snapshots("trained"):
            expected = first.snapshot("trained", after.step).everything()
            check.same(expected, after.everything(), f"resume {number}, after step {after.step}")


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.SCHEDULER})
def learning_rates(history: History, check: Check) -> None:
    """The sequence of rates over a chain of resumes, `initial_lr` included, equals the uninterrupted one under accumulation.

    A scheduler that counts micro-batches, or that takes the rate it finds for its peak, is right until the first resume.

    Seen: speculators#1048, open-instruct#52, huggingface/transformers#34053.
    """
    first, *resumed = history.runs["run"]
    expected = {event.step: event.lr for event in first.of("trained", rank=0)}
    for number, generation in enumerate(resumed, 1):
        for event in generation.of("trained"):
            wanted = expected[event.step]
            check(
                event.lr == wanted,
                f"resume {number}, rank {event.rank}: step {event.step} used rate {event.lr!r}, uninterrupted {wanted!r}",
            )
        for after in generation.snapshots("trained"):
            uninterrupted = first.snapshot("trained", after.step)
            for here, there in zip(after.ranks, uninterrupted.ranks, strict=True):
                for index, (group, wanted) in enumerate(zip(here.small["groups"], there.small["groups"], strict=False)):
                    for key in ("lr", "initial_lr"):
                        check(
                            group.get(key) == wanted.get(key),
                            f"resume {number}, rank {here.rank}: {key} of group {index} is {group.get(key)!r} after step"
                            f" {after.step}, uninterrupted {wanted.get(key)!r}",
                        )


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.SAMPLES})
def every_sample_once(history: History, check: Check) -> None:
    """The samples of all ranks, before and after each resume, tile every epoch exactly once, and a resume takes its steps.

    At an epoch's boundary too, and in the middle of a later epoch: a position kept per epoch is lost at its end, and a
    run that takes its epoch for finished trains nothing and exits well.

    Seen: verl#5725, verl#7401, accelerate#4071.
    """
    tiled(history, check)
    for _, generation in history.resumes():
        asked = sum(step.steps for step in generation.case.steps if type(step).__name__ == "Train")
        for rank in range(generation.case.ranks):
            taken = len(generation.of("trained", rank=rank))
            check(taken == asked, f"rank {rank} trained {taken} steps after the resume, asked for {asked}")


def tiled(history: History, check: Check) -> None:
    """Check the samples that a run consumed, step by step, without what a generation consumed beyond its last save.

    After k samples of a data set of N each has been seen ⌊k/N⌋ or ⌊k/N⌋ + 1 times, whatever the order within an epoch.
    """
    records = history.case.data.records
    generations = history.runs["run"]
    seen: Counter[int] = Counter()
    total = 0
    for number, generation in enumerate(generations):
        saves = [event.step for event in generation.of("save-begins", rank=0)]
        last = saves[-1] if saves and number + 1 < len(generations) else None
        by_step: dict[int, list[int]] = {}
        for event in generation.of("trained"):
            by_step.setdefault(event.step, []).extend(event.samples)
        for step, samples in sorted(by_step.items()):
            if last is not None and step > last:
                break
            check(samples, f"step {step} of generation {number} consumed no sample on any rank")
            check.evidence += len(samples)
            seen.update(samples)
            total += len(samples)
            often = [sample for sample, count in seen.items() if count > -(-total // records)]
            seldom = [sample for sample in range(records) if seen[sample] < total // records]
            odd = [f"sample {s} was seen {seen[s]} times" for s in (*sorted(often), *seldom)]
            check(
                not odd,
                f"after step {step}, in generation {number}, {total} samples of {records} have been consumed: "
                + f"{'; '.join(odd[:2])}; {len(odd)} of {records} samples lost or repeated",
            )
            if odd:
                return  # what follows is a consequence


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.RANDOM_STREAMS})
def random_streams_per_rank(history: History, check: Check) -> None:
    """After a resume the next draw of every rank is its own stream's, and no two ranks draw the same.

    One rank's state given to all makes dropout the same everywhere, and a run that seeds again repeats its first masks.

    Seen: NVIDIA-NeMo/Automodel#3437.
    """
    for saved, resumed in history.resumes():
        if not saved.of("drew") or not resumed.of("drew") or saved.of("drew")[0].order < saved.of("save-returns")[0].order:
            continue
        draws = {event.rank: event.values for event in resumed.of("drew")}
        for event in saved.of("drew"):
            drawn = draws.get(event.rank)
            check(
                drawn == event.values,
                f"rank {event.rank} drew {_short(drawn)} after the resume, its own stream goes on with {_short(event.values)}",
            )
        distinct(draws, check)


def distinct(draws: dict[int, list[float]], check: Check) -> None:
    """Check that no two ranks drew the same numbers."""
    first: dict[tuple[float, ...], int] = {}
    for rank, values in sorted(draws.items()):
        twin = first.setdefault(tuple(values), rank)
        check(twin == rank, f"ranks {twin} and {rank} drew the same numbers after the resume, {_short(values)}")


def _short(values: list[float] | None) -> str:
    return "nothing" if values is None else "[" + ", ".join(f"{value:.4f}" for value in values[:2]) + ", …]"


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def counters(history: History, check: Check) -> None:
    """After a resume, and after each step that follows, step, epoch and consumed samples are the uninterrupted ones.

    The stack's own step, its optimizer's, its scheduler's, and the epoch and consumed samples where it reports them.

    Seen: verl#5725, huggingface/transformers#26549, speculators#899.
    """
    first, *resumed = history.runs["run"]
    reported = {(event.step, event.rank): event for event in first.of("trained")}
    for saved, generation in history.resumes():
        boundary, restored = saved.snapshot("saving"), generation.snapshot("resumed")
        for before, after in zip(boundary.ranks, restored.ranks, strict=True):
            check(
                after.step == before.step,
                f"rank {after.rank} is at step {after.step} after the resume, saved at step {before.step}",
            )
            for key, value in (before.small["scheduler"] or {}).items():
                if key == "last_epoch":
                    seen = (after.small["scheduler"] or {}).get(key)
                    check(
                        seen == value, f"rank {after.rank}: {key} of the scheduler is {seen} after the resume, saved as {value}"
                    )
            for (name, key), shard in before.moments.items():
                if key == "step":
                    seen = after.moments.get((name, key))
                    check(
                        seen is not None and seen.local.tolist() == shard.local.tolist(),
                        f"rank {after.rank}: the optimizer has taken {None if seen is None else seen.local.item()} steps on"
                        f" {name} after the resume, saved {shard.local.item()}",
                    )
    for number, generation in enumerate(resumed, 1):
        for event in generation.of("trained"):
            expected = reported.get((event.step, event.rank))
            if not check(
                expected is not None, f"resume {number}, rank {event.rank}: trained step {event.step}, uninterrupted never"
            ):
                continue
            for key in ("epoch", "consumed"):
                if key in event.data:
                    check(
                        event.data[key] == expected.data.get(key),
                        f"resume {number}, rank {event.rank}: {key} is {event.data[key]} after step {event.step}, uninterrupted"
                        f" {expected.data.get(key)}",
                    )


@contract(cases=CONTINUED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def fresh_process(history: History, check: Check) -> None:
    """Every resume happens in new processes, and from a state that is not the saved one before it begins.

    Otherwise a resume that does nothing would pass. Nor may building load anything: a checkpoint is loaded when asked for.

    Seen: speculators#1049 (a test compared empty with empty), KempnerForge#114.
    """
    used: dict[int, int] = {}
    for number, generation in enumerate(history.generations):
        for event in generation.of("begins"):
            earlier = used.setdefault(event.pid, number)
            check(
                earlier == number,
                f"rank {event.rank} of generation {number} is process {event.pid}, which ran generation {earlier}",
            )
    for saved, resumed in history.resumes():
        boundary, built = saved.snapshot("saving"), resumed.snapshot("built")
        check(built.step == 0, f"a run that has not been resumed yet is at step {built.step}")
        fresh = built.everything()
        for name, value in boundary.everything().items():
            same = name in fresh and bool(value.any()) and first_difference({name: value}, {name: fresh[name]}) is None
            check(not same, f"{name} holds its values of step {boundary.step} before the resume has begun")


@contract(cases=REGROUPED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def param_groups(history: History, check: Check) -> None:
    """Every key of every parameter group comes back as it was saved, and each group has its parameters in the same order.

    Empty groups included, and settings that were changed after the optimizer had been built.

    Seen: huggingface/transformers#34053, pytorch/pytorch#104767.
    """
    for earlier, resumed in history.resumes():
        if earlier.failure is not None:
            continue  # What a broken save left cannot be resumed.
        if not check(resumed.failure is None, f"the resumed generation failed: {resumed.failure}"):
            continue
        before, after = earlier.snapshot("saving"), resumed.snapshot("resumed")
        for saved, restored in zip(before.ranks, after.ranks, strict=True):
            groups, seen = saved.small["groups"], restored.small["groups"]
            where = f"rank {saved.rank}"
            if not check(len(groups) == len(seen), f"{where}: {len(seen)} groups after the resume, {len(groups)} were saved"):
                continue
            for number, (group, other) in enumerate(zip(groups, seen, strict=True)):
                for key in group.keys() | other.keys():
                    check(
                        group.get(key, "absent") == other.get(key, "absent"),
                        f"{where}: {key} of group {number} is {other.get(key, 'absent')!r} after the resume,"
                        f" saved as {group.get(key, 'absent')!r}",
                    )


@contract(cases=ODD_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def tied_weights(history: History, check: Check) -> None:
    """The alias graph is the same after a load, and a name is left out of a checkpoint only where storage is really shared.

    A configuration may say that weights are tied which are not; and what was one parameter becomes two, of which one trains.

    Seen: NVIDIA-NeMo/Automodel#2511, verl#6334.
    """
    for saved, resumed in history.resumes():
        before = saved.snapshot("saving")
        aliases = {name: shared for shared in before.ranks[0].small["aliases"] for name in shared}
        for directory, checkpoint in saved.disk.items():
            for name in before.ranks[0].parameters:
                alike = aliases.get(name, [name])
                stored = any(names(key, its) and not _of_a_moment(key, before) for key in checkpoint.tensors for its in alike)
                check(stored, f"{directory} has no {' or '.join(alike)}, which shares its storage with nothing that is there")
        after = resumed.snapshot("resumed")
        for state, restored in zip(before.ranks, after.ranks, strict=True):
            graph, seen = state.small["aliases"], restored.small["aliases"]
            check(seen == graph, f"rank {state.rank}: {_ties(seen)} after the resume, {_ties(graph)} when it was saved")
        check.same(before.parameters(), after.parameters(), f"parameters at step {before.step} after the resume")


def _ties(graph: list[list[str]]) -> str:
    return " and ".join(" = ".join(names) for names in graph) or "nothing is tied"


def _of_a_moment(key: str, snapshot: Snapshot) -> bool:
    return any(moment in key for _, moment in snapshot.ranks[0].moments)


@contract(cases=ODD_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def buffers(history: History, check: Check) -> None:
    """Persistent and non-persistent buffers have, after a resume, the values they were saved with, on every rank.

    A model that is made on the meta device has what was in memory for a buffer which no file holds.

    Seen: LlamaFactory#10820.
    """
    for before, after in _boundaries(history):
        for saved, restored in zip(before.ranks, after.ranks, strict=True):
            expected = {name: shard.local for name, shard in saved.buffers.items()}
            seen = {name: shard.local for name, shard in restored.buffers.items()}
            check.same(expected, seen, f"rank {saved.rank}: buffers at step {saved.step} after the resume")


@contract(cases=PARTLY_TRAINED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def frozen_and_unused(history: History, check: Check) -> None:
    """Frozen parameters, and those that never got a gradient, resume as they were and stay so; what trains goes on.

    Neither has optimizer state, so a checkpoint that expects state for every parameter cannot be loaded, or invents it.

    Seen: pytorch/pytorch#192202, NVIDIA-NeMo/Automodel#1698, prime-rl#2676.
    """
    for saved, resumed in history.resumes():
        if saved.failure is not None:
            continue
        check(resumed.failure is None, f"the resumed generation failed: {resumed.failure}")
        before, after = saved.snapshot("saving"), resumed.snapshot("resumed")
        check.same(before.everything(), after.everything(), f"state at step {before.step}")
        model = history.case.model
        patterns = [pattern for pattern in (model.frozen, r"^unused\." if model.unused else "") if pattern]
        idle = {name for name in before.ranks[0].parameters if any(re.search(pattern, name) for pattern in patterns)}
        if resumed.case.frozen is not None:
            _frozen_otherwise(check, before, resumed)
            continue
        if not idle:
            raise MissingEvidence("no parameter was frozen or without a gradient")
        require_twin(history, saved)
        for later in resumed.snapshots("trained"):
            still = {name: tensor for name, tensor in later.parameters().items() if name in idle}
            check.same(
                {name: before.parameters()[name] for name in idle}, still, f"what does not train, after step {later.step}"
            )
            # A save may have made room for moments of what does not train, zeros; the resume was seen above to invent none.
            seen = later.everything()
            expected = without_room(saved.snapshot("trained", later.step).everything(), beside=seen)
            check.same(expected, seen, f"after step {later.step}")


def _frozen_otherwise(check: Check, before: Snapshot, resumed: GenerationHistory) -> None:
    """Check that after the resume exactly what is frozen now stays as it is, moments included."""
    pattern = resumed.case.frozen
    frozen = {name for name in before.ranks[0].parameters if pattern and re.search(pattern, name)}
    for later in resumed.snapshots("trained"):
        for what in ("parameters", "moments"):
            expected, seen = getattr(before, what)(), getattr(later, what)()
            still = {key: value for key, value in expected.items() if (key if what == "parameters" else key[0]) in frozen}
            check.same(still, {key: seen[key] for key in still if key in seen}, f"what is frozen now, after step {later.step}")
        for name in before.ranks[0].parameters.keys() - frozen:
            moved = first_difference({name: before.parameters()[name]}, {name: later.parameters()[name]})
            check(moved, f"{name} is not frozen now, and is what it was at step {before.step} after step {later.step}")


WRAPPERS = r"_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|(?:^|[.:/|])module\."
"""What torch.compile, activation checkpointing, FSDP1 and DDP put into the names of parameters."""


@contract(cases=WRAPPED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.WRAPPERS})
def wrappers_leave_no_trace(history: History, check: Check) -> None:
    """Names in a checkpoint are the bare model's, whatever its blocks are wrapped in, and it resumes under other wrappers.

    A prefix that gets into a saved name ties a checkpoint to the way it was trained: to compile or not is then no choice.

    Seen: torchtitan#2622, pytorch/pytorch#117399.
    """
    (bare,) = history.runs["bare"]
    expected = {key for checkpoint in bare.disk.values() for key in checkpoint.tensors}
    for number, generation in enumerate(history.runs["run"]):
        how = " and ".join(generation.case.wrapped) or "nothing"
        if not check(generation.failure is None, f"generation {number}, wrapped to {how}, failed: {generation.failure}"):
            return  # what follows is a consequence
        for name, checkpoint in generation.disk.items():
            require_readable(name, checkpoint)
            keys = set(checkpoint.tensors)
            traces = sorted(key for key in keys if re.search(WRAPPERS, key))
            check(not traces, f"{name}: {len(traces)} of {len(keys)} names show a wrapper, first {''.join(traces[:1])}")
            odd = sorted(keys ^ expected)
            check(not odd, f"{name}: {len(odd)} names are not those of a run whose blocks are bare, first {''.join(odd[:1])}")
            check.evidence += len(keys)
    for saved, restored in _boundaries(history):
        check.same(saved.everything(), restored.everything(), f"state at step {saved.step}, resumed under other wrappers")


def _boundaries(history: History) -> Iterator[tuple[Snapshot, Snapshot]]:
    """Snapshots of all ranks (as it was saved, as it was resumed)."""
    for saved, resumed in history.resumes():
        yield saved.snapshot("saving"), resumed.snapshot("resumed")


def require_twin(history: History, saved: GenerationHistory) -> None:
    """Raise MissingEvidence unless another run from the same seed agrees with `saved` bit for bit."""
    twins = [run[0] for root, run in history.runs.items() if root == "twin" and run[0].case.ranks == saved.case.ranks]
    if not twins:
        raise MissingEvidence("no twin run from the same seed, so a divergence could not be judged")
    for one, other in zip(saved.snapshots("trained"), twins[0].snapshots("trained"), strict=False):
        expected = other.everything()
        if difference := first_difference(expected, without_room(one.everything(), beside=expected)):
            raise MissingEvidence(f"cannot judge: two fault-free runs differ after step {one.step}: {difference}")
