"""Each rank's random streams as one tensor that a checkpoint can hold."""

from __future__ import annotations

import hashlib
import json
import random

import numpy
import torch


def seed_streams(*parts: object) -> None:
    """Start Python's, NumPy's and torch's streams from a digest of ``parts``, such as (seed, rank)."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    random.seed(digest)
    numpy.random.seed(int.from_bytes(digest[:4], "big"))
    torch.manual_seed(int.from_bytes(digest[:7], "big"))  # Seeds every CUDA device too.


def capture_streams(device: torch.device) -> torch.Tensor:
    """The state of this process's streams: a 1-d uint8 CPU tensor (JSON, some 20 kB)."""
    version, python, gauss = random.getstate()
    name, keys, *rest = numpy.random.get_state()
    state = {
        "python": [version, list(python), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": bytes(torch.get_rng_state().tolist()).hex(),
    }
    if device.type == "cuda":
        state["cuda"] = bytes(torch.cuda.get_rng_state(device).tolist()).hex()
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def restore_streams(captured: torch.Tensor, device: torch.device) -> None:
    """Continue the streams of :func:`capture_streams`. A stream captured without CUDA leaves CUDA's as it is."""
    state = json.loads(bytes(captured.tolist()))
    version, python, gauss = state["python"]
    random.setstate((version, tuple(python), gauss))
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
    torch.set_rng_state(_bytes(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_bytes(state["cuda"]), device)


def _bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
