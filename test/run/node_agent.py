"""`shard-run ARGUMENTS` of a node whose ranks are forked: a job of rank_server.py, which forks it
with torch imported; it forks the server of its own ranks while it has one thread."""

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

import forked
import rank_server
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from shardir.backend.torch.launch import agent
from shardir.tools import commands


class OwnServer(forked.Server):
    """A server that is a fork of this process."""

    def __init__(self) -> None:
        self.codes = {}
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(rank_server.PR_SET_PDEATHSIG, signal.SIGKILL)
            self.socket.close()
            rank_server.serve(other)
            os._exit(0)
        other.close()


if __name__ == "__main__":
    own = OwnServer()
    setattr(forked, "server", lambda: own)  # noqa: B010 - of another type
    vars(subprocess_handler).update(forked.in_agents())
    agent.TIMES |= json.loads(os.environ["TIMES"])
    sys.exit(commands.command("run"))
