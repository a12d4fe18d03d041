"""Random times of stages, and the fastest order of all."""

import random
from collections.abc import Iterator
from itertools import product

from shardir.algebra.schedules import (
    Action,
    PipelineCosts,
    Schedule,
    simulate,
)
from shardir.diagnostics import ShardirError


def random_costs(stages: int, chance: random.Random) -> PipelineCosts:
    def some(count: int) -> tuple[float, ...]:
        return tuple(chance.choice((0.0, 0.5, 1.0, 1.25, 2.0)) for _ in range(count))

    memory = tuple(chance.choice((1.0, 2.0)) for _ in range(stages))
    return PipelineCosts(some(stages), some(stages), some(stages), some(stages - 1), memory)


def rank_orders(stage: int, microbatches: int) -> Iterator[tuple[Action, ...]]:
    """Yield the orders of one stage, with microbatches in turn: the standard Young tableaux."""

    def more(f: int, i: int, w: int) -> Iterator[tuple[Action, ...]]:
        if w == microbatches:
            yield ()
        for kind, k, possible in (("F", f, f < microbatches), ("I", i, i < f), ("W", w, w < i)):
            if possible:
                then = (f + (kind == "F"), i + (kind == "I"), w + (kind == "W"))
                for rest in more(*then):
                    yield (Action(stage, kind, k), *rest)

    return more(0, 0, 0)


def fastest(
    ranks: int, microbatches: int, c: PipelineCosts, memory: list[float] | None = None
) -> float:
    """Return the minimum time of one stage on each rank, over all orders."""
    found = float("inf")
    for orders in product(*(list(rank_orders(r, microbatches)) for r in range(ranks))):
        s = Schedule(ranks, ranks, microbatches, tuple(range(ranks)), orders)
        try:
            t = simulate(s, c)
        except ShardirError:
            continue
        if memory is None or all(p <= m for p, m in zip(t.peak_bytes, memory, strict=True)):
            found = min(found, t.makespan)
    return found
