"""Plain torch: a checkpoint of a model with a parameter that never got a gradient cannot be loaded (pytorch#192202).

    python tests/confirmed/torch_dcp_cannot_resume_unused_parameters.py

Seen with torch 2.13.0 by resume.frozen-and-unused. Exit status 1 where it is still so.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict


def build():
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 2), "unused": torch.nn.Linear(2, 2)})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model, optimizer = build()
model["used"](torch.ones(1, 2)).sum().backward()
optimizer.step()
with tempfile.TemporaryDirectory() as directory:
    dcp.save(dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=directory)
    fresh = dict(zip(("model", "optimizer"), get_state_dict(*build()), strict=True))  # the hidden step makes state for all
    try:
        dcp.load(fresh, checkpoint_id=directory)
    except CheckpointException as error:  # no subclass of Exception
        print(str(error).strip().splitlines()[-1])
        sys.exit(1)
    finally:
        dist.destroy_process_group()
print("loaded")
