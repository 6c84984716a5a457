"""Plain torch: a save flushes the bytes of each file that it writes, and no directory that holds their names.

    python tests/confirmed/torch_dcp_flushes_no_directory.py

POSIX promises a file's name after a power loss only once its directory was flushed; the files' own fsync is not enough.
Seen with torch 2.13.0 by crash.power-loss. Exit status 1 where it is still so.
"""

import os
import stat
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp

flushed, fsync = [], os.fsync


def note(descriptor):
    flushed.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
    fsync(descriptor)


os.fsync = note
with tempfile.TemporaryDirectory() as directory:
    dcp.save({"x": torch.ones(3)}, checkpoint_id=os.path.join(directory, "step_1"), no_dist=True)
print(f"flushed: {flushed.count('file')} files, {flushed.count('directory')} directories")
sys.exit("directory" not in flushed)
