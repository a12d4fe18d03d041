"""A training step of a 2-layer transformer on 4 ranks: emitted, hand-written, and DTensor.

One process group, all variants in the same four processes, in turns of a few steps each, so that
the ratios hold while the machine's speed drifts. Every variant starts from the same parameters and
batch, and every loss must agree with the single-device one.
"""

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.programs import transformer
from bench.started import run
from shardir.api.compilation import compile

RANKS, ROUNDS = 4, 8
MESHES = {"2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1)}
SIZES = (("2x2", 256), ("2x2", 512), ("1x4", 256), ("4x1", 256))
"""The meshes, with the width of the transformer."""
TIMEOUT = 600
SMOKE = {"RANKS": 2, "ROUNDS": 1, "MESHES": {"2x1": (2, 1)}, "SIZES": (("2x1", 16),)}
"""On two axes DTensor alone compares layouts for a minute."""


def measure(mesh: str, hidden: int) -> list[dict[str, Any]]:
    """The records of all variants on one mesh."""
    text = transformer(layers=2, hidden=hidden, mesh=MESHES[mesh])
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program"
        compile(text, name="transformer.ir").save(program)
        out = Path(folder) / "records.json"
        dp, tp = MESHES[mesh]
        words = [str(word) for word in (program, out, dp, tp, hidden, ROUNDS)]
        run("step_rank.py", words, RANKS, TIMEOUT)
        found = json.loads(out.read_text())
    hand = statistics.median(found["hand"]["ms"])
    return [
        {
            "mesh": mesh,
            "hidden": hidden,
            "variant": name,
            "median_ms": statistics.median(v["ms"]),
            "ratio_to_hand": statistics.median(v["ms"]) / hand,
            "collectives": v["collectives"],
            "bytes": v["bytes"],
            "loss_error": v["loss_error"],
        }
        for name, v in found.items()
    ]


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per mesh, size and variant: variant, median_ms, ratio_to_hand, collectives, bytes
    (of each collective's larger side on one rank), loss_error (relative, against one device)."""
    out = []
    for mesh, hidden in SIZES:
        out += measure(mesh, hidden)
        ratios = ", ".join(f"{r['variant']} {r['ratio_to_hand']:.2f}" for r in out[-3:])
        log(f"{mesh}, hidden {hidden}: {ratios}")
    return out
