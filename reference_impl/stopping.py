"""Ending early and well: on SIGTERM, when the run's own time is up, and when its launcher is gone.

A run that stopped early exits with 75, which torchrun turns into 1. torchrun passes SIGTERM on to its ranks and kills them 30 s
later: a rank that hangs in a collective, and so cannot finish its step, is ended then.
"""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time

from reference_impl.runtime import Runtime, most


class Stop:
    """Remembers SIGTERM, and the time; made in the main thread before the run begins."""

    def __init__(self, max_seconds: float) -> None:
        self.reasons = (None, f"max_seconds={max_seconds:g}", "SIGTERM")
        self.deadline = time.monotonic() + max_seconds if max_seconds else math.inf
        self.signalled = False
        self.handler = signal.signal(signal.SIGTERM, self._remember)

    def _remember(self, *_: object) -> None:
        self.signalled = True

    def reason(self, runtime: Runtime) -> str | None:
        """Why the run has to end after this step, or None: the same answer on every rank, whichever was told."""
        return self.reasons[most(runtime, 2 if self.signalled else int(time.monotonic() >= self.deadline))]

    def close(self) -> None:
        """Let SIGTERM end the process at once again."""
        signal.signal(signal.SIGTERM, self.handler)


def end_with_launcher() -> None:
    """Have this rank end as soon as torchrun's agent is gone; does nothing without one.

    Ranks whose agent was killed outright go on by themselves, and would write beside those of the run's next start.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    gone = select.poll()
    gone.register(os.pidfd_open(os.getppid()), select.POLLIN)

    def watch() -> None:
        gone.poll()
        os.write(2, f"rank {os.environ['RANK']}: torchrun is gone, so this rank ends; what is published stays\n".encode())
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
