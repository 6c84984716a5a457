"""A torch elastic rendezvous of one node, whose agent runs no thread when it forks its ranks.

torch's own "c10d" rendezvous keeps its store's server and a heartbeat in threads of the agent. A rank forked in the moment
in which one of them holds a lock (the resolver's, say, while the server names a peer) hangs as soon as it wants that lock
itself, which is when it connects to the store. Here the store is served by a process of its own, which outlives the ranks as
torchrun's outlives them, and the agent waits for nobody: torch's skews nodes that start together by up to 0.3 s.
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from contracts import processes

ADDRESS = "127.0.0.1"


class OneNode(RendezvousHandler):
    """The rendezvous of an agent that is alone; its ranks meet at the store behind `port`."""

    def __init__(self, run_id: str, port: int) -> None:
        self.run_id = run_id
        self.meeting_point = RendezvousStoreInfo(ADDRESS, port)
        self.agents = dist.HashStore()

    @property
    def use_agent_store(self) -> bool:
        return True  # all ranks are clients

    def get_backend(self) -> str:
        return "one-node"

    def get_run_id(self) -> str:
        return self.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self.agents, 0, 1, self.meeting_point)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True


def serve_store(ranks: int) -> tuple[int, int]:
    """Fork a process that serves a TCPStore for `ranks` clients until it is killed; return its id and its port.

    The socket listens before the fork, so no client comes too early and nobody else gets the port.
    """
    listening = socket.create_server((ADDRESS, 0), backlog=max(16, 2 * ranks))
    port = listening.getsockname()[1]
    pid = os.fork()
    if pid == 0:
        try:
            processes.die_with_parent()
            # The server is a thread of this object's, and takes the socket over.
            store = dist.TCPStore(  # noqa: F841
                ADDRESS, port, ranks, True, timedelta(minutes=5), wait_for_workers=False, master_listen_fd=listening.detach()
            )
            while True:
                signal.pause()
        finally:
            os._exit(1)
    listening.close()
    return pid, port
