"""A checkpoint that is written beside the steps: the seconds that they wait for it, and its bytes.

The same 200 MB of parameters, split by rows over 4 Gloo ranks, saved by our runtime and by
torch.distributed.checkpoint's own async_save (by a thread; as safetensors, and in its own form), in
turns in one start of the ranks. `blocked` is the slowest rank's time until the states may change,
`complete` that until all files are written; the first save is apart, since DCP allocates memory
for it.
"""

import json
import tempfile
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.program_text import NORMAL, Text, tensor
from bench.started import run
from shardir.api.compilation import compile

RANKS, TENSORS, ROWS, COLUMNS, ROUNDS, TIMEOUT = 4, 48, 1024, 1024, 9, 580
SMOKE = {"RANKS": 2, "TENSORS": 1, "ROWS": 4, "COLUMNS": 4, "ROUNDS": 1}


def _program() -> str:
    """A step of as many parameters, each [ROWS, COLUMNS] in f32 and split by rows."""
    t, type = Text({"d": RANKS}), tensor([ROWS, COLUMNS])
    t.argument("x", [ROWS, COLUMNS], "{d}, {}", "train.input = " + NORMAL.format(1))
    total = "x"
    for i in range(TENSORS):
        w = t.parameter(f"w{i}", [ROWS, COLUMNS], "{d}, {}", NORMAL.format(1))
        total = t.op(f"sum{i}", f"nn.mul %{total}, %{w}", [total, w], type)
    t.op("loss", f"nn.reduce <mean> %{total} dims <0, 1>", [total], "tensor<f32>")
    return t.step(0.1)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"saves of each ({ROUNDS})")


def records(log: Callable[[str], object], rounds: int) -> list[dict[str, Any]]:
    """One record per variant: variant, first_blocked, blocked (median of the others, if there are
    any), first_complete, complete (seconds), bytes, files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compile(_program(), "train").save(folder / "program")
        out = folder / "records.json"
        log("compiled")
        words = [str(program), str(folder / "saved"), str(out), str(rounds)]
        run("checkpoint_rank.py", words, RANKS, TIMEOUT)
        found = json.loads(out.read_text())
    return [
        {
            "variant": name,
            "first_blocked": r["blocked"][0],
            "blocked": later(r["blocked"]),
            "first_complete": r["complete"][0],
            "complete": later(r["complete"]),
            "bytes": r["bytes"],
            "files": r["files"],
        }
        for name, r in found.items()
    ]


def later(seconds: list[float]) -> float | None:
    """Return the median of all but the first."""
    return median(seconds[1:]) if len(seconds) > 1 else None
