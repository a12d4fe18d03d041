"""Offsets of buffers: the block that best fit and the search need, beside the lower bound.

The instances are the files `NAME.CAPACITY.csv` (columns lower, upper, size) of a folder, such as
benchmarks/challenging of a checkout of google/minimalloc; without one, blocks that are cut into
buffers at random, so that the capacity is the bound. `gap` is the ratio of the plan to the
capacity.
"""

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from shardir.algebra.allocation import LiveBuffer, allocate
from shardir.diagnostics import ShardirError

Record = dict[str, Any]
CAPACITY, PARTS = 1 << 20, (50, 100, 200, 400)
SMOKE = {"PARTS": (50,)}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, help="with instances as NAME.CAPACITY.csv")


def records(log: Callable[[str], object], folder: Path | None = None) -> list[Record]:
    """One record per instance: buffers, bound, capacity, best_fit, plan, gap, seconds."""
    found = []
    for name, capacity, buffers in cut_blocks() if folder is None else instances(folder):
        start = time.perf_counter()
        a = allocate(buffers, capacity=capacity)
        seconds = time.perf_counter() - start
        check(buffers, a.offsets, a.size)
        found.append({
            "instance": name, "buffers": len(buffers), "bound": a.bound, "capacity": capacity,
            "best_fit": a.best_fit, "plan": a.size, "gap": a.size / capacity, "seconds": seconds,
        })  # fmt: skip
        log(f"{name}: {a.size} of {capacity} in {seconds:.1f} s")
    return found


def instances(folder: Path) -> Iterator[tuple[str, int, list[LiveBuffer]]]:
    """Yield the instances of a folder. Raises ShardirError if there are none."""
    paths = sorted(folder.glob("*.*.csv"))
    if not paths:
        raise ShardirError(f"--folder: expected files NAME.CAPACITY.csv in {folder}, got none")
    for path in paths:
        name, capacity, _ = path.name.rsplit(".", 2)
        with path.open(encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)]
        buffers = [LiveBuffer(int(r["lower"]), int(r["upper"]), int(r["size"])) for r in rows]
        yield name, int(capacity), buffers


def cut_blocks() -> Iterator[tuple[str, int, list[LiveBuffer]]]:
    """Yield blocks of CAPACITY that are cut into buffers."""
    for parts in PARTS:
        yield f"cut {parts}", CAPACITY, cut(Random(parts), parts, parts, CAPACITY)


def cut(draw: Random, parts: int, times: int, size: int) -> list[LiveBuffer]:
    """Cut a full block into buffers, the largest first, so that nothing smaller holds them."""
    found = [LiveBuffer(0, times, size)]
    while len(found) < parts:
        start, end, held = found.pop(max(range(len(found)), key=lambda i: _area(found[i])))
        if end - start > 1 and (held == 1 or draw.random() < 0.5):
            at = draw.randrange(start + 1, end)
            found += [LiveBuffer(start, at, held), LiveBuffer(at, end, held)]
        else:
            at = draw.randrange(1, held)
            found += [LiveBuffer(start, end, at), LiveBuffer(start, end, held - at)]
    draw.shuffle(found)
    return found


def _area(b: LiveBuffer) -> int:
    return (b.end - b.start) * b.size


def check(buffers: list[LiveBuffer], offsets: tuple[int, ...], size: int) -> None:
    """Raise AssertionError if buffers overlap, or are not within the block."""
    placed = [*zip(buffers, offsets, strict=True)]
    for i, (b, low) in enumerate(placed):
        assert low >= 0 and low + b.size <= size, (b, low)
        for x, other in placed[:i]:
            apart = low + b.size <= other or other + x.size <= low
            assert apart or b.end <= x.start or x.end <= b.start, (b, low, x, other)
