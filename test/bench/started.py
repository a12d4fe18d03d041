"""Ranks of a benchmark that are no programs of ours: a script of this folder, in a process for each
rank."""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path


def free_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(ranks: int) -> dict[str, str]:
    """The variables that torch.distributed reads, but for the rank."""
    return {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run(script: str, words: list[str], ranks: int, timeout: float) -> None:
    """Run a script on ranks, to their end."""
    command = [sys.executable, str(Path(__file__).parent / script), *words]
    given = environment(ranks)
    started = [subprocess.Popen(command, env={**given, "RANK": str(r)}) for r in range(ranks)]
    try:
        codes = [p.wait(timeout) for p in started]
    finally:
        for p in started:
            p.kill()
    if any(codes):
        raise SystemExit(f"error: {script}: ranks ended with {codes}")
