"""The meshes that `search-mesh` tries, and the choice of the fastest by bounds.

8 devices, at most 2 axes    2 x 4, 4 x 2; not 8, which both refine
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from operator import mul
from string import ascii_lowercase
from typing import NamedTuple

from shardir.algebra.cluster import Cluster
from shardir.algebra.estimates import IMPROVEMENT, ranked
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.diagnostics import Failure, ShardirError


class MeshEstimate(NamedTuple):
    """The estimated time of a program's plan on a mesh, in seconds, and a lower bound of it; or the
    error if there is no plan."""

    objective: float
    bound: float
    error: Failure | None = None


def mesh_candidates(name: str, devices: int, axes: int, cluster: Cluster | None) -> list[Mesh]:
    """Return the meshes of this many devices with at most `axes` axes, each once: none that another
    one refines.

    Raises:
        ShardirError: there are no devices, no mesh has so few axes, or the axes of none make up
            units of the cluster.
    """
    if devices < 1:
        raise ShardirError(
            f"expected at least 1 device, got {devices}; write search-mesh{{devices=8}}"
        )
    part = cluster and cluster.part(devices)
    found: dict[Shape, Mesh] = {}
    error = None
    for shape in shapes(devices, axes):
        mesh = Mesh(name, tuple(zip(ascii_lowercase, shape or (1,), strict=False)), part)
        try:
            mesh.check_cluster()
            found[shape] = mesh
        except ShardirError as e:
            error = e
    if not found:
        raise error or ShardirError(
            f"expected at least 1 axis of a mesh, got {axes}; write search-mesh{{axes=2}}"
        )
    return [m for s, m in found.items() if not any(refines(other, s) for other in found)]


def shapes(devices: int, axes: int) -> Iterator[Shape]:
    """Yield the factorisations of a number of devices into at most `axes` sizes above 1, in every
    order."""
    if devices == 1:
        yield ()
    elif axes == 1:
        yield (devices,)
    elif axes > 1:
        for first in range(2, devices + 1):
            if devices % first == 0:
                yield from ((first, *rest) for rest in shapes(devices // first, axes - 1))


def refines(one: Shape, other: Shape) -> bool:
    """Whether a shape is another one with axes that are split further."""
    return set(accumulate(one, mul)) > set(accumulate(other, mul))


def fastest_mesh(
    meshes: Sequence[Mesh],
    bound: Callable[[Mesh], MeshEstimate],
    plan: Callable[[Mesh], MeshEstimate],
    report: Callable[[str], object],
) -> Mesh:
    """Return the mesh with the fastest plan; of equally fast ones (algebra/estimates.py) the one
    that the fast search finds faster, then the first.

    Args:
        bound: a fast search with a lower bound, run on all meshes.
        plan: the full search, run in the order of the fast one's plans where the bound is below
            the best plan so far.
        report: receives a line for each mesh.

    Raises:
        Failure: no mesh has a plan.
    """
    rough = ranked([(bound(m), m) for m in meshes], lambda e: e[0].objective, lambda _: 0)
    best: tuple[MeshEstimate, Mesh] | None = None
    errors: list[Failure] = []
    for _, (estimate, mesh) in rough:
        if best is not None and estimate.bound >= best[0].objective * IMPROVEMENT:
            report(f"{mesh}: at least {estimate.bound:.6g} s")
            continue
        found = estimate if estimate.error else plan(mesh)
        if found.error is not None:
            errors.append(found.error)
            report(f"{mesh} is left out: {found.error}")
            continue
        report(f"{mesh}: {found.objective:.6g} s")
        if best is None or found.objective < best[0].objective * IMPROVEMENT:
            best = found, mesh
    if best is None:
        raise errors[0]
    return best[1]
