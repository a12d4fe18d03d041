"""Redistribution: bytes received against the least that can be, for all ordered pairs of layouts.

The bound is what the device that lacks most lacks. `shardir` is the planner; `collectives` is its
fixed order of named collectives alone, as other compilers have it.
"""

import time
from collections.abc import Callable
from itertools import pairwise, permutations
from typing import Any

from shardir.algebra import redistribution
from shardir.algebra.bound import bound
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.steps import step_received

MESHES = {
    "2x2": ((2, 2), (64, 64)),
    "2x4": ((2, 4), (64, 64)),
    "2x2x2": ((2, 2, 2), (64, 64)),
    "4x3": ((4, 3), (64, 50)),
}
"""Sizes of the axes, and the tensor's shape; on 4x3 no shard over three is even."""


def layouts(mesh: Mesh, rank: int) -> list[Layout]:
    """Every split of a tensor over whole axes, in every order."""
    names = [n for n, _ in mesh.axes]
    found = set()
    for k in range(len(names) + 1):
        for order in permutations(names, k):
            for cuts in _cuts(k, rank):
                at = [0, *cuts, k]
                dims = [tuple(map(Axis, order[a:b])) for a, b in pairwise(at)]
                found.add(Layout(mesh.name, tuple(dims)))
    return sorted(found, key=str)


def _cuts(k: int, rank: int) -> list[tuple[int, ...]]:
    if rank == 1:
        return [()]
    return [
        (a, *rest) for a in range(k + 1) for rest in _cuts(k, rank - 1) if not rest or a <= rest[0]
    ]


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per mesh and engine: mesh, pairs, engine, at_bound (share), mean, max (ratios to
    the bound, of pairs that move anything), total (ratio of sums), planning_ms (per pair)."""
    out = []
    for name, (sizes, shape) in MESHES.items():
        mesh = Mesh("m", tuple((f"a{i}", n) for i, n in enumerate(sizes)))
        all_of_them = layouts(mesh, len(shape))
        pairs = [(a, b) for a in all_of_them for b in all_of_them if a != b]
        redistribution.plan.cache_clear()
        start = time.perf_counter()
        for a, b in pairs:
            redistribution.plan(shape, mesh, a, b)
        planning = (time.perf_counter() - start) / len(pairs) * 1e3
        bounds = [bound(mesh, shape, a, b) for a, b in pairs]
        ours = [redistribution.received(shape, mesh, a, b)[0] for a, b in pairs]
        named = [_collectives(shape, mesh, a, b) for a, b in pairs]
        for engine, moved, ms in (("shardir", ours, planning), ("collectives", named, None)):
            ratios = [m / b for m, b in zip(moved, bounds, strict=True) if b]
            at_bound = [m <= b for m, b in zip(moved, bounds, strict=True)]
            out.append(
                {
                    "mesh": name,
                    "pairs": len(pairs),
                    "engine": engine,
                    "at_bound": sum(at_bound) / len(pairs),
                    "mean": sum(ratios) / len(ratios),
                    "max": max(ratios),
                    "total": sum(moved) / sum(bounds),
                    "planning_ms": ms,
                }
            )
        log(f"{name}: {len(pairs)} pairs")
    return out


def _collectives(shape: tuple[int, ...], mesh: Mesh, a: Layout, b: Layout) -> int:
    layout, total = a, 0
    for step in redistribution.named_collectives(shape, mesh, a, b):
        total += step_received(mesh, shape, layout, step)
        layout = step.layout
    return total
