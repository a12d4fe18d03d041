"""Runs on several nodes, each an agent in a process."""

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from shardir.backend.torch.launch.forks import Fork
from support.forked import started

AGENT = Path(__file__).parents[2] / "run" / "node_agent.py"


TIMES = '{"last_call_timeout": 1, "keep_alive_interval": 1}'


class Nodes:
    """The agents of a run; what they print."""

    def __init__(self, *words: Any):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.rdzv = f"127.0.0.1:{free.getsockname()[1]}"
        self.words = [*map(str, words), "--timeout=60"]
        self.agents: dict[int, tuple[Fork, Any]] = {}

    def start(self, rank: int, nnodes: Any = 2, *words: Any) -> None:
        at = ("--nnodes", nnodes, "--node-rank", rank, "--rdzv", self.rdzv)
        self.start_line(rank, [*self.words, *at, *words])

    def start_line(self, rank: int, words: list[Any]) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - read by `end`
        env = {**os.environ, "TIMES": TIMES, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.agents[rank] = started([AGENT, *words], env, log), log

    def end(self) -> dict[int, tuple[int, str]]:
        """The exit code and the output of each agent."""
        found = {}
        try:
            for rank, (agent, log) in self.agents.items():
                code = agent.wait()
                log.seek(0)
                found[rank] = code, log.read().decode()
        finally:
            for agent, log in self.agents.values():
                agent.kill()
                log.close()
        return found

    def kill(self, rank: int) -> None:
        os.killpg(self.agents[rank][0].pid, signal.SIGKILL)


def states(dump: Path) -> dict[str, Any]:
    with np.load(dump) as file:
        return {k: file[k] for k in file.files if not k.startswith("losses/")}
