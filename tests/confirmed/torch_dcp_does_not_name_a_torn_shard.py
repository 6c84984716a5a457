"""Plain torch: a shard that lost its second half, or all its bytes, is refused by an error that does not say which file.

    python tests/confirmed/torch_dcp_does_not_name_a_torn_shard.py

A file that lies beside them, such as a tokenizer's, is in no list of DCP's and is never looked at. Seen with torch 2.13.0 by
crash.torn-file. Exit status 1 where it is still so.
"""

import os
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

unnamed = 0
for left in (0.5, 0.0):
    with tempfile.TemporaryDirectory() as directory:
        dcp.save({"x": torch.ones(1000)}, checkpoint_id=directory, no_dist=True)
        shard = os.path.join(directory, "__0_0.distcp")
        os.truncate(shard, int(left * os.path.getsize(shard)))
        try:
            dcp.load({"x": torch.zeros(1000)}, checkpoint_id=directory, no_dist=True)
        except CheckpointException as error:
            print(f"{left:.0%} of __0_0.distcp left:", str(error).strip().splitlines()[-1])
            unnamed += "__0_0.distcp" not in str(error)
sys.exit(unnamed > 0)
