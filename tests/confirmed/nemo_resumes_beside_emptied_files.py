"""nemo-automodel: a checkpoint of which a file has lost its bytes is resumed without a word, unless a resume needs that file.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_resumes_beside_emptied_files.py

What is left is no checkpoint that was ever saved; nothing lists the files and their sizes. Seen with nemo-automodel 0.7.0 by
crash.torn-file. Exit status 1 where it is still so.
"""

import sys
import tempfile
from pathlib import Path

from nemo_recipe import launch, recipe


def save(directory):
    recipe(directory).save_checkpoint(epoch=0, step=1, train_loss=0.0)


def load(directory):
    recipe(directory).load_checkpoint("LATEST")


resumed = []
with tempfile.TemporaryDirectory() as directory:
    assert not launch(1, save, directory)
    checkpoint = Path(directory, "epoch_0_step_1")
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size):
        whole = path.read_bytes()
        path.write_bytes(b"")
        error = launch(1, load, directory)
        path.write_bytes(whole)
        print(f"{path.relative_to(checkpoint)} is empty: {'refused' if error else 'resumed'}", flush=True)
        resumed += [path] if not error else []
sys.exit(resumed != [])
