"""The recorder: what a rank did, and what its tensors held, written to the evidence directory of its generation.

Recording communicates nothing. Each rank writes its own local shards with their offsets; the history reassembles. It
reads `named_parameters()` and `optimizer.state`, never a state-dict API, since those may change what they read.

Every event leaves a mark: an empty file whose creation inotify sees between the file events around it. So events of all
ranks and all file events have one order, made by the kernel, and no clock is compared.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from contracts.implementation import Implementation


class Recorder:
    """Writes one rank's evidence under `directory`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.directory = directory
        self.rank = rank
        self.sequence = 0
        self.lock = threading.RLock()
        self.implementation: Implementation | None = None
        self.offsets: dict[Any, tuple[int, ...]] = {}
        self.events = os.open(directory / f"events-{rank}.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        (directory / "states").mkdir(exist_ok=True)

    def event(self, kind: str, **data: Any) -> None:
        """Record that `kind` happens now."""
        with self.lock:
            number, self.sequence = self.sequence, self.sequence + 1
            line = {"kind": kind, "rank": self.rank, "number": number, "data": data}
            # The mark comes first: where the rank ends between the two, an event is lost and no line lacks its place.
            mark = self.directory / "marks" / f"{self.rank}.{number}.{kind}"
            os.close(os.open(mark, os.O_CREAT | os.O_WRONLY))
            os.write(self.events, (json.dumps(line) + "\n").encode())

    def attach(self, implementation: Implementation) -> None:
        """Begin to read `implementation`, which has been built."""
        self.implementation = implementation

    def state(self, label: str) -> None:
        """Copy this rank's shards of every parameter and moment, and record where they are."""
        impl = self.implementation
        if impl is None or impl.model is None:
            return
        tensors: dict[str, torch.Tensor] = {}
        places: dict[str, dict[str, Any]] = {}

        @torch.no_grad()  # where a DTensor's `to_local` is the shard itself, and nothing is dispatched
        def add(key: str, value: torch.Tensor) -> None:
            local, shape, offset = value, tuple(value.shape), (0,) * value.dim()
            if isinstance(value, DTensor):
                local = value.to_local()
                offset = self._offset(value) if local.numel() else shape
            places[key] = {
                "shape": shape,
                "offset": list(offset),
                "device": str(value.device),
                "sharded": isinstance(value, DTensor),
            }
            tensors[key] = local.detach().to("cpu", copy=True).contiguous()

        names = {}
        for name, parameter in impl.model.named_parameters():
            name = _unwrapped(name)
            names[parameter] = name
            add(f"parameter|{name}", parameter)
            if parameter.grad is not None:
                add(f"gradient|{name}", parameter.grad)
        for name, buffer in impl.model.named_buffers():
            add(f"buffer|{_unwrapped(name)}", buffer)
        numbers: dict[str, Any] = {}
        if impl.optimizer is not None:
            for parameter, state in impl.optimizer.state.items():
                for key, value in state.items():
                    name = names.get(parameter, "?")
                    if isinstance(value, torch.Tensor):
                        add(f"moment|{key}|{name}", value)
                    else:
                        numbers[f"{key}|{name}"] = value
        file = f"{self.rank}-{self.sequence}.safetensors"
        save_file(tensors, self.directory / "states" / file)
        self.event("state", label=label, step=impl.step, file=file, places=places, numbers=numbers, **_small_state(impl, names))

    def _offset(self, value: DTensor) -> tuple[int, ...]:
        """Where this rank's shard begins, found once for each layout."""
        layout = value.shape, value.device_mesh, value.placements
        if layout not in self.offsets:
            _, self.offsets[layout] = compute_local_shape_and_global_offset(*layout)
        return self.offsets[layout]


def _unwrapped(name: str) -> str:
    """A parameter's name without what torch.compile and activation checkpointing put into it: it belongs in no checkpoint."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _small_state(impl: Implementation, names: dict[torch.nn.Parameter, str]) -> dict[str, Any]:
    groups = []
    if impl.optimizer is not None:
        for group in impl.optimizer.param_groups:
            plain = {k: _plain(v) for k, v in group.items() if k != "params"}
            groups.append(plain | {"size": len(group["params"]), "names": [names.get(p, "?") for p in group["params"]]})
    scheduler = impl.scheduler.state_dict() if impl.scheduler is not None else None
    random = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]
    aliases: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in impl.model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(_unwrapped(name))
    shared = sorted(sorted(its) for its in aliases.values() if len(its) > 1)
    scaler = impl.scaler.state_dict() if impl.scaler is not None else None
    plain = {"scheduler": _plain(scheduler), "scaler": _plain(scaler)}
    return {"groups": groups, **plain, "random": random, "aliases": shared}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    return value if isinstance(value, bool | int | float | str | None) else type(value).__name__


reductions: dict[tuple[str, str], int] = {}
"""Elements given to each collective that reduces gradients, by its name and their dtype, since this was last cleared."""


def watch_reductions() -> None:
    """Count what FSDP2 gives to its collectives. A scalar is no gradient: losses and norms are reduced as well."""
    inside = threading.local()

    def wrap(name: str, argument: str, position: int) -> None:
        original = getattr(torch.distributed, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            given = kwargs[argument] if argument in kwargs else args[position]
            if getattr(inside, "collective", False) or not isinstance(given, torch.Tensor) or given.numel() < 2:
                return original(*args, **kwargs)
            key = name, str(given.dtype).removeprefix("torch.")
            reductions[key] = reductions.get(key, 0) + given.numel()
            inside.collective = True
            try:
                return original(*args, **kwargs)
            finally:
                inside.collective = False

        setattr(torch.distributed, name, collective)

    # FSDP2 looks them up in torch.distributed at each call; the first has had its new name since torch 2.13.
    wrap("reduce_scatter_single", "input", 1)
    wrap("reduce_scatter_tensor", "input", 1)
    wrap("all_reduce", "tensor", 0)


def watch_loads(recorder: Recorder) -> None:
    """Record when state is loaded into an optimizer or a scheduler, in this process, whoever loads it.

    The classes' own methods are wrapped, not hooks of one instance: a resume may build a new optimizer.
    """
    depth = threading.local()

    def wrap(owner: type, kind: str, parameters: bool) -> None:
        original = owner.load_state_dict

        @functools.wraps(original)
        def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
            # Loading into a part of the stack's own machinery (a wrapped optimizer) nests; the outermost one counts.
            if getattr(depth, kind, 0):
                return original(self, *args, **kwargs)
            setattr(depth, kind, 1)
            if parameters:
                recorder.state(f"{kind}-begins")
            recorder.event(f"{kind}-begins")
            try:
                return original(self, *args, **kwargs)
            finally:
                setattr(depth, kind, 0)
                recorder.event(f"{kind}-ends")

        owner.load_state_dict = load_state_dict

    wrap(torch.optim.Optimizer, "optimizer-load", parameters=True)
    schedulers = [torch.optim.lr_scheduler.LRScheduler]
    while schedulers:
        owner = schedulers.pop()
        schedulers += owner.__subclasses__()
        if "load_state_dict" in vars(owner):
            wrap(owner, "scheduler-load", parameters=False)
