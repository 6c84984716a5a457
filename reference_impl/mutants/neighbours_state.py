"""Good neighbours that keep a run's state in another shape: other names, other files, other places."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from reference_impl import model as models
from reference_impl import state
from reference_impl.batches import Batches
from reference_impl.checkpoint import SHARDS, Checkpointer
from reference_impl.masters import MASTER
from reference_impl.mutants.registry import neighbour
from reference_impl.optim import rate_factor
from reference_impl.rng import capture_streams, restore_streams, seed_streams
from reference_impl.runtime import everywhere
from reference_impl.scaler import ShardedScaler
from reference_impl.trainer import read_progress
from reference_impl.under_contract import Reference


@neighbour
class RebuildsTheScheduler(Reference):
    """Saves no scheduler: it builds one that stands at the step the run has reached."""

    def load_scheduler(self, path: Path) -> None:
        last = read_progress(path)["step"] - 1
        self.scheduler = LambdaLR(self.optimizer, lambda step: rate_factor(step, self.config), last_epoch=last)


@neighbour
class OneGroupPerParameter(Reference):
    """Gives every parameter a group of its own."""

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        groups = [{**group, "params": [p]} for group in optimizer.param_groups for p in group["params"]]
        optimizer.param_groups[:] = [*groups, *(group for group in optimizer.param_groups if not group["params"])]
        return optimizer


class PerEpoch(Batches):
    """Batches whose state is an epoch and a place in it."""

    def state_dict(self) -> dict[str, Any]:
        epoch, offset = divmod(self.consumed, self.order.size)
        return {"epoch": epoch, "offset": offset, "size": self.order.size, "identity": self.split.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state | {"consumed": state["epoch"] * state["size"] + state["offset"]})


@neighbour
class KeepsItsPlaceInAnEpoch(Reference):
    """Saves its position in the data as an epoch and an offset in it, not as samples of the run."""

    def build_data(self) -> Batches:
        its = super().build_data()
        return PerEpoch(its.split, its.tokenizer, its.tokenization, its.config)


@neighbour
class KeepsStreamsInFiles(Reference):
    """Each rank keeps its random streams in a file of its own, beside the shards and not in them."""

    def build(self) -> None:
        super().build()
        self.checkpointer.streams = lambda: capture_streams(self.runtime.device)

    def checkpoint_tensors(self) -> state.Tensors:
        return {name: tensor for name, tensor in super().checkpoint_tensors().items() if not name.startswith("rng.")}

    def load_streams(self, path: Path) -> None:
        file = path / "streams" / f"{self.runtime.rank}.state"
        if file.exists():
            restore_streams(torch.load(file, weights_only=True), self.runtime.device)
        else:
            seed_streams("new rank", self.config.seed, self.step, self.runtime.world, self.runtime.rank)

    class checkpointer_class(Checkpointer):
        streams: Callable[[], torch.Tensor]

        def write_replicated(self, directory: Path, companions: Callable[[Path], None]) -> None:
            def write() -> None:
                (directory / "streams").mkdir(exist_ok=True)
                torch.save(self.streams(), directory / "streams" / f"{self.runtime.rank}.state")

            everywhere(self.runtime, f"writing random streams to {directory}", write)
            super().write_replicated(directory, companions)


@neighbour
class RecomputesBuffers(Reference):
    """Keeps no floating-point buffer in its checkpoints, for it makes them when it is built."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        for module in model.modules():
            floating = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_floating_point()]
            module._non_persistent_buffers_set.update(floating)
        return model


@neighbour
class CastsBeforeEveryStep(Reference):
    """Casts parameters to their declared dtype before each step once more, which changes nothing."""

    def train_step(self) -> dict[str, Any]:
        self.cast_parameters()
        return super().train_step()


@neighbour
class ReducesItsMetricsToo(Reference):
    """Adds up a vector of float64 metrics over all ranks in each step, beside the gradients."""

    def train_step(self) -> dict[str, Any]:
        result = super().train_step()
        dist.all_reduce(torch.tensor([result["loss"], result["lr"], result["grad_norm"]], dtype=torch.float64))
        return result


class OwnFormat(Reference):
    """Reads a checkpoint itself: :meth:`read` gives tensors by the reference's names, as they lie on this rank."""

    def read(self, path: Path, prefix: str) -> state.Tensors:
        raise NotImplementedError

    def load_model(self, path: Path) -> None:
        loaded = {name.removeprefix("model."): tensor for name, tensor in self.read(path / SHARDS, "model.").items()}
        state.give_model_tensors(self.model, loaded, strict=False)  # What shares its storage may be there once.

    def load_optimizer(self, path: Path) -> None:
        loaded = self.read(path / SHARDS, "optimizer.state.")
        groups = read_progress(path)["optimizer_groups"]
        self.optimizer.load_state_dict(state.numbered(loaded, groups, self.optimizer))

    def check_moments(self, path: Path) -> None:
        """The reference's own reads its own names."""

    def saved(self, directory: Path, names: list[str]) -> state.Tensors:
        """Whole tensors by their names in the checkpoint."""
        entries = state.read_metadata(directory).state_dict_metadata
        targets = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in names}
        dcp.load(targets, checkpoint_id=directory, process_group=self.runtime.control)
        return targets

    def placed(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor of a parameter, of its state, or of a buffer."""
        fqn = name.removeprefix("model.") if name.startswith("model.") else name.split(".", 2)[2].rpartition(".")[0]
        named = self.model.named_parameters(remove_duplicate=False)
        parameter = {state.unwrapped(name): parameter for name, parameter in named}.get(fqn)
        if not isinstance(parameter, DTensor) or parameter.shape != whole.shape:
            return whole
        mesh = parameter.device_mesh
        pieces = whole.chunk(mesh.size(-1))
        index = mesh.get_local_rank(mesh.ndim - 1)
        local = pieces[index] if index < len(pieces) else whole[:0]
        local = local.clone().to(parameter.device)
        shape, stride = whole.shape, whole.stride()
        return DTensor.from_local(local, mesh, parameter.placements, run_check=False, shape=shape, stride=stride)


@neighbour
class StoresPlainShards(OwnFormat):
    """Stores each shard as a plain tensor under a name of its own, and what shares its storage once."""

    def checkpoint_tensors(self) -> state.Tensors:
        found: state.Tensors = {}
        stored = set(state.parameter_names(self.model).values())
        every = {state.unwrapped(name) for name, _ in self.model.named_parameters(remove_duplicate=False)}
        again = {f"model.{name}" for name in every - stored}
        for name, tensor in super().checkpoint_tensors().items():
            if name in again:
                continue
            if isinstance(tensor, DTensor):
                index = tensor.device_mesh.get_local_rank(tensor.device_mesh.ndim - 1)
                found[f"shard_{index}.{name}"] = tensor.to_local().detach()
            else:
                found[name] = tensor
        return found

    def read(self, path: Path, prefix: str) -> state.Tensors:
        names: dict[str, list[str]] = {}
        for saved in state.read_metadata(path).state_dict_metadata:
            part, _, rest = saved.partition(".")
            name = rest if part.startswith("shard_") else saved
            if name.startswith(prefix):
                names.setdefault(name, []).append(saved)
        tensors = self.saved(path, [saved for pieces in names.values() for saved in pieces])
        found = {}
        for name, pieces in names.items():
            pieces.sort(key=lambda piece: (len(piece), piece))  # shard_10 after shard_9
            whole = torch.cat([tensors[piece] for piece in pieces]) if len(pieces) > 1 else tensors[pieces[0]]
            found[name] = self.placed(name, whole)
        return found


@neighbour
class NamesStateItsOwnWay(OwnFormat):
    """Calls moments m and v in its checkpoints, and masters fp32 in its optimizer too; stores these apart from other state."""

    names: ClassVar = {"exp_avg": "m", "exp_avg_sq": "v", "max_exp_avg_sq": "vmax", "step": "t", "fp32": "fp32"}

    def checkpoint_tensors(self) -> state.Tensors:
        return {self.name(name): tensor for name, tensor in super().checkpoint_tensors().items()}

    def name(self, name: str) -> str:
        """What the reference's `name` is called here: such as adam.m/FQN, or masters/FQN."""
        if not name.startswith("optimizer.state."):
            return name
        fqn, _, key = name.removeprefix("optimizer.state.").rpartition(".")
        return f"masters/{fqn}" if key == "fp32" else f"adam.{self.names[key]}/{fqn}"

    def read(self, path: Path, prefix: str) -> state.Tensors:
        keys = {its: key for key, its in self.names.items()}
        names = {}
        for saved in state.read_metadata(path).state_dict_metadata:
            kind, _, fqn = saved.partition("/")
            key = "fp32" if kind == "masters" else keys.get(kind.removeprefix("adam."))
            name = f"optimizer.state.{fqn}.{key}" if fqn else saved
            if name.startswith(prefix):
                names[name] = saved
        tensors = self.saved(path, list(names.values()))
        return {name: self.placed(name, tensors[saved]) for name, saved in names.items()}

    def train_step(self) -> dict[str, Any]:
        self.rename("fp32", MASTER)
        result = super().train_step()
        self.rename(MASTER, "fp32")
        return result

    def rename(self, old: str, new: str) -> None:
        for its in self.optimizer.state.values():
            if old in its:
                its[new] = its.pop(old)


@neighbour
class CompilesInsideRecomputation(Reference):
    """Compiles each block first and wraps that for activation checkpointing, the other way round than the reference."""

    def shard(self, model: nn.Module) -> nn.Module:
        its, bare = self.config, dataclasses.replace(self.config, compile="none", activation_checkpointing=False)
        if its.compile != "none":
            models.compile_blocks(model, its.compile)
        if its.activation_checkpointing:
            models.recompute_activations(model)
        return models.shard_model(model.to(self.runtime.device), self.mesh(), bare)


@neighbour
class AveragesWholeGradientsAtOnce(Reference):
    """Gathers the gradients of what FSDP leaves whole as one vector from every rank, and takes their mean."""

    def average_whole_gradients(self) -> None:
        whole = [p.grad for p in self.model.parameters() if not isinstance(p, DTensor) and p.grad is not None]
        if whole:
            flat = torch.cat([gradient.flatten() for gradient in whole])
            gathered = [torch.empty_like(flat) for _ in range(self.runtime.world)]
            dist.all_gather(gathered, flat)
            for gradient, mean in zip(whole, torch.stack(gathered).mean(0).split([g.numel() for g in whole]), strict=True):
                gradient.copy_(mean.view_as(gradient))


@neighbour
class MakesItsScalerAnew(Reference):
    """Builds another gradient scaler that starts at the saved scale, instead of loading one."""

    def load_scaler(self, path: Path) -> None:
        if self.scaler is not None:
            saved = read_progress(path)["scaler"]
            self.scaler = ShardedScaler(self.runtime, growth_interval=saved["growth_interval"])
            self.scaler._init_scale, self.scaler._init_growth_tracker = saved["scale"], saved["_growth_tracker"]
