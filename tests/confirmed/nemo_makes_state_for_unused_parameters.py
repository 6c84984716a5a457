"""nemo-automodel: a parameter that never got a gradient has no moments, until a save makes them; a resume brings them back.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_makes_state_for_unused_parameters.py

They are zeros of step 0, made on purpose so that what is saved and what is loaded have the same keys: no update changes, and
twice the parameter's memory is taken. Seen with nemo-automodel 0.7.0 by resume.frozen-and-unused. Exit status 1 where it is
still so.
"""

import sys
import tempfile

import torch.distributed as dist
from nemo_recipe import launch, recipe


def tell(when, made):
    found = sorted(made.optimizer[0].state.get(made.model_parts[0].unused, {}))
    if dist.get_rank() == 0:
        print(f"{when}: state of the unused parameter: {', '.join(found) or 'none'}", flush=True)
    return found


def save(directory):
    made = recipe(directory, unused=True)
    tell("before the save", made)
    made.save_checkpoint(epoch=0, step=1, train_loss=0.0)
    tell("after the save", made)


def load(directory):
    made = recipe(directory, unused=True)
    made.load_checkpoint("LATEST")
    assert not tell("after a resume", made)


with tempfile.TemporaryDirectory() as directory:
    assert not launch(2, save, directory)
    sys.exit(launch(2, load, directory) != "")
