"""Schedules of pipelines: the waiting share of those that are searched, and of torch's.

The seconds of F, I and W of all stages of a rank together are 1, 1 and 1 (unit), or 1, 1.15 and
0.85 (real); those of a transfer between ranks `c`. `p` ranks have 1, 2 or 4 equal stages each
(`x1`, `x2`, `x4`), for `m` microbatches. `limit` is the memory on each rank, in microbatches of all
its stages: p, which 1F1B needs, or 2 p. `peak` is what is held at most.

Torch's schedules have the orders of torch.distributed.pipelining, in the same simulator; the
fastest within the memory is shown. Ours are of `search`, with the named schedule that they were
made of. `bound` is the share at the lower bound for the number of stages, within the memory, and
`gap` the distance of the time to it. A violation is a cell in which torch's is faster.
"""

import argparse
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

from support.torch_schedules import CLASSES, torch_orders

from shardir.algebra.schedules import PipelineCosts, Schedule, search, simulate
from shardir.diagnostics import ShardirError

COSTS = {"unit": (1.0, 1.0, 1.0), "real": (1.0, 1.15, 0.85)}
"""Seconds of F, I and W."""
CHUNKS = (1, 2, 4)
NUMBERS = {"ranks": [4, 8, 16], "microbatches": [8, 16, 32], "evaluations": 150}
SMOKE = {"NUMBERS": {"ranks": [2], "microbatches": [4], "evaluations": 2}}


class Measured(NamedTuple):
    makespan: float
    name: str
    chunks: int
    bubble: float
    peak: float
    bound: float = 0.0
    gap: float = 0.0


def torch_schedules(ranks: int, microbatches: int) -> Iterator[tuple[str, int, Schedule]]:
    """Yield torch's schedules with these numbers."""
    for name, chunks in product((*CLASSES, "zb-h1"), CHUNKS):
        fitting = {"zbv": 2, "dualpipev": 2, "gpipe": 1, "1f1b": 1, "zb-h1": 1}.get(name, chunks)
        if fitting == chunks:
            try:
                orders = torch_orders(name, ranks, microbatches, chunks)
            except ValueError:
                continue
            yield name, chunks, Schedule.of(orders)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, nargs="+", default=NUMBERS["ranks"])
    parser.add_argument("--microbatches", type=int, nargs="+", default=NUMBERS["microbatches"])
    parser.add_argument(
        "--evaluations", type=int, default=NUMBERS["evaluations"],
        help="trials of the local search on a placement",
    )  # fmt: skip


def records(
    log: Callable[[str], None], ranks: list[int], microbatches: list[int], evaluations: int
) -> list[dict[str, Any]]:
    return [
        _record(log, p, m, costs, transfer, memory, evaluations)
        for p, m in product(ranks, microbatches)
        for costs, transfer, memory in product(COSTS, (0.0, 0.1), (p, 2 * p))
    ]


def _record(
    log: Callable[[str], None],
    ranks: int,
    microbatches: int,
    costs: str,
    transfer: float,
    memory: int,
    evaluations: int,
) -> dict[str, Any]:
    log(f"{ranks} ranks, {microbatches} microbatches, {costs} costs, transfer {transfer}, {memory}")

    def costs_of(chunks: int) -> PipelineCosts:
        return PipelineCosts.equal(ranks, chunks, COSTS[costs], transfer)

    theirs = []
    for name, chunks, s in torch_schedules(ranks, microbatches):
        t = simulate(s, costs_of(chunks))
        if max(t.peak_bytes) <= memory:
            theirs.append(Measured(t.makespan, name, chunks, t.bubble, max(t.peak_bytes)))
    ours = []
    for chunks in CHUNKS:
        try:
            found = search(ranks, microbatches, costs_of(chunks), [memory] * ranks, evaluations)
        except ShardirError:
            continue  # nothing fits
        t = found.timeline
        ours.append(
            Measured(
                t.makespan,
                found.origin,
                chunks,
                t.bubble,
                max(t.peak_bytes),
                found.bound,
                found.gap,
            )
        )
    a, b = min(theirs), min(ours)
    return {
        "p": ranks,
        "m": microbatches,
        "costs": costs,
        "c": str(transfer),
        "limit": memory,
        "torch": f"{a.name} x{a.chunks}",
        "torch %": round(100 * a.bubble, 1),
        "torch peak": a.peak,
        "shardir": f"{b.name} x{b.chunks}",
        "shardir %": round(100 * b.bubble, 1),
        "peak": b.peak,
        "bound %": round(100 * (1 - (1 - b.bubble) * b.makespan / b.bound), 1),
        "gap %": round(100 * abs(b.gap), 2),
        "violations": int(b.makespan > a.makespan * (1 + 1e-9)),
    }
