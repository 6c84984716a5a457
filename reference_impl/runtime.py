"""This process among its peers: rank, world, device, and agreement between ranks.

Every function here that talks is entered by every rank. Work that one rank does for all goes through :func:`on_rank_zero`,
so that no collective ever sits behind an ``if rank == 0`` and a failure on one rank is the same error on all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from reference_impl.errors import PeerError

# DCP's own error is no Exception but a BaseException: `except Exception` lets a failed write through.
T = TypeVar("T")


@dataclass(frozen=True)
class Runtime:
    """Who this process is. ``control`` is a gloo group for decisions, ``writers`` one that only background saves use."""

    rank: int
    world: int
    device: torch.device
    control: dist.ProcessGroup
    writers: dist.ProcessGroup
    owns_process_group: bool


def connect(device: str | torch.device = "auto") -> Runtime:
    """Join the process group: the caller's if there is one, else torchrun's, else a world of one.

    Opens gloo for the CPU and, on CUDA, NCCL beside it. Raises ``RuntimeError`` when CUDA is asked for and absent.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if str(device) == "auto" else device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise RuntimeError("device=cuda, but torch sees no CUDA device here; set device=cpu")
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    owns = not dist.is_initialized()
    if owns:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    # DCP's background process finds its peers by this name; the host's own may not resolve.
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    return Runtime(
        rank=dist.get_rank(),
        world=dist.get_world_size(),
        device=device,
        control=dist.new_group(backend="gloo"),
        writers=dist.new_group(backend="gloo"),
        owns_process_group=owns,
    )


def disconnect(runtime: Runtime) -> None:
    """Leave the process group if :func:`connect` opened it; a caller's own group stays."""
    if runtime.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()


def everywhere(runtime: Runtime, what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on every rank and return its own result; if it raised anywhere, raise :class:`PeerError` on all."""
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = work()
    except (Exception, CheckpointException) as error:
        failure = error
    said = None if failure is None else f"{type(failure).__name__}: {failure}"
    heard: list[str | None] = [None] * runtime.world
    dist.all_gather_object(heard, said, group=runtime.control)
    told = [f"rank {rank}: {text}" for rank, text in enumerate(heard) if text is not None]
    if told:
        raise PeerError(f"{what} failed on {len(told)} of {runtime.world} ranks\n  " + "\n  ".join(told)) from failure
    return result  # type: ignore[return-value]


def on_rank_zero(runtime: Runtime, what: str, work: Callable[[], T]) -> T:
    """Run ``work`` on rank 0 alone and give its result, or its failure, to every rank. Returns after rank 0 is done."""
    answer: list[tuple[T | None, str | None]] = [(None, None)]
    failure: BaseException | None = None
    if runtime.rank == 0:
        try:
            answer = [(work(), None)]
        except (Exception, CheckpointException) as error:
            failure = error
            answer = [(None, f"{type(error).__name__}: {error}")]
    dist.broadcast_object_list(answer, src=0, group=runtime.control, device=torch.device("cpu"))
    result, said = answer[0]
    if said is not None:
        raise PeerError(f"{what} failed on rank 0: {said}") from failure
    return result  # type: ignore[return-value]


def all_true(runtime: Runtime, here: bool) -> bool:
    """Whether ``here`` is true on every rank."""
    return not most(runtime, int(not here))


def most(runtime: Runtime, here: int) -> int:
    """The largest ``here`` of all ranks."""
    largest = torch.tensor([here])
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=runtime.control)
    return int(largest.item())


def global_mean(runtime: Runtime, value: float) -> float:
    """The mean of a float over ranks, summed in float64."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=runtime.control)
    return total.item() / runtime.world
