"""nemo-automodel: a save flushes the shards that DCP writes, and neither another file nor any directory that holds their names.

    .venvs/nemo_automodel/bin/python tests/confirmed/nemo_flushes_no_directory.py

POSIX promises a file's bytes after a power loss only once it was flushed, and its name once its directory was. Seen with
nemo-automodel 0.7.0 by crash.power-loss. Exit status 1 where it is still so.
"""

import os
import sys
import tempfile
from pathlib import Path

from nemo_recipe import launch, recipe


def save(directory):
    made, flushed, fsync = recipe(directory), set(), os.fsync

    def note(descriptor):
        flushed.add(os.stat(descriptor).st_ino)
        fsync(descriptor)

    os.fsync = note
    made.save_checkpoint(epoch=0, step=1, train_loss=0.0)
    found = [Path(directory), *sorted(Path(directory, "epoch_0_step_1").rglob("*"))]
    for path in found:
        kind = "directory" if path.is_dir() else "file"
        print(f"{'flushed' if path.stat().st_ino in flushed else 'not    '}  {kind}  {path.relative_to(directory)}", flush=True)
    assert all(path.stat().st_ino in flushed for path in found)


with tempfile.TemporaryDirectory() as directory:
    sys.exit(launch(1, save, directory) != "")
