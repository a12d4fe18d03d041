"""The devices for which a model is compiled: a mesh, or a cluster whose mesh a search chooses."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardir import pipelines
from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.build.module import cluster_of
from shardir.cost.clusters import names
from shardir.diagnostics import ShardirError, did_you_mean

MeshForm = str | Mapping[str, int] | Mesh | Cluster
"""The forms of a mesh. For a cluster, or the name of one, a search chooses the mesh."""


SEARCH = "search"
"""The value of `stages` by which a search chooses the mesh, the stages and the schedule."""


class Devices(NamedTuple):
    """A mesh, its cluster, and the options of the compilation."""

    mesh: str | Mapping[str, int] | Mesh | None
    cluster: str | Cluster | None
    options: dict[str, Any]


def devices_of(
    mesh: MeshForm | None,
    cluster: str | Cluster | None,
    count: int | None,
    options: Mapping[str, Any],
) -> Devices:
    """Return the devices for the arguments and `options` of a compilation. With only a cluster or a
    number of devices, the mode auto searches for the mesh.

    Raises:
        ShardirError: the arguments exclude each other, or the cluster does not exist.
    """
    if isinstance(mesh, Cluster) or (isinstance(mesh, str) and mesh in names()):
        if cluster is not None:
            raise ShardirError("expected one cluster, got one as mesh and one as cluster; drop one")
        mesh, cluster = None, mesh
    if isinstance(mesh, str) and mesh.isidentifier():
        hint = did_you_mean(mesh, names())
        raise ShardirError(f'expected a mesh, "dp = 2, tp = 4", or a cluster, got {mesh}{hint}')
    remaining = {name: x for name, x in options.items() if name not in ("stages", "sync")}
    in_stages = options.get("stages") == SEARCH
    if in_stages and (mesh is not None or (cluster is None and count is None)):
        raise ShardirError(
            'expected a cluster or a number of devices with stages="search", which searches for '
            "the mesh, got a mesh, or none of them; give cluster=..., or a schedule and ranks: "
            'stages="search, ranks = 4"'
        )
    if mesh is not None:
        if count is not None:
            raise ShardirError(
                f"expected devices without a mesh, which has them, got both: {count}; drop one"
            )
        return Devices(mesh, cluster, remaining)
    if cluster is None and count is None:
        return Devices(None, None, remaining)
    for option in ("plan", "pipeline", "stages", "sync"):
        if options.get(option) is not None and not (option == "stages" and in_stages):
            raise ShardirError(
                f"expected a mesh beside a {option}, got none; give mesh=..., or drop {option}: a "
                "mesh is searched for in the mode auto"
            )
    auto = pipelines.pipeline_of(None, remaining.pop("mode", None) or "auto", "")
    passes: Any = pipelines.build(auto)
    search = next((p for p in passes if p.name == pipelines.SEARCH), None)
    if search is None:
        raise ShardirError(
            "expected the mode auto without a mesh, which searches for one, got a mode without a "
            'search; give mesh="dp = 2", or drop mode'
        )
    size = cluster_of(cluster).units[-1] if cluster is not None else count
    if count is not None and not 1 <= count <= (size or 0):
        most = (
            "at least 1 device" if cluster is None else f"1 to {size} devices, as the cluster has"
        )
        raise ShardirError(f"expected {most}, got {count}")
    search_pass = f"search-mesh{{memory={search.memory}}}"
    if in_stages:  # a batch stays as the examples are
        search_pass = f"search-stages{{memory={search.memory} divide=false}}"
    remaining["pipeline"] = f"{search_pass},{auto}"
    return Devices({"d": count or size or 0}, cluster, remaining)
