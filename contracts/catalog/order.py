"""Loading happens in the order that keeps values."""

from __future__ import annotations

from contracts.judging import Check, contract
from contracts.history import History
from contracts.implementation import Capability
from contracts.strategies import INTERRUPTED_RUNS


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME})
def params_final_before_optimizer(history: History, check: Check) -> None:
    """When optimizer state starts to load, every parameter already holds its loaded value and final dtype.

    Moments take the dtype of the parameters they are loaded against. Casting the model afterwards repairs the
    parameters and leaves the moments rounded.

    Seen: NVIDIA-NeMo/Nemotron#208, huggingface/transformers#26159.
    """
    for _, resumed in history.resumes():
        final = resumed.snapshot("resumed")
        for load in resumed.snapshots("optimizer-load-begins"):
            for state, end in zip(load.ranks, final.ranks, strict=True):
                for name, shard in state.parameters.items():
                    last = end.parameters.get(name)
                    if not check(last is not None, f"rank {state.rank} · {name} is gone after the resume"):
                        continue
                    if check(
                        shard.dtype == last.dtype,
                        f"rank {state.rank} · {name} was {shard.dtype} when optimizer state loaded (final: {last.dtype})",
                    ):
                        check(
                            shard.same_bits(last),
                            f"rank {state.rank} · {name} changed value after optimizer state loaded",
                        )


@contract(cases=INTERRUPTED_RUNS, needs={Capability.TRAIN, Capability.RESUME, Capability.SCHEDULER})
def scheduler_after_optimizer(history: History, check: Check) -> None:
    """Scheduler state loads after optimizer state, and the first rate after a resume is the uninterrupted one.

    Loading optimizer state brings back the saved groups, rates included; a scheduler loaded before it is overruled.

    Seen: huggingface/transformers#34053, speculators#1048.
    """
    for saved, resumed in history.resumes():
        for rank in range(resumed.case.ranks):
            optimizer = resumed.of("optimizer-load-ends", rank=rank)
            scheduler = resumed.of("scheduler-load-begins", rank=rank)
            if optimizer and scheduler:
                check(
                    scheduler[-1].order > optimizer[-1].order,
                    f"rank {rank}: scheduler state loaded before optimizer state",
                )
            expected = {event.step: event.lr for event in saved.of("trained", rank=rank)}
            for event in resumed.of("trained", rank=rank)[:1]:
                if event.step in expected:
                    wanted = expected[event.step]
                    check(event.lr == wanted, f"rank {rank}: step {event.step} after the resume used rate {event.lr!r}, uninterrupted {wanted!r}")
