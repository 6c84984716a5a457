"""``stopped_run.py STEP SIGNAL key=value …``: the train command; after STEP its last rank sends SIGNAL to torchrun's agent."""

import os
import signal
import sys
import time

from reference_impl import __main__, run
from reference_impl.trainer import Trainer


class Telling(Trainer):
    def train_step(self):
        if self.step == int(sys.argv[1]) and self.runtime.rank == self.runtime.world - 1:
            stop = signal.getsignal(signal.SIGTERM).__self__
            os.kill(os.getppid(), getattr(signal, sys.argv[2]))
            end = time.monotonic() + 60
            while not stop.signalled:  # The run is so short that it would end before the agent has passed the signal on.
                assert time.monotonic() < end, "no signal came, and nothing noticed that the agent is gone"
                time.sleep(0.01)
        return super().train_step()


if __name__ == "__main__":
    run.Trainer = Telling
    sys.exit(__main__.main(["train", *sys.argv[3:]]))
