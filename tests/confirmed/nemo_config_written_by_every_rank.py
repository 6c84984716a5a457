"""nemo-automodel: every rank opens the checkpoint's config.yaml and writes it, all into the same path.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_config_written_by_every_rank.py

`BaseRecipe.save_checkpoint` calls `save_config` outside its `if is_rank_0`. Seen with nemo-automodel 0.7.0 by
writers.replicated-files-rank-0 and writers.one-writer-per-path. Exit status 1 where it is still so.
"""

import sys
import tempfile
from pathlib import Path

import torch.distributed as dist
from nemo_recipe import launch, recipe


def save(directory):
    written = []

    def note(event, arguments):
        if event == "open" and isinstance(arguments[1], str) and arguments[1][0] in "wax":
            written.append(Path(arguments[0]).name)

    made = recipe(directory)
    sys.addaudithook(note)
    made.save_checkpoint(epoch=0, step=1, train_loss=0.0)
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, list(written))
    ranks = [rank for rank, names in enumerate(by_rank) if "config.yaml" in names]
    if dist.get_rank() == 0:
        print("config.yaml was written by ranks", ranks)
    assert ranks == [0], f"config.yaml was written by ranks {ranks}"


with tempfile.TemporaryDirectory() as directory:
    sys.exit(launch(2, save, directory) != "")
