"""AdamW with weight-decay groups, and a warm-up then decay schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from reference_impl.config import Config
from reference_impl.masters import MasterAdamW
from reference_impl.optional_optimizers import build_optional


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW in groups: matrices decay; biases, norms and other vectors do not. What FSDP leaves whole has groups of its own,
    for no kernel takes it together with shards.

    Frozen parameters are in them too, and have no state as they get no gradient: what is frozen may change between a save
    and a resume, and the groups do not.

    Fused over the parameters themselves, or :class:`~reference_impl.masters.MasterAdamW` where masters are declared; or what
    ``config.optimizer`` names, see :mod:`reference_impl.optional_optimizers`.
    """
    parameters = list(model.parameters())
    sharded = [p for p in parameters if isinstance(p, DTensor)]
    groups = [
        {"params": [p for p in its if (p.ndim >= 2) == decays], "weight_decay": config.weight_decay if decays else 0.0}
        for its in (sharded, [p for p in parameters if not isinstance(p, DTensor)])
        for decays in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    shared = {"lr": config.learning_rate, "betas": betas, "eps": config.epsilon, "amsgrad": config.amsgrad}
    if config.optimizer != "adamw":
        return build_optional(groups, shared, config, parameters[0].device)
    if config.masters != "none":
        return MasterAdamW(groups, **shared)
    # The fused kernel would take a scaler's flag together with shards, which it cannot.
    return torch.optim.AdamW(groups, **shared, fused=not config.gradient_scaler)


def build_scheduler(optimizer: torch.optim.Optimizer, config: Config) -> torch.optim.lr_scheduler.LambdaLR:
    """One rate per optimizer step: :func:`rate_factor` times the peak."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, config))


def rate_factor(step: int, config: Config) -> float:
    """The part of the peak rate used in optimizer step ``step`` (0 is the first), 0 to 1.

    Rises linearly so that step ``warmup_steps`` has the peak, then decays to ``min_rate_ratio`` at step ``steps``.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    span = max(1, config.steps - config.warmup_steps)
    done = min(1.0, (step - config.warmup_steps) / span)
    left = 1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_rate_ratio + (1.0 - config.min_rate_ratio) * left
