"""The rank's loop: build the implementation, take the generation's steps, record what happens."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from contracts import case as steps
from contracts.implementation import Capability, Implementation, Place, require_owed
from contracts.lab.blind import blindfold
from contracts.lab.file_events import JOB_VARIABLE, FileEvents
from contracts.lab.recorder import Recorder, reductions, watch_loads, watch_reductions

SITE = Path(__file__).parent / "site"
FAILURES = (Exception, CheckpointException)
"""What a stack raises; DCP's own error is a BaseException."""
ANSWER_SECONDS = 5.0
"""How long a rank that raised waits for its peers to raise too; they have no collective to sit out."""
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
"""Shorter than any deadline of the lab, so that a rank left alone says so itself."""


def load(name: str) -> type[Implementation]:
    """Import `module:Class`; raises ImportError, or TypeError where it is no whole Implementation."""
    module, _, attribute = name.partition(":")
    imported = importlib.import_module(module)
    found = getattr(imported, attribute or "", None)
    if not (isinstance(found, type) and issubclass(found, Implementation)):
        its = {k: v for k, v in vars(imported).items() if isinstance(v, type) and issubclass(v, Implementation)}
        have = ", ".join(k for k, v in its.items() if v.__module__ == module) or "none"
        raise TypeError(f"{module} has no implementation {attribute!r}; it has: {have}. Name module:Class")
    require_owed(found)
    return found


def main(job_file: str) -> None:
    """Run one generation's steps on this rank."""
    job = json.loads(Path(job_file).read_text())
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    evidence = Path(job["evidence"])
    case = steps.Case.read(Path(job["case"]))
    generation = case.generations[job["generation"]]
    os.environ[JOB_VARIABLE] = job_file
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    torch.set_num_threads(1)
    warm = set(sys.modules)

    import safetensors.torch  # noqa: F401  imported before the hook is installed, which wraps their native writers
    import tokenizers  # noqa: F401

    recorder = Recorder(evidence, rank)
    FileEvents(job, rank).install()
    watch_loads(recorder)
    watch_reductions()
    recorder.event("begins", pid=os.getpid())
    device = job["device"]
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=COLLECTIVE_TIMEOUT)
    torch.manual_seed(generation.seed * 1000 + rank)

    place = Place(
        root=Path(job["root"]),
        model=Path(job["model"]),
        records=Path(job["records"]),
        device=device,
        rank=rank,
        ranks=ranks,
        mesh=generation.mesh,
        wrapped=generation.wrapped,
    )
    if generation.precision is not None:
        case = dataclasses.replace(case, precision=generation.precision)
    if generation.frozen is not None:
        case = dataclasses.replace(case, model=dataclasses.replace(case.model, frozen=generation.frozen))
    import contracts.models  # noqa: F401  registers the suite's own model, which any directory may hold

    implementation = load(job["implementation"])(case, place)
    if Capability.TRAIN in implementation.capabilities:
        implementation.build()
        recorder.attach(implementation)
        _require_fsdp(implementation, recorder)
        recorder.state("built")
    for fault in generation.faults:
        if isinstance(fault, steps.Blind) and fault.rank == rank:
            blindfold(place.root, fault.at)
    may_fail = any(isinstance(fault, steps.Fail | steps.Blind) for fault in generation.faults)
    for number, step in enumerate(generation.steps):
        if isinstance(step, steps.Exit):
            recorder.event("exits")
            return
        try:
            _take(step, implementation, recorder)
        except FAILURES as error:
            if not may_fail:
                raise
            recorder.event("raised", step=number, error=f"{type(error).__name__}: {error}"[:2000])
            _wait_for_answers(evidence / "marks", ranks, implementation, recorder)
            return
        recorder.event("step-done", step=number)
    implementation.close()
    recorder.event("ends", imported=[name for name in sys.modules if name not in warm])
    if not may_fail:  # A peer that raised comes to no barrier.
        dist.barrier()
    dist.destroy_process_group()


def _wait_for_answers(marks: Path, ranks: int, implementation: Implementation, recorder: Recorder) -> None:
    """Stay until every rank has raised or ended: as soon as one is gone, its peers fail of that."""
    end = time.monotonic() + ANSWER_SECONDS
    while time.monotonic() < end:
        names = [name.split(".") for name in os.listdir(marks)]
        if len({name[0] for name in names if name[-1] in ("raised", "ends")}) == ranks:
            with contextlib.suppress(*FAILURES):
                implementation.close()
            return
        time.sleep(0.02)
    recorder.event("gave-up")


def _require_fsdp(implementation: Implementation, recorder: Recorder) -> None:
    """Refuse to judge a stack for work it did not do: some fall back to DDP on a CPU without a word."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    assert implementation.model is not None, "build() left no model"
    modules = sum(isinstance(module, FSDPModule) for module in implementation.model.modules())
    sharded = sum(isinstance(parameter, DTensor) for parameter in implementation.model.parameters())
    recorder.event("sharded", modules=modules, parameters=sharded)
    if not modules or not sharded:
        raise RuntimeError(f"the case asks for FSDP2, but build() made {modules} FSDPModules and {sharded} DTensor parameters")


def _take(step: steps.Step, implementation: Implementation, recorder: Recorder) -> None:
    match step:
        case steps.Train(count, lr):
            for _ in range(count):
                if lr is not None:
                    for group in implementation.optimizer.param_groups:
                        group["lr"] = lr
                reductions.clear()
                result = dict(implementation.train_step())
                for (collective, dtype), elements in reductions.items():
                    recorder.event("reduced", collective=collective, dtype=dtype, elements=elements)
                recorder.event("trained", step=implementation.step, **{k: _number(v) for k, v in result.items()})
                recorder.state("trained")
        case steps.Save(final, metric):
            implementation.metric = metric
            recorder.state("saving")
            recorder.event("save-begins", step=implementation.step, metric=metric)
            implementation.save(final=final)
            recorder.event("save-returns", step=implementation.step)
            recorder.state("saved")
        case steps.Finalize():
            recorder.event("finalize-begins")
            implementation.finalize()
            recorder.event("finalize-returns")
        case steps.Overwrite(value):
            _overwrite(implementation, value)
            recorder.event("overwritten", value=value)
        case steps.Resume(refused):
            recorder.event("resume-begins")
            if refused:
                _resume_to_be_refused(implementation, recorder)
                return
            implementation.resume()
            recorder.event("resume-returns", step=implementation.step)
            recorder.state("resumed")
        case steps.Draw(count):
            recorder.event("drew", values=torch.rand(count, device=implementation.place.device).tolist())
        case steps.FillGradients(value):
            for parameter in implementation.model.parameters():
                if value is None:
                    parameter.grad = None
                elif parameter.requires_grad:
                    parameter.grad = torch.full_like(parameter, value)
            recorder.event("gradients-filled", value=value)
        case steps.SetStepCount(value):
            _set_step_count(implementation, value)
            recorder.event("step-count-set", value=value)
        case steps.ForgetMoments():
            implementation.optimizer.state.clear()
            recorder.event("moments-forgotten")
        case steps.Retune(factor):
            for number, group in enumerate(implementation.optimizer.param_groups, 1):
                group["weight_decay"] *= factor * number
                group["eps"] *= factor * number
        case steps.MapNames(source):
            _map_names(source, implementation, recorder)


def _resume_to_be_refused(implementation: Implementation, recorder: Recorder) -> None:
    recorder.state("before-refusal")
    try:
        implementation.resume()
    except FAILURES as error:
        told = "".join(traceback.format_exception(error))[-20_000:]
        recorder.event("resume-refused", error=f"{type(error).__name__}: {error}", traceback=told)
        recorder.state("refused")
    else:
        recorder.event("resume-returns", step=implementation.step)
        recorder.state("resumed")


def _overwrite(implementation: Implementation, value: float) -> None:
    with torch.no_grad():
        for parameter in implementation.model.parameters():
            getattr(parameter, "_local_tensor", parameter).fill_(value)
        for state in implementation.optimizer.state.values():
            for tensor in state.values():
                if isinstance(tensor, torch.Tensor):
                    getattr(tensor, "_local_tensor", tensor).fill_(value)


def _set_step_count(implementation: Implementation, value: int) -> None:
    for holder in (*implementation.optimizer.state.values(), *implementation.optimizer.param_groups):
        if isinstance(holder.get("step"), torch.Tensor):
            holder["step"].fill_(value)
        elif "step" in holder:
            holder["step"] = type(holder["step"])(value)


def _map_names(source: str, implementation: Implementation, recorder: Recorder) -> None:
    from contracts import published_names

    published = published_names.read(source)
    mapping = implementation.key_mapping(published)
    if mapping is None:
        recorder.event("mapping-unsupported", source=source)
        return
    once = {name: mapping.map(name) for name in published.names}
    recorder.event(
        "mapped",
        source=source,
        ignored=list(published.ignored),
        once=once,
        twice={name: mapping.map(name) for name in once.values() if name is not None},
        targets=sorted(mapping.targets),
    )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
