"""AdamW that keeps float32 master weights and moments beside parameters of a smaller dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch.optim.adamw import adamw

MASTER = "master"
"""The key of a parameter's master weights in ``optimizer.state``."""


class MasterAdamW(torch.optim.Optimizer):
    """AdamW in float32, whatever the parameters are: after each step a parameter is its master, rounded.

    ``state[parameter]`` holds ``step`` (float32), ``exp_avg``, ``exp_avg_sq``, with ``amsgrad`` ``max_exp_avg_sq``, and
    ``master``, all but the first sharded as the parameter. Masters begin as the parameters' values at the first step, and
    afterwards only :meth:`load_state_dict` sets them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. Communicates nothing: each rank updates its shards."""
        assert closure is None, "a closure would need gradients that FSDP has reduced already"
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not trained:
                continue
            for parameter in trained:
                if not self.state[parameter]:
                    self.state[parameter] = self.first_state(parameter, amsgrad=group["amsgrad"])
            states = [self.state[parameter] for parameter in trained]
            masters = [_local(state[MASTER]) for state in states]
            adamw(
                masters,
                [_local(parameter.grad).float() for parameter in trained],
                [_local(state["exp_avg"]) for state in states],
                [_local(state["exp_avg_sq"]) for state in states],
                [_local(state["max_exp_avg_sq"]) for state in states if group["amsgrad"]],
                [state["step"] for state in states],
                foreach=False,
                amsgrad=group["amsgrad"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )
            for parameter, master in zip(trained, masters, strict=True):
                _local(parameter).copy_(master)

    def first_state(self, parameter: torch.Tensor, *, amsgrad: bool = False) -> dict[str, torch.Tensor]:
        """The state of a parameter that has never been updated."""
        master = parameter.detach().to(torch.float32, copy=True)
        moments = ("exp_avg", "exp_avg_sq", *("max_exp_avg_sq",) * amsgrad)
        zeros = {moment: torch.zeros_like(master) for moment in moments}
        return {"step": torch.zeros((), dtype=torch.float32), **zeros, MASTER: master}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take groups and state as they are. ``Optimizer.load_state_dict`` would cast state to its parameter's dtype."""
        super().load_state_dict({**state_dict, "state": {}})
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, parameter in zip(numbers, parameters, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                device = value.device if key == "step" else parameter.device
                self.state[parameter][key] = value.to(device, copy=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a DTensor, sharing its storage; a plain tensor is its own piece."""
    return getattr(tensor, "_local_tensor", tensor)
