"""The functions of a module whose cost can be said, each with the mesh that it runs on."""

from collections.abc import Iterator
from dataclasses import replace

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import values
from shardir.cost.clusters import load
from shardir.dialects import dist

DEFAULT = "gloo"
"""The cluster of a mesh that is on none."""


def is_global(f: FuncOp) -> bool:
    """Whether the function is laid out, in the global view."""
    return any(
        dist.layout_of(v) is not None and not dist.is_local(v.type) for v in values(f.body.block)
    )


def functions(module: ModuleOp) -> Iterator[tuple[FuncOp, Mesh]]:
    """The functions with a body; one without layouts runs on one device."""
    meshes = dist.meshes_of(module)
    for f in module.body.ops:
        if isinstance(f, FuncOp) and f.body.blocks:
            layout = next(
                (l for v in values(f.body.block) if (l := dist.layout_of(v)) is not None), None
            )
            known = meshes.get(layout.mesh) if layout is not None else None
            yield f, known or Mesh("one", (("d", 1),))


def rated(mesh: Mesh) -> Mesh:
    """The mesh with all that the time model needs: where its cluster says no rates they are those
    of DEFAULT, and without a cluster it is on as many devices of that."""
    cluster, usual = mesh.cluster, load(DEFAULT)
    if cluster is None:
        (level,) = usual.levels
        cluster = replace(usual, levels=(level._replace(count=mesh.size),), memory=None)
    elif not cluster.flops:
        cluster = replace(
            cluster, flops=usual.flops, memory_bandwidth=usual.memory_bandwidth,
            overhead=usual.overhead, interference=usual.interference,
        )  # fmt: skip
    return replace(mesh, cluster=cluster)


def on_cluster(mesh: Mesh, cluster: Cluster | None) -> Mesh:
    """The mesh on the first devices of the cluster; without one on its own, or on DEFAULT.

    Raises:
        ShardirError: the mesh has more devices than the cluster, or its axes do not make up units.
    """
    if cluster is None and mesh.cluster is not None:
        return mesh
    found = replace(mesh, cluster=(cluster or load(DEFAULT)).part(mesh.size))
    found.check_cluster()
    return found
