"""nemo-automodel: what one rank saved, two cannot resume: the second rank's random state is a file that was never written.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_cannot_resume_on_more_ranks.py

The stack's own recipes all hold a `StatefulRNG`, which is saved by each rank and loaded by each rank. Seen with
nemo-automodel 0.7.0 by reshard.values-across-worlds. Exit status 1 where it is still so.
"""

import sys
import tempfile

from nemo_recipe import launch, recipe


def save(directory):
    recipe(directory).save_checkpoint(epoch=0, step=1, train_loss=0.0)


def load(directory):
    recipe(directory).load_checkpoint("LATEST")


with tempfile.TemporaryDirectory() as directory:
    print("save on 1 rank:", launch(1, save, directory) or "done")
    print("load on 1 rank:", launch(1, load, directory) or "done")
    error = launch(2, load, directory)
print("load on 2 ranks:", error or "done")
sys.exit("rng" in error)
