"""A token of a GPT with a key-value cache: our own time beside that of its ops and collectives.

docs/examples/generate.py, of two layers, on 4 Gloo ranks. `by hand` is its function on shards, with
calls of torch.distributed: what one would write; `one device` the module without ranks. They run in
turns, in one start. `cpu` is the time of a rank's own thread, in which it does not wait; `own` is
the difference of shardir's and that by hand.
"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import generate
import torch

import shardir
from bench.started import run

RANKS, ROUNDS, TIMEOUT = 4, 40, 500
MESHES = {"2x2": ("dp = 2, tp = 2", "megatron(tp) * ddp(dp)"), "1x4": ("tp = 4", "megatron(tp)")}
WIDTHS = (64, 512)
SMOKE = {"RANKS": 2, "ROUNDS": 1, "WIDTHS": (64,), "MESHES": {"1x2": ("tp = 2", "megatron(tp)")}}


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"turns of each ({ROUNDS})")


def records(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    """One record per mesh, width and variant: mesh, width, variant, median, cpu, own (milliseconds
    of a token on rank 0), collectives."""
    found = []
    for mesh, (axes, plan) in MESHES.items():
        for width in WIDTHS:
            with tempfile.TemporaryDirectory() as name:
                program, out = Path(name) / "program", Path(name) / "records.json"
                torch.manual_seed(0)
                shardir.compile(
                    generate.GPT(width).eval(), generate.example(), mesh=axes, plan=plan,
                    train=False,
                ).save(program)  # fmt: skip
                words = [str(program), str(out), str(width), str(rounds)]
                run("decode_rank.py", words, RANKS, TIMEOUT)
                log(f"{mesh}, width {width}")
                records = json.loads(out.read_text())
                found += [{"mesh": mesh, "width": width, **record} for record in records]
    return found
