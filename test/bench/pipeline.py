"""Compiling: each pass of the train pipeline, on a transformer of 5,000, 10,000 and 20,000 ops.

CPU seconds of one run each; `ops` is the number of ops after the pass. The growth from one size to
the next shows whether a pass is linear.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from xdsl.context import Context

from bench.programs import OPS_PER_LAYER, transformer
from shardir.pipelines import build
from shardir.syntax.parser import parse

SIZES: tuple[int, ...] = (5_000, 10_000, 20_000)
SMOKE = {"SIZES": (2 * OPS_PER_LAYER,)}


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per size and pass, `total` last: input_ops, pass, ops, seconds."""
    out = []
    for size in SIZES:
        module = parse(transformer(layers=-(-size // OPS_PER_LAYER)))
        before = ops = sum(1 for _ in module.walk())
        gc.collect()
        gc.disable()
        total = 0.0
        for p in build("train"):
            start = time.process_time()
            p.apply(Context(), module)
            seconds = time.process_time() - start
            total += seconds
            ops = sum(1 for _ in module.walk())
            out.append({"input_ops": before, "pass": p.name, "ops": ops, "seconds": seconds})
        gc.enable()
        out.append({"input_ops": before, "pass": "total", "ops": ops, "seconds": total})
        log(f"{before} ops: {total:.2f} s")
    return out
