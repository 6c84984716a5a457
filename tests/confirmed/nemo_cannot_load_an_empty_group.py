"""nemo-automodel: an optimizer with a parameter group that holds no parameters is saved, and cannot be loaded.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_cannot_load_an_empty_group.py

Its `load_optimizer` asks torch for flattened optimizer state, whose reader takes the first parameter of every group. Seen
with nemo-automodel 0.7.0 and torch 2.13.0 by resume.param-groups. Exit status 1 where it is still so.
"""

import sys
import tempfile

from nemo_recipe import launch, recipe


def save(directory):
    recipe(directory, {"params": []}).save_checkpoint(epoch=0, step=1, train_loss=0.0)


def load(directory):
    recipe(directory, {"params": []}).load_checkpoint("LATEST")


with tempfile.TemporaryDirectory() as directory:
    print("save:", launch(2, save, directory) or "done")
    error = launch(2, load, directory)
print("load:", error or "done")
sys.exit("IndexError" in error)
