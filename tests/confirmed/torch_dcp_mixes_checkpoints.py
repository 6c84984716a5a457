"""Plain torch: ranks that name different checkpoints load a mixture of both, without a word.

    python tests/confirmed/torch_dcp_mixes_checkpoints.py

Each rank that looks for the newest checkpoint itself may find another one, and `dcp.load` does not compare what it is told.
Seen with torch 2.13.0 by writers.no-local-view-branching. Exit status 1 where it is still so.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def work(rank, directory):
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for step in (1, 2):
        saved = distribute_tensor(torch.full((4,), float(step)), mesh, [Shard(0)])
        dcp.save({"x": saved}, checkpoint_id=f"{directory}/step_{step}")
    loaded = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
    dcp.load({"x": loaded}, checkpoint_id=f"{directory}/step_{2 - rank}")
    whole = loaded.full_tensor().tolist()
    if rank == 0:
        print("rank 0 loads step 2, rank 1 step 1, and x is", whole)
    dist.destroy_process_group()
    assert len(set(whole)) == 1


with tempfile.TemporaryDirectory() as directory:
    try:
        torch.multiprocessing.start_processes(work, (directory,), nprocs=2, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        sys.exit("AssertionError" in str(error))
