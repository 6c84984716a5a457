"""Leases on cores and GPUs: file locks, disjoint across xdist workers and across processes of one machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0))


def gpus() -> int:
    """GPUs torch can see, without making a CUDA context."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.device_count()


def whole_worlds(device: str = "cpu", ranks: int = 2) -> int:
    """How many worlds of `ranks` fit on this machine at once; at least one."""
    return max(1, (gpus() if device == "cuda" else cores()) // ranks)


@contextlib.contextmanager
def lease(
    device: str, ranks: int, *, timeout: float = 600.0, waiting: Callable[[str], None] = lambda text: None
) -> Iterator[list[int]]:
    """Hold one slot per rank and yield their numbers; a CPU world larger than the machine holds every core.

    `waiting` is called with a line of text while others hold them.

    Raises:
        LookupError: more ranks than GPUs.
        TimeoutError: others held the slots for `timeout` seconds.
    """
    have = gpus() if device == "cuda" else cores()
    if device == "cuda" and ranks > have:
        raise LookupError(f"{ranks} NCCL ranks need {ranks} GPUs; this machine has {have}")
    directory = Path(tempfile.gettempdir()) / f"fsdp-contracts-{os.getuid()}"
    directory.mkdir(mode=0o700, exist_ok=True)
    wanted, end = min(ranks, have), time.monotonic() + timeout
    unit = "GPUs" if device == "cuda" else "cores"
    held: dict[int, int] = {}
    try:
        # One taker at a time: two that each hold half of what they need would wait for each other.
        turn = os.open(directory / "turn", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            _lock(
                turn,
                end,
                f"the turn to take {wanted} {device} slots",
                lambda: waiting(f"waiting for {wanted} {unit} that others use"),
            )
            while len(held) < wanted:
                for slot in range(have):
                    if slot not in held and len(held) < wanted:
                        descriptor = os.open(directory / f"{device}-{slot}", os.O_CREAT | os.O_RDWR, 0o600)
                        try:
                            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                            held[slot] = descriptor
                        except BlockingIOError:
                            os.close(descriptor)
                if len(held) < wanted:
                    if time.monotonic() > end:
                        raise TimeoutError(f"{len(held)} of {wanted} {device} slots came free in {timeout:.0f} s ({directory})")
                    waiting(f"waiting for {wanted} {unit} that others use, {len(held)} came free")
                    time.sleep(0.01)
        finally:
            os.close(turn)
        yield sorted(held)
    finally:
        for descriptor in held.values():
            os.close(descriptor)


@contextlib.contextmanager
def exclusive(path: Path, *, timeout: float = 1800.0) -> Iterator[None]:
    """Hold `path` as a lock between processes; a lock ends with the process that holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(descriptor, time.monotonic() + timeout, str(path))
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, end: float, what: str, waiting: Callable[[], None] = lambda: None) -> None:
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise TimeoutError(f"another process holds {what}") from None
            waiting()
            time.sleep(0.01)
