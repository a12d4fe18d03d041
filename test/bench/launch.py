"""Seconds from a command to the first step: shard-run of a compiled program, and torchrun.

4 Gloo ranks on this machine, in turns. torchrun starts the same program, a script that joins the
ranks and does one all-reduce, and an empty one, which does not import torch. `first` is when the
loss of the first step (the result of the all-reduce) is printed, `end` when the command has
ended; of an empty script there is only the latter.
"""

import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.programs import mlp
from shardir.api.compilation import compile

RANKS, MESH, ROUNDS, TIMEOUT = 4, (2, 2), 7, 120
EVERY = "shard-run DIR", "torchrun DIR/program.py", "torchrun, one all-reduce", "torchrun, empty"
COMMANDS = EVERY
SMOKE = {"RANKS": 1, "MESH": (1, 1), "ROUNDS": 1, "COMMANDS": EVERY[:1]}
ALL_REDUCE = """
import torch
import torch.distributed as dist

torch.set_num_threads(1)
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if dist.get_rank() == 0:
    print("loss", x.item(), flush=True)
dist.destroy_process_group()
"""


def _timed(command: list[str]) -> tuple[float | None, float]:
    """Return the seconds until a line has a loss, if one does, and until the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    begun, first, lines = time.perf_counter(), None, []
    started = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        assert started.stdout is not None
        for line in started.stdout:
            lines.append(line)
            if first is None and "loss" in line:
                first = time.perf_counter() - begun
        code = started.wait(TIMEOUT)
    finally:
        started.kill()
    if code:
        raise SystemExit(f"error: {' '.join(command)} ended with {code}:\n{''.join(lines[-20:])}")
    return first, time.perf_counter() - begun


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"starts of each ({ROUNDS})")


def records(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    """One record per command: command, first, end (medians, in seconds), lowest and highest (of
    the first, or of the end where there is none)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compile(mlp(batch=8, dim=8, hidden=8, mesh=MESH), "train").save(folder / "mlp")
        (folder / "all_reduce.py").write_text(ALL_REDUCE)
        (folder / "empty.py").write_text("")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        shard_run = [sys.executable, "-m", "shardir.tools.run"]
        every = [
            [*shard_run, str(program), "--steps", "1"],
            [*torchrun, f"{program}/program.py", "--steps", "1"],
            [*torchrun, f"{folder}/all_reduce.py"],
            [*torchrun, f"{folder}/empty.py"],
        ]
        commands = dict(zip(EVERY, every, strict=True))
        found: dict[str, list[tuple[float | None, float]]] = {name: [] for name in COMMANDS}
        for number in range(rounds):
            for what in COMMANDS:
                found[what].append(_timed(commands[what]))
            log(f"round {number + 1}/{rounds}")
    out = []
    for what, times in found.items():
        firsts = [first for first, _ in times if first is not None]
        ends = [end for _, end in times]
        out.append({
            "command": what, "first": median(firsts) if firsts else None, "end": median(ends),
            "lowest": min(firsts or ends), "highest": max(firsts or ends),
        })  # fmt: skip
    return out
