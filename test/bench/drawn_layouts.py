"""Random layouts, which several benchmarks draw."""

from random import Random

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh


def random_layout(mesh: Mesh, rank: int, random: Random, cut: bool = True) -> Layout:
    """Each axis, or with `cut` perhaps each of two parts of it, splits a dimension, is partial, or
    neither."""
    uses: list[list[Axis]] = [[] for _ in range(rank + 2)]
    for axis in random.sample(mesh.names, len(mesh.names)):
        n = mesh.extent((axis,))
        inner = random.choice([n, *(k for k in range(2, n) if n % k == 0)]) if cut else n
        for part in (axis,) if inner == n else mesh.split(axis, inner):
            random.choice(uses).append(part)
    *dims, partial, _ = map(tuple, uses)
    return Layout("m", tuple(dims)).with_partial(partial).simplified(mesh)
