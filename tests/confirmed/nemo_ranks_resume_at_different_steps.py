"""nemo-automodel: a rank that does not see the newest checkpoint yet resumes an older one than its peers, without a word.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_ranks_resume_at_different_steps.py

Each rank follows `LATEST` itself. Rank 1 sees the directory as it was before the second save. Seen with nemo-automodel 0.7.0
by writers.no-local-view-branching. Exit status 1 where it is still so.
"""

import shutil
import sys
import tempfile

import torch.distributed as dist
from nemo_recipe import launch, recipe


def save(directory):
    made = recipe(f"{directory}/now")
    for step in (1, 2):
        made.save_checkpoint(epoch=0, step=step, train_loss=0.0)
        if step == 1 and dist.get_rank() == 0:
            shutil.copytree(f"{directory}/now", f"{directory}/before", symlinks=True)
        dist.barrier()
        made.optimizer[0].step()


def load(directory):
    made = recipe(f"{directory}/{'before' if dist.get_rank() else 'now'}")
    made.load_checkpoint("LATEST")
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, next(iter(made.optimizer[0].state.values()))["step"].item())
    if dist.get_rank() == 0:
        print("updates taken by the optimizer of each rank:", steps, flush=True)
    assert len(set(steps)) == 1


with tempfile.TemporaryDirectory() as directory:
    assert not launch(2, save, directory)
    sys.exit(launch(2, load, directory) == "AssertionError")
