"""Plain torch: a save into a directory that an interrupted save has left keeps the old shards beside its own.

    python tests/confirmed/torch_dcp_keeps_what_was_left.py

Two ranks save and end before the rename; one rank saves the same step again, and renames a checkpoint of two saves. Seen with
torch 2.13.0 by crash.stale-leftovers. Exit status 1 where it is still so.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def save(rank, ranks, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store-{ranks}", rank=rank, world_size=ranks)
    x = distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (ranks,)), [Shard(0)])
    dcp.save({"x": x}, checkpoint_id=f"{directory}/tmp_step_1")
    dist.destroy_process_group()


with tempfile.TemporaryDirectory() as directory:
    for ranks in (2, 1):
        torch.multiprocessing.start_processes(save, (ranks, directory), nprocs=ranks, start_method="fork")
        files = sorted(os.listdir(f"{directory}/tmp_step_1"))
        print(f"after the save of {ranks} ranks:", files)
sys.exit("__1_0.distcp" in files)
