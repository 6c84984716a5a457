"""The reference under contract: the one file of this package that knows of `contracts`."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from contracts.case import Case
from contracts.implementation import Capability, Implementation, Layout, Place
from contracts.published_names import PublishedNames
from reference_impl import model as models
from reference_impl.config import Config
from reference_impl.keys import KeyMapping, rules_for
from reference_impl.trainer import Trainer


class Reference(Trainer, Implementation):
    """The exemplary stack: a reranker fine-tuned with FSDP2, checkpointed with DCP."""

    capabilities = {
        Capability.TRAIN,
        Capability.RESUME,
        Capability.SCHEDULER,
        Capability.ASYNC_THREAD,
        Capability.ASYNC_PROCESS,
        Capability.PUBLISH,
        Capability.COMPANIONS,
        Capability.RETENTION,
        Capability.BEST,
        Capability.INTEGRITY,
        Capability.KEY_MAPPING,
        Capability.RESHARD,
        Capability.HYBRID_SHARDING,
        Capability.RANDOM_STREAMS,
        Capability.SAMPLES,
        Capability.BFLOAT16_POLICY,
        Capability.MASTER_WEIGHTS,
        Capability.DECLARED_DTYPES,
        Capability.WRAPPERS,
        Capability.WHOLE_PARAMETERS,
        Capability.SCALER,
    }
    layout = Layout(
        companions=(
            *("tokenizer.json", "tokenizer_config.json", "config.json"),
            *("run.json", "tokenization.json", "progress.json", "save.json"),
        ),
        pointer="latest",
        best="best",
    )

    def __init__(self, case: Case, place: Place) -> None:
        Implementation.__init__(self, case, place)
        Trainer.__init__(self, configure(case, place), device=place.device)

    def measured(self) -> dict[str, float]:
        return super().measured() if self.metric is None else {self.config.best_metric: self.metric}

    def build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer()
        if self.case.optimizer.empty_group:
            optimizer.param_groups.insert(1, {**optimizer.param_groups[-1], "params": []})
        return optimizer

    def key_mapping(self, published: PublishedNames) -> Mapping | None:
        return Mapping(published) if published.config.get("model_type") in ("bert", "llama") else None


class Mapping:
    """The reference's rules for one published list; a `contracts.implementation.KeyMapping`.

    Attributes:
        targets: names of the scorer's parameters and persistent buffers that the checkpoint has to fill.
    """

    def __init__(self, published: PublishedNames) -> None:
        from transformers import AutoConfig, AutoModelForSequenceClassification

        values = {key: value for key, value in published.config.items() if key != "model_type"}
        config = AutoConfig.for_model(published.config["model_type"], **values | {"num_labels": 1})
        with torch.device("meta"):
            model: nn.Module = AutoModelForSequenceClassification.from_config(config)
        prefix = model.base_model_prefix
        heads = [name for name, _ in model.named_children() if name != prefix]
        self.rules: KeyMapping = rules_for(published.names, base_prefix=prefix, heads=heads)
        fresh = (*models.FRESH_NAMES, *(rf"^{name}\." for name in heads))
        self.own = set(model.state_dict())
        # A name that may start fresh is still filled where the checkpoint has it.
        filled = {self.rules.map(name) for name in published.names}
        self.targets = [n for n in self.own if n in filled or not any(re.search(f, n) for f in fresh)]

    def map(self, name: str) -> str | None:
        target = self.rules.map(name)
        ignored = target not in self.own and any(re.search(pattern, name) for pattern in models.IGNORED_NAMES)
        return None if ignored else target


def configure(case: Case, place: Place) -> Config:
    """The reference's configuration for a case at a place."""
    return Config(**_options(case, place))


def _options(case: Case, place: Place) -> dict[str, Any]:
    optimizer, precision = case.optimizer, case.precision
    if case.data.global_batch % (place.ranks * optimizer.accumulation):
        raise ValueError(
            f"a global batch of {case.data.global_batch} queries does not divide over {place.ranks} ranks that accumulate "
            f"{optimizer.accumulation} micro-batches"
        )
    return {
        "model": str(place.model),
        "data": str(place.records),
        "eval_fraction": 0.0,
        "output_dir": str(place.root),
        "seed": case.seed,
        "device": place.device,
        "max_length": 16,
        "train_n_passages": case.data.passages,
        "hard_negatives": case.data.passages - 1,
        "steps": optimizer.total_steps,
        "batch_size": case.data.global_batch // place.ranks // optimizer.accumulation,
        "accumulation_steps": optimizer.accumulation,
        "learning_rate": optimizer.lr,
        "schedule": "linear",
        "warmup_steps": optimizer.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "amsgrad": optimizer.amsgrad,
        "parameter_dtype": precision.parameters,
        "moment_dtype": precision.moments,
        "master_dtype": precision.masters,
        "compute_dtype": precision.compute,
        "reduce_dtype": precision.reduce,
        "frozen": case.model.frozen,
        "ignored_params": "^gain$" if case.model.scalar else "",
        "activation_checkpointing": "recompute" in place.wrapped,
        "compile": "eager" if "compile" in place.wrapped else "none",
        "gradient_scaler": optimizer.scaler,
        "scaler_growth_steps": 2,
        "replicas": place.mesh[0] if place.mesh else 1,
        "checkpoint_every_steps": 0,
        "save_mode": case.checkpoint.mode,
        "keep_checkpoints": case.checkpoint.keep_latest or 1_000_000,
        "keep_best": case.checkpoint.keep_best,
        "best_metric": "loss" if case.checkpoint.best_mode == "min" else "mrr@10",
        "best_mode": case.checkpoint.best_mode,
        "progress": False,
        "plot": False,
    }
