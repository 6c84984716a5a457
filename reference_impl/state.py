"""What a checkpoint's tensors are called, and how they get back into a model and an optimizer.

Every tensor has one flat name: ``model.<fqn>``, ``optimizer.state.<fqn>.<exp_avg | exp_avg_sq | step>`` and
``rng.rank_<r>``. Names are FQNs, never positions, so neither the world size nor the order of parameters matters.

The optimizer's state is read from and given to the optimizer directly. DCP's ``get_optimizer_state_dict`` would take a
hidden step to invent state that is not there yet, on save as on load.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from reference_impl.errors import UsageError

Tensors = dict[str, torch.Tensor]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
"""AdamW's moments. Its ``step`` is float32 whatever they are."""

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Prefixes that torch.compile and activation checkpointing put into parameter names; they reach no saved name."""


class PrecisionDrift(UsageError):
    """A checkpoint holds another dtype than this run declares. The message names the tensor and both."""


class StateMismatch(UsageError):
    """A checkpoint holds other tensors or parameter groups than this run has. The message names them."""


def model_tensors(model: nn.Module) -> Tensors:
    """``model.<fqn>`` to the live tensors (DTensors where sharded) of parameters and persistent buffers."""
    # DCP's get_model_state_dict leaves `_orig_mod.` in where activation checkpointing is wrapped around a compiled block.
    return {f"model.{unwrapped(name)}": tensor for name, tensor in model.state_dict().items()}


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """``optimizer.state.<fqn>.<name>`` to the live state tensors; empty for an optimizer that has never stepped."""
    names = parameter_names(model)
    # What an optimizer holds may be no tensor, and what its state dict shows is one.
    numbered = dict(enumerate(names[parameter] for group in optimizer.param_groups for parameter in group["params"]))
    return {
        f"optimizer.state.{numbered[number]}.{key}": value
        for number, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    }


def optimizer_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The parameter groups as JSON values: every hyperparameter, and ``params`` as FQNs in order."""
    names = parameter_names(model)
    return [{**group, "params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups]


def parameter_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each parameter's FQN without wrapper prefixes."""
    return {parameter: unwrapped(name) for name, parameter in model.named_parameters()}


def unwrapped(name: str) -> str:
    """A parameter's name without wrapper prefixes."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def read_metadata(directory: Path) -> Metadata:
    """DCP's own metadata of a checkpoint: names, shapes, dtypes, shards. Reads one file, no tensor."""
    return dcp.FileSystemReader(directory).read_metadata()


def load_model_tensors(model: nn.Module, directory: Path, *, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Read every ``model.`` tensor, at any world size, and load it strictly.

    The live model changes only after all of it was read. Raises :class:`StateMismatch` for missing or unexpected names or
    shapes, :class:`PrecisionDrift` when a floating parameter was saved in another dtype than ``dtype``.
    """
    live = model_tensors(model)
    saved = _entries(directory, "model.")
    _same_names(directory, saved=set(saved), here=set(live))
    parameters = {f"model.{name}" for name in parameter_names(model).values()}
    targets: Tensors = {}
    for name, tensor in live.items():
        entry = saved[name]
        _same_shape(directory, name, entry, tensor)
        if name in parameters and tensor.is_floating_point() and entry.properties.dtype != dtype:
            raise PrecisionDrift(_drift(directory, name, entry.properties.dtype, dtype, "parameter_dtype"))
        targets[name] = torch.empty_like(tensor, dtype=entry.properties.dtype, requires_grad=False)
    dcp.load(targets, checkpoint_id=directory, process_group=group)
    loaded = {name.removeprefix("model."): tensor for name, tensor in targets.items()}
    give_model_tensors(model, loaded)


def give_model_tensors(model: nn.Module, tensors: Tensors, *, strict: bool = True) -> None:
    """Copy tensors, by their names without wrapper prefixes, into the live ones; ``strict`` allows none to be missing."""
    own = {unwrapped(name): name for name in model.state_dict()}
    model.load_state_dict({own[name]: tensor for name, tensor in tensors.items()}, strict=strict)


def load_optimizer_tensors(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    directory: Path,
    *,
    groups: list[dict[str, Any]],
    moment_dtype: torch.dtype,
    group: dist.ProcessGroup,
) -> None:
    """Read the state of every parameter and load it with ``groups``, into an optimizer that may never have stepped.

    Parameters must already hold their final dtype: ``Optimizer.load_state_dict`` casts moments to it without a word.
    Raises :class:`StateMismatch` when the groups hold other parameters, :class:`PrecisionDrift` when a moment was saved
    in another dtype than ``moment_dtype``; both before any optimizer tensor changes.
    """
    names = parameter_names(model)
    live = [[names[parameter] for parameter in each["params"]] for each in optimizer.param_groups]
    if [each["params"] for each in groups] != live:
        odd = sorted({name for each in groups for name in each["params"]} ^ {name for each in live for name in each})
        raise StateMismatch(
            f"{directory}: the optimizer's parameter groups were of sizes {[len(each['params']) for each in groups]}, this "
            f"run's are {[len(each) for each in live]}; only on one side: {', '.join(odd[:4]) or 'none, so the order differs'}"
        )
    by_name = {name: parameter for parameter, name in names.items()}
    saved = _entries(directory, "optimizer.state.")
    refuse_other_moments(directory, saved, moment_dtype)
    targets: Tensors = {}
    present = {name: tensor for name, tensor in optimizer_tensors(model, optimizer).items() if _own_class(tensor)}
    for name, entry in saved.items():
        fqn = name.removeprefix("optimizer.state.").rpartition(".")[0]
        if fqn not in by_name:
            raise StateMismatch(f"{directory}: {name} belongs to no parameter of this model")
        targets[name] = present[name] if name in present else _like(by_name[fqn], entry)
    dcp.load(targets, checkpoint_id=directory, process_group=group)
    optimizer.load_state_dict(numbered(targets, groups, optimizer))


def refuse_other_policy(directory: Path, *, saved: Mapping[str, Any], declared: Mapping[str, Any]) -> None:
    """Raise :class:`PrecisionDrift`, naming all dtypes of both, unless a saved precision policy is the declared one."""
    kinds = {"parameters": "parameter_dtype", "moments": "moment_dtype", "masters": "master_dtype"}
    before = {kind: saved.get(name, "none") for kind, name in kinds.items()}
    now = {kind: declared[name] for kind, name in kinds.items()}
    if before != now:
        texts = [", ".join(f"{kind} {dtype}" for kind, dtype in policy.items()) for policy in (before, now)]
        raise PrecisionDrift(
            f"{directory} was saved with {texts[0]}; this run declares {texts[1]}; a checkpoint is never cast on its way: "
            "declare what was saved, or start in another output_dir"
        )


def load_streams(directory: Path, *, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Every saved rank's random streams (uint8), indexed by rank."""
    saved = _entries(directory, "rng.rank_")
    targets = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in saved.items()}
    dcp.load(targets, checkpoint_id=directory, process_group=group)
    return [targets[f"rng.rank_{rank}"] for rank in range(len(targets))]


def refuse_other_moments(directory: Path, saved: Mapping[str, Any], dtype: torch.dtype) -> int:
    """Raise :class:`PrecisionDrift` unless every Adam moment in ``saved`` metadata entries is of ``dtype``; count them."""
    count = 0
    for name, entry in saved.items():
        if name.startswith("optimizer.state.") and name.rpartition(".")[2] in MOMENTS:
            count += 1
            if entry.properties.dtype != dtype:
                raise PrecisionDrift(_drift(directory, name, entry.properties.dtype, dtype, "moment_dtype"))
    return count


def numbered(targets: Tensors, groups: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """torch's own optimizer state dict, which numbers parameters in group order."""
    number = {name: index for index, name in enumerate(name for group in groups for name in group["params"])}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in targets.items():
        fqn, _, key = name.removeprefix("optimizer.state.").rpartition(".")
        state.setdefault(number[fqn], {})[key] = tensor
    numbered = []
    for group, live in zip(groups, optimizer.param_groups, strict=True):
        # JSON has no tuples; betas come back as the list it made of them.
        values = {key: tuple(value) if isinstance(live.get(key), tuple) else value for key, value in group.items()}
        if isinstance(live["lr"], torch.Tensor):
            values["lr"] = torch.full_like(live["lr"], values["lr"])
        numbered.append({**values, "params": [number[name] for name in group["params"]]})
    return {"state": state, "param_groups": numbered}


def _like(parameter: torch.Tensor, entry: TensorStorageMetadata) -> torch.Tensor:
    """An empty tensor for a saved state entry: sharded as its parameter if it has its shape, else plain (``step``)."""
    if entry.size == parameter.shape:
        return torch.empty_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=entry.properties.dtype, device=parameter.device)


def _own_class(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that only its optimizer can make, as quantized moments are; it is loaded in place."""
    return type(getattr(tensor, "_local_tensor", tensor)) not in (torch.Tensor, nn.Parameter)


def _entries(directory: Path, prefix: str) -> dict[str, TensorStorageMetadata]:
    return {name: entry for name, entry in read_metadata(directory).state_dict_metadata.items() if name.startswith(prefix)}


def _same_names(directory: Path, *, saved: set[str], here: set[str]) -> None:
    if saved != here:
        missing, unexpected = sorted(here - saved), sorted(saved - here)
        raise StateMismatch(
            f"{directory}: {len(missing)} tensors of this model are missing ({', '.join(missing[:4])}) and {len(unexpected)} "
            f"are unexpected ({', '.join(unexpected[:4])}); was it saved from another model?"
        )


def _same_shape(directory: Path, name: str, entry: TensorStorageMetadata, tensor: torch.Tensor) -> None:
    if entry.size != tensor.shape:
        raise StateMismatch(f"{directory}: {name} was saved as {tuple(entry.size)}, this model's is {tuple(tensor.shape)}")


def _drift(directory: Path, name: str, seen: torch.dtype, declared: torch.dtype, option: str) -> str:
    return f"{directory}: {name} was saved as {seen}, this run declares {declared}; set {option} to what was saved"
