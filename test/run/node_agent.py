"""`shard-run ARGUMENTS` of a node whose ranks are forked: a job of rank_server.py, which forks it
with torch imported; it forks the server of its own ranks while it has one thread."""

import json
import os
import sys

from support.forked import OwnForks, in_agents
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from shardir.backend.torch.launch import agent
from shardir.tools import commands

if __name__ == "__main__":
    vars(subprocess_handler).update(in_agents(OwnForks(sys.executable, {}, 60)))
    agent.TIMES |= json.loads(os.environ["TIMES"])
    sys.exit(commands.command("run"))
