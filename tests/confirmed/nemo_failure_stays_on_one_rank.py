"""nemo-automodel: where rank 1 cannot write its random state, rank 0 is not told and waits until its process group gives up.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_failure_stays_on_one_rank.py

`save_on_global_ranks` writes outside the guard that the rest of a save goes through. Rank 1 may write no byte to any file
here, and stays alive, as a rank does whose training loop catches the error. Seen with nemo-automodel 0.7.0 by
writers.failure-reaches-everyone. Exit status 1 where it is still so.
"""

import resource
import sys
import tempfile
import time

import torch.distributed as dist
from nemo_recipe import launch, recipe


def save(directory):
    made, rank = recipe(directory), dist.get_rank()
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0 if rank == 1 else unlimited[0], unlimited[1]))
    began = time.monotonic()
    try:
        made.save_checkpoint(epoch=0, step=1, train_loss=0.0)
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        print(f"rank {rank} after {time.monotonic() - began:.1f} s: {str(error).splitlines()[0]}", flush=True)
        if rank == 1:
            time.sleep(15)  # longer than the process group's time-out of 10 s
        assert "Timed out" not in str(error)


with tempfile.TemporaryDirectory() as directory:
    sys.exit(launch(2, save, directory) != "")
