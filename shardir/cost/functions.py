"""The functions of a module, each with the mesh that it runs on."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import values
from shardir.dialects import dist
from shardir.dialects.nn.types import element_name

ONE_DEVICE = Mesh("one", (("d", 1),))
"""The mesh of functions without layouts."""


def is_global(f: FuncOp) -> bool:
    """Whether a function is in the global view and has layouts."""
    return any(
        dist.layout_of(v) is not None and not dist.is_local(v.type) for v in values(f.body.block)
    )


def functions(module: ModuleOp) -> Iterator[tuple[FuncOp, Mesh]]:
    """Yield each function with a body, and its mesh: ONE_DEVICE without layouts."""
    meshes = dist.meshes_of(module)
    for f in module.body.ops:
        if isinstance(f, FuncOp) and f.body.blocks:
            layout = next(
                (l for v in values(f.body.block) if (l := dist.layout_of(v)) is not None), None
            )
            known = meshes.get(layout.mesh) if layout is not None else None
            yield f, known or ONE_DEVICE


def on_cluster(mesh: Mesh, cluster: Cluster | None) -> Mesh:
    """Return the mesh on the first devices of the cluster; without a cluster, the mesh itself.

    Raises:
        ShardirError: the mesh has more devices than the cluster, or its axes do not make up units.
    """
    if cluster is None:
        return mesh
    placed = replace(mesh, cluster=cluster.part(mesh.size))
    placed.check_cluster()
    return placed


def narrowest_float(ops: Iterable[Operation]) -> str:
    """Return the float type of the lowest precision among the results of ops."""
    types = (v.type for op in ops for v in op.results)
    elements = {element_name(t.element_type) for t in types if isinstance(t, TensorType)}
    return next((e for e in ("bf16", "f16", "f32") if e in elements), "f64")
