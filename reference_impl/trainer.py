"""The fine-tune, as small steps in the order that keeps values.

trainer = Trainer(config)
trainer.build()
trainer.resume()
while trainer.step < config.steps:
    report = trainer.train_step()
trainer.save(final=True)
trainer.close()
"""

from __future__ import annotations

import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from reference_impl import model as models
from reference_impl import runtime as runtimes
from reference_impl import state
from reference_impl.batches import Batches, Tokenization
from reference_impl.checkpoint import SHARDS, Checkpointer
from reference_impl.config import Config, ConfigError
from reference_impl.data import load_split
from reference_impl.loss import listwise_loss
from reference_impl.optim import build_optimizer, build_scheduler
from reference_impl.optional_optimizers import make_room
from reference_impl.retention import ABOUT, Retention
from reference_impl.rng import capture_streams, restore_streams, seed_streams
from reference_impl.scaler import ShardedScaler

PROGRESS = "progress.json"
"""Counters, scheduler, optimizer groups and data position: everything small that is equal on all ranks."""


class Trainer:
    """One rank's part of the run. Every public method is entered by every rank.

    ``model`` (FSDP2-sharded), ``optimizer``, ``scheduler``, ``tokenizer``, ``batches`` exist after :meth:`build`;
    ``step`` counts the optimizer steps that are done; ``metrics`` is what the model was measured at since the last one;
    ``resumed_from`` is the checkpoint that :meth:`resume` took.
    """

    checkpointer_class: type[Checkpointer] = Checkpointer

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: ShardedScaler | None
    tokenizer: Any
    tokenization: Tokenization
    batches: Batches

    def __init__(self, config: Config, *, device: str | torch.device | None = None) -> None:
        self.config = config
        self.runtime = runtimes.connect(device or config.device)
        self.parameter_dtype: torch.dtype = getattr(torch, config.parameters)
        self.moment_dtype: torch.dtype = getattr(torch, config.moments)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.resumed_from: Path | None = None
        self.checkpointer = self.make_checkpointer()

    # Building.

    def build(self) -> None:
        """Make everything a run needs, at step 0. The same on every rank but for the random streams."""
        self.directory = models.resolve_model(self.config.model)
        self.tokenizer = models.load_tokenizer(self.directory)
        self.tokenization = Tokenization.declared(self.config, self.tokenizer)
        model = self.build_model()
        models.freeze(model, self.config.frozen)
        self.model = self.shard(model)
        self.cast_parameters()
        self.optimizer = self.build_optimizer()
        self.scheduler = self.build_scheduler()
        self.scaler = self.build_scaler()
        self.batches = self.build_data()
        seed_streams("rank", self.config.seed, self.runtime.rank)

    def build_model(self) -> nn.Module:
        """The whole, unsharded model in the dtype its directory publishes; its new head is drawn from the seed."""
        model = models.empty_model(self.directory, self.tokenizer, seed=self.config.seed)
        models.load_pretrained(model, self.directory)
        return model

    def shard(self, model: nn.Module) -> nn.Module:
        """``model`` on this rank's device, sharded over all ranks."""
        return models.shard_model(model.to(self.runtime.device), self.mesh(), self.config)

    def mesh(self) -> DeviceMesh:
        """One dimension over all ranks; with ``replicas``, (replicate, shard)."""
        world, replicas = self.runtime.world, self.config.replicas
        if replicas == 1:
            return init_device_mesh(self.runtime.device.type, (world,), mesh_dim_names=("shard",))
        if world % replicas:
            raise ConfigError(f"replicas={replicas} does not divide the {world} ranks of this world")
        return init_device_mesh(self.runtime.device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))

    def build_optimizer(self) -> torch.optim.Optimizer:
        return build_optimizer(self.model, self.config)

    def build_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        return build_scheduler(self.optimizer, self.config)

    def build_scaler(self) -> ShardedScaler | None:
        config = self.config
        return ShardedScaler(self.runtime, growth_interval=config.scaler_growth_steps) if config.gradient_scaler else None

    def build_data(self) -> Batches:
        return Batches(load_split(self.config), self.tokenizer, self.tokenization, self.config)

    def make_checkpointer(self) -> Checkpointer:
        config = self.config
        keep = Retention(config.keep_checkpoints, config.keep_best, config.best_metric, config.best_mode)
        return self.checkpointer_class(config.output_dir, self.runtime, mode=config.save_mode, keep=keep)

    # Training.

    def train_step(self) -> dict[str, Any]:
        """One optimizer step over ``accumulation_steps`` micro-batches.

        Returns ``loss`` (mean over all queries of all ranks), ``lr`` (used in this step), ``grad_norm`` (global, before
        clipping), ``samples`` and ``positions`` (ids, and places in the run, that this rank consumed), ``consumed`` and
        ``epoch`` (of all ranks, after it), ``seconds``.
        """
        started = time.perf_counter()
        self.model.train()
        micro_batches = self.batches.take_step(self.runtime.rank, self.runtime.world)
        total = 0.0
        for number, batch in enumerate(micro_batches, start=1):
            self.model.set_requires_gradient_sync(number == len(micro_batches))
            scores = self.scores(batch.inputs).view(len(batch.samples), -1)
            loss = listwise_loss(scores, temperature=self.config.temperature) / len(micro_batches)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total += loss.item()
        self.average_whole_gradients()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        grad_norm = self.clip_gradients()
        rate = float(self.scheduler.get_last_lr()[0])
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.scheduler.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.metrics = {"loss": runtimes.global_mean(self.runtime, total)}
        return {
            **self.metrics,
            "lr": rate,
            "grad_norm": grad_norm,
            "samples": [sample for batch in micro_batches for sample in batch.samples],
            "positions": [position for batch in micro_batches for position in batch.positions],
            "consumed": self.batches.consumed,
            "epoch": self.batches.epoch,
            "seconds": time.perf_counter() - started,
        }

    def scores(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """One score per text: ``inputs`` of shape (texts, tokens) to a tensor of shape (texts,)."""
        return self.model(**{name: tensor.to(self.runtime.device) for name, tensor in inputs.items()}).logits.squeeze(-1)

    def average_whole_gradients(self) -> None:
        """Average over all ranks the gradients of parameters that FSDP leaves whole: it reduces none but its own."""
        for parameter in self.model.parameters():
            if not isinstance(parameter, DTensor) and parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(self.runtime.world)

    def clip_gradients(self) -> float:
        """The global gradient norm over all ranks; scales gradients down to ``max_grad_norm`` if that is not 0."""
        limit = self.config.max_grad_norm or float("inf")
        sharded = [p for p in self.model.parameters() if isinstance(p, DTensor)]
        whole = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        norms = [nn.utils.get_total_norm([p.grad for p in its if p.grad is not None]) for its in (sharded, whole)]
        norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm.to(self.runtime.device) for norm in norms]
        norm = nn.utils.get_total_norm(norms) if whole else norms[0]
        for its in (sharded, whole):
            nn.utils.clip_grads_with_norm_(its, limit, norm)
        return float(norm)

    # Saving.

    def save(self, *, final: bool = False) -> None:
        """Checkpoint this step. ``final`` also publishes it before returning: no later call would."""
        self.checkpointer.save(self.step, self.checkpoint_tensors(), partial(self.write_companions, final=final))
        if final:
            self.finalize()

    def finalize(self) -> None:
        """Complete a save in flight and publish it; a no-op otherwise."""
        self.checkpointer.finalize()

    def checkpoint_tensors(self) -> state.Tensors:
        """Everything that DCP saves, by its flat name; live tensors, not copies, but for the random streams."""
        return {
            **state.model_tensors(self.model),
            **state.optimizer_tensors(self.model, self.optimizer),
            f"rng.rank_{self.runtime.rank}": capture_streams(self.runtime.device),
        }

    def write_companions(self, directory: Path, *, final: bool) -> None:
        """The replicated files: tokenizer, model configuration, and what a resume or an evaluation must know."""
        self.tokenizer.save_pretrained(directory / "tokenizer")
        self.model.config.save_pretrained(directory)
        _write_json(directory / "run.json", self.config.to_dict())
        _write_json(directory / "tokenization.json", self.tokenization.to_dict())
        _write_json(directory / PROGRESS, self.progress())
        _write_json(directory / ABOUT, {"step": self.step, "final": final, "metrics": self.measured()})

    def measured(self) -> dict[str, float]:
        """What the checkpoint of this step may be ranked by, the same on every rank."""
        return self.metrics

    def progress(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "world": self.runtime.world,
            "data": self.batches.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "scaler": self.scaler and self.scaler.state_dict(),
            "optimizer_groups": state.optimizer_groups(self.model, self.optimizer),
            **self.precision_policy(),
        }

    def precision_policy(self) -> dict[str, str]:
        config = self.config
        return {"parameter_dtype": config.parameters, "moment_dtype": config.moments, "master_dtype": config.masters}

    # Resuming.

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint; False when there is none.

        The order matters. Optimizer state takes the dtype of the parameters it is loaded against, so these come first and
        final; the scheduler sets rates in the optimizer's groups; random streams come last, after all that might draw.
        """
        self.resumed_from = path = self.checkpointer.latest()
        if path is None:
            return False
        self.refuse_other_precision(path)
        self.load_model(path)
        self.cast_parameters()
        self.load_optimizer(path)
        self.load_scheduler(path)
        self.load_scaler(path)
        self.load_progress(path)
        self.check_moments(path)
        return True

    def refuse_other_precision(self, path: Path) -> None:
        """Raise unless the checkpoint's precision policy is this run's; before anything of this run has changed."""
        state.refuse_other_policy(path, saved=read_progress(path), declared=self.precision_policy())

    def load_model(self, path: Path) -> None:
        state.load_model_tensors(self.model, path / SHARDS, dtype=self.parameter_dtype, group=self.runtime.control)

    def cast_parameters(self) -> None:
        """Every floating parameter to the declared dtype, in place."""
        models.cast_parameters(self.model, self.parameter_dtype)

    def load_optimizer(self, path: Path) -> None:
        if self.config.optimizer == "torchao_adamw8bit":
            make_room(self.optimizer)
        state.load_optimizer_tensors(
            self.model,
            self.optimizer,
            path / SHARDS,
            groups=read_progress(path)["optimizer_groups"],
            moment_dtype=self.moment_dtype,
            group=self.runtime.control,
        )

    def load_scheduler(self, path: Path) -> None:
        self.scheduler.load_state_dict(read_progress(path)["scheduler"])

    def load_scaler(self, path: Path) -> None:
        saved = read_progress(path).get("scaler")
        there, here = saved is not None, self.scaler is not None
        if there != here:
            raise ConfigError(f"{path} was saved with gradient_scaler={there}, this run says gradient_scaler={here}")
        if self.scaler is not None:
            self.scaler.load_state_dict(saved)

    def load_progress(self, path: Path) -> None:
        """Counters, data position and this rank's random streams."""
        progress = read_progress(path)
        self.refuse_other_tokenization(path)
        self.batches.load_state_dict(progress["data"])
        self.step = progress["step"]
        self.load_streams(path)

    def load_streams(self, path: Path) -> None:
        """This rank's random streams; a rank that is new since the save starts its own."""
        streams = state.load_streams(path / SHARDS, group=self.runtime.control)
        if self.runtime.rank < len(streams):
            restore_streams(streams[self.runtime.rank], self.runtime.device)
        else:
            seed_streams("new rank", self.config.seed, self.step, self.runtime.world, self.runtime.rank)

    def check_moments(self, path: Path) -> None:
        """Raise unless the checkpoint's own metadata says that every Adam moment is of the declared dtype."""
        saved = state.read_metadata(path / SHARDS).state_dict_metadata
        moments = state.refuse_other_moments(path / SHARDS, saved, self.moment_dtype)
        if self.step > 0 and moments == 0:
            raise state.StateMismatch(f"{path} is of step {self.step} but holds no optimizer moment")

    def refuse_other_tokenization(self, path: Path) -> None:
        saved, here = json.loads((path / "tokenization.json").read_text()), self.tokenization.to_dict()
        for name, value in here.items():
            if saved.get(name) != value:
                raise ConfigError(f"{path} was trained with {name}={saved.get(name)!r}, this run says {value!r}")

    def close(self) -> None:
        """Publish what is in flight, end the writer process, and leave the process group if this trainer opened it."""
        self.checkpointer.close()
        runtimes.disconnect(self.runtime)


def read_progress(path: Path) -> dict[str, Any]:
    return json.loads((path / PROGRESS).read_text())


def _write_json(path: Path, value: Any) -> None:
    # A rate may be a tensor, where a compiled optimizer reads it.
    path.write_text(json.dumps(value, indent=1, default=lambda tensor: tensor.item()))
