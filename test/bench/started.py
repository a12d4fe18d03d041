"""Ranks of a benchmark that are no programs of ours: a script of this folder, in a process for each
rank."""

import contextlib
import os
import socket
import time
from pathlib import Path

from shardir.backend.runs import Options
from shardir.backend.torch.launch.forks import Fork, forks
from shardir.tools.bench import PATH


def free_port() -> int:
    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def environment(ranks: int) -> dict[str, str]:
    """The variables that torch.distributed reads, but for the rank."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, PATH)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run(script: str, words: list[str], ranks: int, timeout: float) -> None:
    """Run a script on ranks: see `run_groups`."""
    run_groups(script, [words], ranks, timeout)


def run_groups(script: str, groups: list[list[str]], ranks: int, timeout: float) -> None:
    """Run a script on several groups of ranks at once, each with words of its own, to the end of
    the last rank, or of the first that fails. They print to the standard error. No rank remains,
    however this ends."""
    file, until = str(Path(__file__).parent / script), time.monotonic() + timeout
    started, codes = list[Fork](), list[int | None]()
    with forks(Options(timeout=timeout)) as here:
        try:
            for words in groups:
                given = environment(ranks)
                for rank in range(ranks):
                    started.append(here.start([file, *words], {**given, "RANK": str(rank)}, 2))
            codes = [p.poll() for p in started]
            while None in codes and not any(codes) and time.monotonic() < until:
                here.code(started[codes.index(None)].pid, 1.0)
                codes = [p.poll() for p in started]
        finally:
            for p in started:
                p.kill()
            for p in started:
                p.wait()
    if any(code != 0 for code in codes):
        raise SystemExit(f"error: {script}: ranks ended with {codes}")
