"""A gradient scaler for sharded gradients: what overflows on one rank is an overflow on all."""

from __future__ import annotations

import torch
import torch.distributed as dist

from reference_impl.runtime import Runtime


class ShardedScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` over each rank's shards. ``state_dict`` (scale and growth tracker) is the same on every rank."""

    def __init__(self, runtime: Runtime, *, growth_interval: int) -> None:
        super().__init__(runtime.device.type, growth_interval=growth_interval)
        self.runtime = runtime

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        # torch's own hands DTensors and plain tensors to one kernel, and asks no other rank.
        for group in optimizer.param_groups:
            for gradient in (parameter.grad for parameter in group["params"] if parameter.grad is not None):
                local = getattr(gradient, "_local_tensor", gradient)
                torch._amp_foreach_non_finite_check_and_unscale_([local], found_inf, inv_scale)
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}
