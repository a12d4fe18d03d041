"""The functions of a module, each with the mesh that it runs on."""

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
"""The cluster of a mesh without one."""


def is_global(f: FuncOp) -> bool:
    """Whether the function is of the global view, with layouts."""
    return any(
        dist.layout_of(v) is not None and not dist.is_local(v.type) for v in values(f.body.block)
    )


def functions(module: ModuleOp) -> Iterator[tuple[FuncOp, Mesh]]:
    """Yield the functions with a body; one without layouts runs on one device."""
    meshes = dist.meshes_of(module)
    for f in module.body.ops:
        if isinstance(f, FuncOp) and f.body.blocks:
            layout = next(
                (l for v in values(f.body.block) if (l := dist.layout_of(v)) is not None), None
            )
            known = meshes.get(layout.mesh) if layout is not None else None
            yield f, known or Mesh("one", (("d", 1),))


def rated(mesh: Mesh) -> Mesh:
    """Return the mesh with all parameters of the time model.

    A cluster without rates gets those of DEFAULT; a mesh without cluster is on devices of DEFAULT.
    """
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
    """Return the mesh on the first devices of the cluster, else on its own cluster or DEFAULT.

    Raises:
        ShardirError: the mesh has more devices than the cluster, or its axes do not make up units.
    """
    if cluster is None and mesh.cluster is not None:
        return mesh
    found = replace(mesh, cluster=(cluster or load(DEFAULT)).part(mesh.size))
    found.check_cluster()
    return found
