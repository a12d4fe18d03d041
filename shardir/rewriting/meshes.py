"""Meshes that a pass extends."""

from dataclasses import replace

from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Level
from shardir.algebra.mesh import Mesh
from shardir.dialects.dist import ClusterAttr, ClusterOp, MeshAttr, MeshOp
from shardir.dialects.symbols import find_symbol


def with_outermost_axis(module: ModuleOp, mesh: Mesh, axis: str, size: int) -> Mesh:
    """Add an outermost axis to a mesh of a module, and a level to its cluster, with links like the
    outermost level's. Return the new mesh."""
    declared = find_symbol(module, MeshOp, mesh.name)
    assert declared is not None
    declared.properties["axes"] = MeshAttr(((axis, size), *mesh.axes))
    if declared.cluster is not None:
        cluster = find_symbol(module, ClusterOp, declared.cluster.string_value())
        assert cluster is not None
        devices = cluster.devices.data
        outermost = devices.levels[-1]
        level = Level(axis, size, outermost.bandwidth, outermost.latency)
        extended = replace(devices, levels=(*devices.levels, level))
        cluster.properties["devices"] = ClusterAttr(extended)
    return declared.mesh
