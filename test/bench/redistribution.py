"""Redistribution: bytes received against the lower bound, for all ordered pairs of layouts.

Plans are for links without latency, so that they minimise bytes. The bound is the largest number of
elements that a device lacks. `shardir` is the planner; `collectives` is its fixed order of named
collectives alone, as in other compilers. `dtensor` is DTensor on CPU devices, if torch is
installed: for the pairs that its placements can express, next to the planner's figures for the
same. Where links differ, the ratios are those of modelled times to those of the fixed order.
Planning on 2,048 devices is measured in a process for each pair, forked after all imports, so that
nothing is known of the mesh: random layouts of tensors of two and of three dimensions.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from importlib import util
from itertools import pairwise, permutations
from math import prod
from pathlib import Path
from random import Random
from typing import Any

from bench.drawn_layouts import random_layout
from bench.started import run
from shardir.algebra import redistribution
from shardir.algebra.bound import bound
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.steps import step_received, step_seconds
from shardir.cost.clusters import load

MESHES = {
    "2x2": ((2, 2), (64, 64)),
    "2x4": ((2, 4), (64, 64)),
    "2x2x2": ((2, 2, 2), (64, 64)),
    "4x3": ((4, 3), (64, 50)),
}
"""Sizes of the axes, and the tensor's shape; on 4x3 no shard over three is even."""

DTENSOR: tuple[str, ...] = ("2x2", "2x4")
"""The meshes on which DTensor is measured too."""

LARGE = ((4, 8, 8, 8), (16, 4, 4, 8), (2, 4, 4, 64))
"""The axes of meshes on the devices of pod2048."""

LARGE_PAIRS = 24
"""The pairs of layouts that are planned on each of them, half of them of three dimensions."""

LARGE_LAYOUTS = {"full axes": False, "sub-axes": True}
"""The kinds of layouts, and whether some axes are cut in two."""

LINKED: tuple[int, ...] = (2, 2, 2)
"""The axes of the mesh on two nodes."""

SOON = 0.2
"""The CPU seconds in which a redistribution on 2,048 devices is to be planned."""

SMOKE = {
    "MESHES": {"2x2": ((2, 2), (64, 64))}, "DTENSOR": ("2x2",), "LARGE": ((2, 2),),
    "LARGE_PAIRS": 2, "LINKED": (2, 2),
}  # fmt: skip

PUBLISHED = (
    ("2x4", 110, "shardy (published)", 84, 1.170, 2.14, 1.090),
    ("2x4", 110, "shardy, then xla (published)", 84, 1.291, 4.0, 1.177),
    ("2x4", 110, "gspmd (published)", 80, 1.378, 4.0, 1.270),
    ("2x2x2", 2352, "shardy (published)", 1488, 1.247, 2.33, 1.169),
)
"""Published figures for the same pairs, not measured in this run: mesh, pairs, engine, pairs at the
bound, mean, max, total."""


def layouts(mesh: Mesh, rank: int) -> list[Layout]:
    """Return every split of a tensor over full axes, in every order."""
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
    the bound, of pairs that move anything), total (ratio of sums), planning_ms (CPU, per pair)."""
    out = []
    for name, (sizes, shape) in MESHES.items():
        mesh = _mesh(sizes, Cluster((Level("all", prod(sizes), 2.0**30, 0.0),)))
        all_of_them = layouts(mesh, len(shape))
        pairs = [(a, b) for a in all_of_them for b in all_of_them if a != b]
        redistribution.plan.cache_clear()
        start = time.process_time()
        for a, b in pairs:
            redistribution.plan(shape, mesh, a, b)
        planning = (time.process_time() - start) / len(pairs) * 1e3
        bounds = [bound(mesh, shape, a, b) for a, b in pairs]
        ours = [redistribution.received(shape, mesh, a, b)[0] for a, b in pairs]
        named = [_collectives(shape, mesh, a, b) for a, b in pairs]
        out.append(_record(name, "shardir", ours, bounds, planning))
        out.append(_record(name, "collectives", named, bounds))
        if name in DTENSOR:
            out += _dtensor(name, mesh, shape)
        for mesh_name, n, engine, at, mean, most, total in PUBLISHED:
            if mesh_name == name:
                figures = {"at_bound": at / n, "mean": mean, "max": most, "total": total}
                out.append({"mesh": name, "pairs": n, "engine": engine, **figures,
                            "planning_ms": None})  # fmt: skip
        log(f"{name}: {len(pairs)} pairs")
    out.append(_links(log))
    out += [_large(sizes, kind, log) for kind in LARGE_LAYOUTS for sizes in LARGE]
    return out


def tables(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each table."""
    large = [r for r in records if "layouts" in r]
    return {"": [r for r in records if "engine" in r], "planning on 2,048 devices": large}


def _mesh(sizes: tuple[int, ...], cluster: Cluster | None = None) -> Mesh:
    return Mesh("m", tuple((f"a{i}", n) for i, n in enumerate(sizes)), cluster)


def _record(
    mesh: str, engine: str, moved: list[Any], bounds: list[Any], planning: float | None = None
) -> dict[str, Any]:
    ratios = [m / b for m, b in zip(moved, bounds, strict=True) if b]
    return {
        "mesh": mesh,
        "pairs": len(moved),
        "engine": engine,
        "at_bound": sum(m <= b for m, b in zip(moved, bounds, strict=True)) / len(moved),
        "mean": sum(ratios) / len(ratios),
        "max": max(ratios),
        "total": sum(moved) / sum(bounds),
        "planning_ms": planning,
    }


def _dtensor(name: str, mesh: Mesh, shape: tuple[int, ...]) -> list[dict[str, Any]]:
    """DTensor's record and ours, for the pairs of its placements; none without torch."""
    if util.find_spec("torch") is None:
        return []
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "moved.json"
        run("dtensor_redistribution.py", [name, "x".join(map(str, shape)), str(out)], 1, 120)
        moves = json.loads(out.read_text())
    theirs, ours, bounds = [], [], []
    for source, target, moved in moves:
        if source != target:
            ends = [_placed(mesh, p) for p in (source, target)]
            theirs.append(moved // 4)
            ours.append(redistribution.received(shape, mesh, *ends)[0])
            bounds.append(bound(mesh, shape, *ends))
    return [
        _record(name, "shardir, placements", ours, bounds),
        _record(name, "dtensor, placements", theirs, bounds),
    ]


def _placed(mesh: Mesh, placements: list[str]) -> Layout:
    """Return the layout of a matrix by DTensor's placements."""
    at = list(zip(mesh.names, placements, strict=True))
    return Layout(mesh.name, tuple(tuple(a for a, p in at if p == f"S{d}") for d in (0, 1)))


def _links(log: Callable[[str], object]) -> dict[str, Any]:
    """Return the modelled times relative to the fixed order's, on two nodes of four devices."""
    node, pod = Level("node", 4, 4.5e11, 3e-6), Level("pod", 2, 5e10, 2e-5)
    mesh, shape = _mesh(LINKED, Cluster((node, pod))), (4096, 4096)
    all_of_them = layouts(mesh, len(shape))
    pairs = [(a, b) for a in all_of_them for b in all_of_them if a != b]
    start = time.process_time()
    ours = [redistribution.estimated_seconds(shape, mesh, a, b, 4) for a, b in pairs]
    planning = (time.process_time() - start) / len(pairs) * 1e3
    named = []
    for a, b in pairs:
        total, layout = 0.0, a
        for step in redistribution.named_collectives(shape, mesh, a, b):
            total += step_seconds(mesh, shape, layout, step, 4)
            layout = step.layout
        named.append(total)
    log(f"2x2x2 on two nodes: {len(pairs)} pairs")
    return _record("2x2x2, two nodes", "shardir, seconds to the recipe's", ours, named, planning)


def _collectives(shape: tuple[int, ...], mesh: Mesh, a: Layout, b: Layout) -> int:
    layout, total = a, 0
    for step in redistribution.named_collectives(shape, mesh, a, b):
        total += step_received(mesh, shape, layout, step)
        layout = step.layout
    return total


def _large(sizes: tuple[int, ...], kind: str, log: Callable[[str], object]) -> dict[str, Any]:
    """Return a record of the CPU seconds of plans on all devices of pod2048: mesh, layouts, pairs,
    within 0.2 s, longest and total (CPU s)."""
    cluster = load("pod2048").part(prod(sizes))
    mesh, name = _mesh(sizes, cluster), "x".join(map(str, sizes))
    spent = []
    for i in range(LARGE_PAIRS):
        random, rank = Random(f"{name} {kind} {i}"), 2 + i % 2
        shape = tuple(mesh.size * random.choice([1, 4, 16]) for _ in range(rank))
        source, target = (random_layout(mesh, rank, random, LARGE_LAYOUTS[kind]) for _ in range(2))
        spent.append(_cold(shape, mesh, source, target))
    log(f"{name}, {kind}: {LARGE_PAIRS} pairs")
    return {
        "mesh": name,
        "layouts": kind,
        "pairs": LARGE_PAIRS,
        f"within {SOON} s": sum(seconds <= SOON for seconds in spent),
        "longest, CPU s": max(spent),
        "total, CPU s": sum(spent),
    }


def _cold(shape: tuple[int, ...], mesh: Mesh, source: Layout, target: Layout) -> float:
    """Return the CPU seconds in which a process that has planned nothing plans."""
    out, into = os.pipe()
    if os.fork() == 0:
        try:
            start = time.process_time()
            redistribution.plan(shape, mesh, source, target)
            os.write(into, str(time.process_time() - start).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as printed:
        found = float(printed.read())
    os.wait()
    return found
