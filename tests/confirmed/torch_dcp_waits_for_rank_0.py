"""Plain torch: where rank 0 cannot write what it writes alone, the others wait in the barrier that follows.

    python tests/confirmed/torch_dcp_waits_for_rank_0.py

The common way to save: rank 0 writes the replicated files, a barrier, `dcp.save`. Rank 0 finds a file here where its
directory should be, and stays alive, as a rank does whose training loop catches the error. Seen with torch 2.13.0 by
writers.failure-reaches-everyone. Exit status 1 where it is still so.
"""

import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def save(tensors, directory):
    if dist.get_rank() == 0:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    dist.barrier()
    dcp.save(tensors, checkpoint_id=directory)


def work(rank, root):
    store = f"file://{root}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=10))
    tensors = {"x": distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])}
    (taken := Path(root) / "step_1").touch()
    dist.barrier()
    began = time.monotonic()
    try:
        save(tensors, taken)
    except Exception as error:
        print(f"rank {rank} after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}", flush=True)
        if rank == 0:
            time.sleep(15)  # longer than the process group's time-out of 10 s
        assert "Timed out" not in str(error)


with tempfile.TemporaryDirectory() as root:
    try:
        torch.multiprocessing.start_processes(work, (root,), nprocs=2, start_method="fork")
    except torch.multiprocessing.ProcessRaisedException as error:
        sys.exit("AssertionError" in str(error))
