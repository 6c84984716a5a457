"""Plain torch: a parameter group without parameters comes back without its settings, and the next step raises KeyError.

    python tests/confirmed/torch_dcp_loses_an_empty_groups_settings.py

Seen with torch 2.13.0 by resume.param-groups. Exit status 1 where it is still so.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def build():
    model = torch.nn.Linear(2, 2)
    return model, torch.optim.AdamW([{"params": [model.weight]}, {"params": []}, {"params": [model.bias]}], lr=0.1)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer = build()
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as directory:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=directory)
    model, optimizer = build()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=directory)
set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
print("settings of the empty group:", sorted(optimizer.param_groups[1]))
dist.destroy_process_group()
sys.exit("betas" not in optimizer.param_groups[1])
