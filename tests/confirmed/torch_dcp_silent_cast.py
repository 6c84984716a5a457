"""torch: a float32 checkpoint loads into bfloat16 parameters and moments without a word.

`fsdp-contracts run torch_dcp --contracts precision.no-silent-cast` says the same of a resume.
Needs torch alone: python tests/confirmed/torch_dcp_silent_cast.py
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def build(dtype: torch.dtype) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


with tempfile.TemporaryDirectory() as directory:
    model, optimizer = build(torch.float32)
    model(torch.rand(1, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state}, checkpoint_id=directory, no_dist=True)

    other, its_optimizer = build(torch.bfloat16)
    parameters, state = get_state_dict(other, its_optimizer)
    dcp.load({"model": parameters, "optimizer": state}, checkpoint_id=directory, no_dist=True)
    set_state_dict(other, its_optimizer, model_state_dict=parameters, optim_state_dict=state)

saved, loaded = optimizer.state[model.weight]["exp_avg"], its_optimizer.state[other.weight]["exp_avg"]
print(f"weight: saved {model.weight.dtype}, loaded {other.weight.dtype}, no error")
print(f"exp_avg: saved {saved.dtype}, loaded {loaded.dtype}, largest loss {(saved - loaded.float()).abs().max():.2e}")
assert loaded.dtype == torch.bfloat16
