"""Laws that hold on every ready-made cluster: random cases, violations, the worst ratio.

A law is a function of a cluster's name and a source of random numbers, which makes one case and
returns a ratio that is at most 1 where the law holds. LAWS has them all; `check` runs some cases.

    triangle    planned from A to C, over planned from A to B and from B to C: random layouts over
                sub-axes, split and partial, of tensors with even and uneven shards
"""

import time
from collections.abc import Callable
from math import prod
from random import Random
from typing import Any

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.redistribution import estimated_seconds
from shardir.cost.clusters import load, names

MESHES = {
    "ascend910": [(4,), (8,), (2, 4), (4, 2), (2, 2, 2)],
    "gloo": [(4,), (6,), (8,), (2, 4), (3, 4), (4, 4), (2, 2, 2), (2, 3, 2)],
    "h200": [(8,), (16,), (2, 8), (4, 4), (2, 2, 4), (8, 8)],
    "pod2048": [(8,), (32,), (8, 4), (8, 8), (4, 16), (2, 2, 8)],
}
"""The axes of meshes on the first devices of each cluster; some cross its levels."""

TOLERANCE = 1e-9
"""The relative difference by which sums of the same terms differ."""


def random_mesh(cluster: str, random: Random) -> Mesh:
    sizes = random.choice(MESHES[cluster])
    return Mesh("m", tuple(zip("abc", sizes, strict=False)), load(cluster).part(prod(sizes)))


def random_layout(mesh: Mesh, rank: int, random: Random) -> Layout:
    """Each axis, or each of the two parts of a cut one, splits a dimension, is partial, or
    neither."""
    uses: list[list[Axis]] = [[] for _ in range(rank + 2)]
    for axis in random.sample(mesh.names, len(mesh.names)):
        n = mesh.extent((axis,))
        cut = random.choice([n, *(k for k in range(2, n) if n % k == 0)])
        for part in (axis,) if cut == n else mesh.split(axis, cut):
            random.choice(uses).append(part)
    *dims, partial, _ = map(tuple, uses)
    return Layout("m", tuple(dims)).with_partial(partial).simplified(mesh)


def random_shape(mesh: Mesh, random: Random) -> Shape:
    """A shape that all axes together split evenly, or any."""
    rank, even = random.choice([1, 2, 2, 2, 3]), random.random() < 0.7
    some = [1, 16, 500] if even else [1, 7, 100, 5000]
    return tuple((mesh.size if even else 1) * random.choice(some) for _ in range(rank))


def triangle(cluster: str, random: Random) -> float:
    mesh = random_mesh(cluster, random)
    shape = random_shape(mesh, random)
    a, b, c = (random_layout(mesh, len(shape), random) for _ in range(3))
    direct = estimated_seconds(shape, mesh, a, c, 4)
    if not direct:
        return 1.0
    detour = sum(estimated_seconds(shape, mesh, x, y, 4) for x, y in ((a, b), (b, c)))
    return direct / detour if detour else float("inf")


LAWS: dict[str, tuple[Callable[[str, Random], float], int]] = {"triangle": (triangle, 200)}
"""The laws, each with the number of its cases on each cluster."""


def check(name: str, cluster: str, cases: int) -> dict[str, Any]:
    """Return the record of some cases of a law on a cluster."""
    law, _ = LAWS[name]
    start = time.process_time()
    ratios = [law(cluster, Random(f"{name} {cluster} {i}")) for i in range(cases)]
    return {
        "law": name,
        "cluster": cluster,
        "cases": cases,
        "violations": sum(r > 1 + TOLERANCE for r in ratios),
        "worst": max(ratios),
        "worst case": ratios.index(max(ratios)),
        "CPU s": time.process_time() - start,
    }


def records(log: Callable[[str], object]) -> list[dict[str, Any]]:
    """One record per law and cluster: law, cluster, cases, violations, worst (ratio), worst case
    (its number), CPU s."""
    found = []
    for name, (_, cases) in LAWS.items():
        for cluster in names():
            found.append(check(name, cluster, cases))
            log(f"{name} on {cluster}")
    return found
