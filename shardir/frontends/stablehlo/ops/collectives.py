"""Collectives, in the body of a manual computation: their replica groups as axes of the mesh."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from shardir.algebra.mesh import Axes, Axis
from shardir.build import Value, nn
from shardir.frontends.stablehlo.form import expression
from shardir.frontends.stablehlo.loops import IN_LOOP, LoopBuilder
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.meshes import axes_of_groups
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation

REDUCTIONS = {
    "add(0, 1)": "sum", "maximum(0, 1)": "max", "minimum(0, 1)": "min", "multiply(0, 1)": "prod",
    "or(0, 1)": "max", "and(0, 1)": "min",
}  # fmt: skip
"""The reductions of collectives, by the computation of their regions: `or` and `and` of booleans
are the maximum and the minimum."""


def _body(t: OpTranslation) -> ManualBuilder:
    if isinstance(t.function, LoopBuilder):
        t.refuse(f"a collective {IN_LOOP}; move it out of the loop")
    if not isinstance(t.function, ManualBuilder):
        t.refuse("a collective outside of shard_map; write the program on whole arrays")
    return t.function


def _axes(t: OpTranslation, is_ordered: bool = True) -> Axes:
    """Return the axes of the groups of a collective."""
    mesh, groups = _body(t).mesh, t["replica_groups"]
    channel = re.search(r"handle = (\d+)", str(t["channel_handle"]))
    has_channel = channel is not None and int(channel[1]) > 0
    is_global = "use_global_device_ids" in t.op.attributes
    by_replica = t.op.name in WITH_GLOBAL_IDS and not is_global
    if not has_channel or by_replica:  # ids of replicas, of which a program has one
        if has_channel and np.asarray(groups).tolist() == [[0]]:
            return mesh.names
        t.refuse("replica groups of replicas instead of devices; use jax.shard_map")
    if isinstance(groups, str) and (named := MESH_AXES.fullmatch(groups)):
        if named["mesh"] != mesh.name:
            t.refuse(f"replica groups on the mesh @{named['mesh']}, in a body on @{mesh.name}")
        return tuple(
            Axis(a["name"], int(a["pre"] or 1), int(a["size"] or 0))
            for a in AXIS.finditer(named["axes"])
        )
    if not isinstance(groups, np.ndarray):
        t.refuse(f"replica groups {groups}")
    if (groups < 0).any() or not {*groups.flat} <= {*_body(t).device_ids}:
        t.refuse("replica groups of different sizes, or of other devices than the mesh's")
    rows = [[_body(t).place(int(device)) for device in row] for row in groups]
    axes = axes_of_groups(rows if is_ordered else [sorted(r) for r in rows], mesh)
    if axes is None:
        shown = str(rows) if len(str(rows)) < 60 else f"{str(rows)[:60]}..."
        t.refuse(f"replica groups {shown}, which are no axes of the mesh {mesh}")
    return axes


MESH_AXES = re.compile(
    r"#stablehlo\.replica_group_mesh_axes<mesh = @(?P<mesh>[\w.$-]+), axes = \[(?P<axes>.*)\]>"
)
"""Replica groups by the axes of a mesh."""

AXIS = re.compile(
    r'#stablehlo\.axis_ref<name = "(?P<name>[^"]*)"'
    r"(?:, sub_axis_info = \((?P<pre>\d+)\)(?P<size>\d+))?>"
)
"""An axis of these: `#stablehlo.axis_ref<name = "x", sub_axis_info = (1)2>`."""

WITH_GLOBAL_IDS = ("stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter")
"""The collectives whose groups have replicas or, with a flag, devices."""


def _reduction(t: OpTranslation) -> str:
    """Return the reduction of the region of an op."""
    (region,) = t.op.regions
    text = expression(region)
    is_logical = text in ("or(0, 1)", "and(0, 1)")
    if text not in REDUCTIONS or (is_logical and t.element != "i1"):
        t.refuse(f"a reduction by {text}; use psum, pmax or pmin")
    if t.element == "i1":  # a sum of booleans is `or`, and a product `and`
        return {"sum": "max", "prod": "min"}.get(REDUCTIONS[text], REDUCTIONS[text])
    return REDUCTIONS[text]


def _all_reduce(t: OpTranslation, *xs: Value) -> Sequence[Value]:
    reduction, axes, body = _reduction(t), _axes(t, is_ordered=False), _body(t)
    if reduction == "prod":  # no layout is a partial product
        parts = [body.all_gather(t.reshape(x, (1, *x.shape)), 0, axes) for x in xs]
        return [x.reduce("prod", 0) for x in parts]
    return [_of_numbers(x, lambda v: body.all_reduce(v, reduction, axes)) for x in xs]


def _of_numbers(x: Value, reduce: Callable[[Value], Value]) -> Value:
    """Return the reduction of a value; booleans are reduced as integers."""
    if x.dtype != "i1":
        return reduce(x)
    return nn.convert(reduce(nn.convert(x, dtype="i32")), dtype="i1")


def _all_gather(t: OpTranslation, *xs: Value) -> Sequence[Value]:
    axes = _axes(t)
    return [_body(t).all_gather(x, t["all_gather_dim"], axes) for x in xs]


def _reduce_scatter(t: OpTranslation, x: Value) -> Value:
    reduction, dim, axes, body = _reduction(t), t["scatter_dimension"], _axes(t), _body(t)
    if reduction == "prod":
        parts = body.all_to_all(t.reshape(x, (1, *x.shape)), dim + 1, 0, axes)
        return parts.reduce("prod", 0)
    return _of_numbers(x, lambda v: body.reduce_scatter(v, reduction, dim, axes))


def _all_to_all(t: OpTranslation, *xs: Value) -> Sequence[Value]:
    axes, body = _axes(t), _body(t)
    split, concat, n = t["split_dimension"], t["concat_dimension"], t["split_count"]
    if split != concat:
        return [body.all_to_all(x, split, concat, axes) for x in xs]
    results = []
    for x in xs:  # the blocks along a dimension of their own, which moves to another one
        shape = (*x.shape[:split], 1, n, x.shape[split] // n, *x.shape[split + 1 :])
        moved = body.all_to_all(t.reshape(x, shape), split + 1, split, axes)
        results.append(t.reshape(moved, x.shape))
    return results


def _permute(t: OpTranslation, x: Value) -> Value:
    """Along the axes on which senders and receivers differ, if all groups do the same; else over
    all axes."""
    body = _body(t)
    mesh = body.mesh
    pairs = [tuple(map(body.place, pair)) for pair in np.asarray(t["source_target_pairs"]).tolist()]
    axes = tuple(
        a for a in mesh.names
        if any(mesh.coordinate(source, a) != mesh.coordinate(target, a) for source, target in pairs)
    )  # fmt: skip
    positions = {(mesh.index(s, axes), mesh.index(d, axes)) for s, d in pairs}
    if not pairs or len(positions) * (mesh.size // mesh.extent(axes)) != len(pairs):
        axes, positions = mesh.names, {(s, d) for s, d in pairs}
    return body.permute(x, [p for pair in sorted(positions) for p in pair], axes)


def _broadcast(t: OpTranslation, x: Value) -> Value:
    body, axes = _body(t), _axes(t, is_ordered=False)
    roots = {body.mesh.index(body.place(int(group[0])), axes) for group in t["replica_groups"]}
    if len(roots) > 1:
        t.refuse("a broadcast from devices at different positions of their groups")
    return body.broadcast(x, roots.pop(), axes)


def _partition_id(t: OpTranslation) -> Value:
    return _body(t).device_id(t.dtype)


def _replica_id(t: OpTranslation) -> Value:
    _body(t)
    return t.constant(0)


TABLE: dict[str, HloEntry] = {
    "stablehlo.all_reduce": _all_reduce,
    "stablehlo.all_gather": _all_gather,
    "stablehlo.reduce_scatter": _reduce_scatter,
    "stablehlo.all_to_all": _all_to_all,
    "stablehlo.collective_permute": _permute,
    "stablehlo.collective_broadcast": _broadcast,
    "stablehlo.partition_id": _partition_id,
    "stablehlo.replica_id": _replica_id,
}
