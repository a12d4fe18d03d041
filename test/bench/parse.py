"""Parsing: shardir's parser beside xDSL's own, on one text of 20,000 ops.

CPU seconds, the minimum of three turns, the parsers one after the other in each turn, garbage
collection off for both. Both make the same module.
"""

import gc
import time
from collections.abc import Callable
from typing import Any

from xdsl.context import Context
from xdsl.parser import Parser

from bench.programs import OPS_PER_LAYER, transformer
from shardir.dialects.installed import installed
from shardir.syntax.parser import parse

OPS = 20_000
TURNS = 3
SMOKE = {"OPS": 2 * OPS_PER_LAYER, "TURNS": 1}


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per parser: parser, ops, bytes, seconds, speedup_over_xdsl."""
    text = transformer(layers=OPS // OPS_PER_LAYER)
    parse(transformer(layers=1))  # the grammar is made once per process
    ops = sum(1 for _ in parse(text).walk())

    def xdsl() -> None:
        ctx = Context()
        for name, dialect in installed().tables["dialects"].items():
            ctx.register_dialect(name, dialect)
        Parser(ctx, text).parse_module()

    parsers: dict[str, Callable[[], object]] = {"shardir": lambda: parse(text), "xdsl": xdsl}
    seconds: dict[str, list[float]] = {name: [] for name in parsers}
    for turn in range(TURNS):
        for name, run in parsers.items():
            gc.collect()
            gc.disable()
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
            gc.enable()
            log(f"turn {turn + 1}: {name} {seconds[name][-1]:.2f} s")
    best = {name: min(s) for name, s in seconds.items()}
    return [
        {
            "parser": name,
            "ops": ops,
            "bytes": len(text),
            "seconds": best[name],
            "speedup_over_xdsl": best["xdsl"] / best[name],
        }
        for name in parsers
    ]
