"""Optimizers of other packages, used where they can be imported and refused by name where they cannot. None is a dependency."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference_impl.config import Config, ConfigError


@dataclass(frozen=True)
class Source:
    """Where an optimizer comes from, and what it cannot do."""

    module: str
    name: str
    install: str
    needs_cuda: bool = False
    amsgrad: bool = False
    masters: bool = False


SOURCES = {
    # It would keep quantized moments and masters by itself; here it keeps what is declared.
    "flashoptim": Source("flashoptim", "FlashAdamW", "pip install flashoptim triton"),
    "torchao_adamw8bit": Source("torchao.optim", "AdamW8bit", "pip install torchao", amsgrad=True),
    "te_fused_adam": Source(
        "transformer_engine.pytorch.optimizers",
        "FusedAdam",
        "pip install transformer_engine[pytorch]",
        needs_cuda=True,
        masters=True,
    ),
}


def build_optional(
    groups: list[dict[str, Any]], shared: dict[str, Any], config: Config, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that ``config.optimizer`` names, over ``groups``.

    Raises :class:`ConfigError`, which says why and what to do, where it cannot be had on this machine or as configured.
    """
    make = find(config, device)
    own: dict[str, Any] = {}
    if config.optimizer == "flashoptim":
        own = {"quantize": False, "master_weight_bits": None, "fused": device.type == "cuda"}
    elif config.optimizer == "te_fused_adam":
        own = {"adam_w_mode": True, "master_weights": config.masters != "none"}
    elif config.optimizer == "torchao_adamw8bit":
        import torch._inductor.config

        # Its step is compiled, and the cache takes a kernel for 13 rows for one for 12: a rank got another rank's.
        torch._inductor.config.force_disable_caches = True
    options = shared if SOURCES[config.optimizer].amsgrad else {key: value for key, value in shared.items() if key != "amsgrad"}
    return make(groups, **options, **own)


def find(config: Config, device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    """The class that ``config.optimizer`` names, once it is known that it can do what is declared here."""
    source = SOURCES[config.optimizer]
    refused = f"optimizer={config.optimizer} ({source.module}.{source.name})"
    if config.amsgrad and not source.amsgrad:
        raise ConfigError(f"{refused} has no amsgrad; set amsgrad=false, or optimizer=adamw")
    if config.masters != "none" and not source.masters:
        raise ConfigError(
            f"{refused} keeps no {config.masters} masters that a checkpoint could hold; set optimizer=adamw for these"
        )
    if source.needs_cuda and device.type != "cuda":
        raise ConfigError(f"{refused} is a CUDA kernel, and the model is on {device}; run on a GPU, or set optimizer=adamw")
    try:
        return getattr(importlib.import_module(source.module), source.name)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(f"{refused} cannot be imported: {error}; {source.install}, or set optimizer=adamw") from error


def make_room(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter the state of a step of rate 0 without a gradient, which a load then fills in place.

    Only for optimizers whose moments are of a tensor class of their own, which none but they can make.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    pending = [parameter.grad for parameter in parameters]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter, gradient in zip(parameters, pending, strict=True):
        parameter.grad = gradient
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)


def set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate
