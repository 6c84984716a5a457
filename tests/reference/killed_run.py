"""``killed_run.py STEP key=value …``: the train command, whose last rank kills itself with SIGKILL after step STEP."""

import os
import signal
import sys

from reference_impl import run
from reference_impl.config import read_config
from reference_impl.trainer import Trainer


class Dying(Trainer):
    def train_step(self):
        if self.step == int(sys.argv[1]) and self.runtime.rank == self.runtime.world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_step()


if __name__ == "__main__":
    run.Trainer = Dying
    run.train(read_config(None, sys.argv[2:]))
