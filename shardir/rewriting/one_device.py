"""Manual computations on one device: their bodies for all devices of the mesh, one after another.

    %y = dist.manual @body(%x) over <d = 2> strategy<(({d},),) -> (({d},),)>
 -> %x_0 = nn.slice %x from <0> to <2>      %x_1 = nn.slice %x from <2> to <4>
    ...                                     each op of the body on both
    %y = nn.concat %y_0, %y_1 axis 0

A collective becomes the ops that combine the values of its group. Devices with the same operands
share an op.
"""

from collections.abc import Callable, Sequence
from functools import reduce

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import shard_bounds
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn
from shardir.dialects.blocks import of_kind, ops_in, ops_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.placement import layout_at
from shardir.rewriting.rewriter import Rewriter, erase

MAX_DEVICES = 64
"""Bounds the devices for each of which one device computes the ops of a body."""

DeviceValues = list[SSAValue]
"""The value of each device of a mesh, or of a group."""


def unroll_manual(module: ModuleOp) -> None:
    """Replace the manual computations of a module, and erase their functions.

    Raises:
        ShardirError: a body has an op whose shards one device does not compute.
    """
    manual = of_kind(list(ops_in(module)), ManualOp)
    functions: dict[FuncOp, None] = {op.function: None for op in manual}
    for op in manual:
        Rewriter.replace(op, _Unrolling(op).results())
    for f in functions:
        erase(f)


class _Unrolling:
    """The ops of a manual computation for all devices."""

    def __init__(self, op: ManualOp):
        self.op, self.mesh, self.b = op, op.mesh, Rewriter().before(op)
        self.values: dict[SSAValue, DeviceValues] = {}
        self.made: dict[tuple[Operation, tuple[SSAValue, ...]], Sequence[SSAValue]] = {}
        self.slices: dict[tuple[SSAValue, tuple[tuple[int, int], ...]], SSAValue] = {}
        if self.mesh.size > MAX_DEVICES:
            message = f"expected at most {MAX_DEVICES} devices of shard_map, got {self.mesh.size}"
            raise ShardirError(f"{message}; use a smaller mesh")

    def results(self) -> DeviceValues:
        block = self.op.function.body.block
        for arg, v in zip(block.args, self.op.operands, strict=True):
            layout, shape = layout_at(arg), unsharded_type(v).get_shape()
            self.values[arg] = [
                self._part(v, [(s.start, s.stop) for s in layout.slices(self.mesh, shape, rank)])
                for rank in range(self.mesh.size)
            ]
        for op in ops_of(block):
            if isinstance(op, ReturnOp):
                break
            self.b.location = op.location
            if isinstance(op, TensorOp):
                self._tensor_op(op)
            elif isinstance(op, dist.CollectiveOp) and op.record.name in COMBINED:
                for v, out in zip(op.values, op.outs, strict=True):
                    self.values[out] = self._combined(op, self.values[v])
            else:
                raise ShardirError(f"expected an op that one device computes, got {op.name}")
        assert isinstance(op, ReturnOp)
        return [
            self._assembled(self.values[v], layout_at(v), unsharded_type(out).get_shape())
            for v, out in zip(op.operands, self.op.results, strict=True)
        ]

    def _tensor_op(self, op: TensorOp) -> None:
        split = any(axes for v in (*op.operands, *op.results) for axes in layout_at(v).dims)
        if split and not isinstance(op, nn.IotaOp):
            raise ShardirError(
                f"expected values that are whole on a device, got those of {op.name}"
            )
        for v in op.results:
            self.values[v] = []
        for rank in range(self.mesh.size):
            operands = tuple(self.values[v][rank] for v in op.operands)
            if split and isinstance(op, nn.IotaOp):
                results: Sequence[SSAValue] = [self._indices(op, rank)]
            elif (op, operands) in self.made:
                results = self.made[op, operands]
            else:
                types = [unsharded_type(v) for v in op.results]
                results = self.b.create(
                    type(op), operands, types, op.properties, names=op.results,
                    regions=[region.clone() for region in op.regions],
                ).results  # fmt: skip
                self.made[op, operands] = results
            for v, result in zip(op.results, results, strict=True):
                self.values[v].append(result)

    def _indices(self, op: nn.IotaOp, rank: int) -> SSAValue:
        """The indices of a device's shard of an iota."""
        t, dim = unsharded_type(op.out), op.dim.value.data
        shape = dist.global_shape(op.out.type, self.mesh)
        start = layout_at(op.out).slices(self.mesh, shape, rank)[dim].start
        own = self.b.create(nn.IotaOp, [], [t], {"dim": int_attr(dim)}).out
        return self.b.add(own, self.b.constant(start, t.element_type))

    def _combined(self, op: dist.CollectiveOp, parts: DeviceValues) -> DeviceValues:
        new = list(parts)
        for group in self.mesh.groups(op.axes.data):
            results = COMBINED[op.record.name](self, op, [parts[r] for r in group])
            for rank, x in zip(group, results, strict=True):
                new[rank] = x
        return new

    # ---- values ----

    def _part(self, v: SSAValue, bounds: Sequence[tuple[int, int]]) -> SSAValue:
        shape = unsharded_type(v).get_shape()
        if all(b == (0, n) for b, n in zip(bounds, shape, strict=True)):
            return v
        key = v, tuple(bounds)
        if key not in self.slices:
            starts, limits = ([b[i] for b in bounds] for i in range(2))
            self.slices[key] = self.b.slice(v, starts, limits)
        return self.slices[key]

    def shard(self, v: SSAValue, dim: int, n: int, k: int) -> SSAValue:
        """Part `k` of `n` of a value along a dimension."""
        bounds = [(0, size) for size in unsharded_type(v).get_shape()]
        bounds[dim] = shard_bounds(bounds[dim][1], n, k)
        return self._part(v, bounds)

    def concat(self, parts: Sequence[SSAValue], dim: int) -> SSAValue:
        if len(parts) == 1:
            return parts[0]
        return self.b.value(nn.ConcatOp, *parts, props={"axis": int_attr(dim)})

    def reduced(self, op: dist.CollectiveOp, group: DeviceValues) -> SSAValue:
        kind = op.as_step(op.outs[0]).reduction
        kinds = {"sum": nn.AddOp, "mean": nn.AddOp, "max": nn.MaxOp, "min": nn.MinOp}
        total = reduce(lambda x, y: self.b.value(kinds[kind], x, y), group)
        return self.b.scale(total, 1 / len(group)) if kind == "mean" else total

    def _assembled(self, parts: DeviceValues, layout: Layout, shape: Shape) -> SSAValue:
        pieces: dict[tuple[int, ...], SSAValue] = {}
        for rank, x in enumerate(parts):
            slices = layout.slices(self.mesh, shape, rank)
            pieces.setdefault(tuple(s.start for s in slices), x)
        for d in reversed(range(len(shape))):
            rows: dict[tuple[int, ...], DeviceValues] = {}
            for at in sorted(pieces):
                rows.setdefault(at[:d], []).append(pieces[at])
            pieces = {at: self.concat(row, d) for at, row in rows.items()}
        return pieces[()]


def _scattered(u: _Unrolling, op: dist.CollectiveOp, group: DeviceValues) -> DeviceValues:
    total, dim = u.reduced(op, group), op.as_step(op.outs[0]).dim
    return [u.shard(total, dim, len(group), k) for k in range(len(group))]


def _exchanged(u: _Unrolling, op: dist.CollectiveOp, group: DeviceValues) -> DeviceValues:
    step, n = op.as_step(op.outs[0]), len(group)
    return [
        u.concat([u.shard(x, step.dim, n, k) for x in group], step.concat) for k in range(n)
    ]  # fmt: skip


def _permuted(u: _Unrolling, op: dist.CollectiveOp, group: DeviceValues) -> DeviceValues:
    step = op.as_step(op.outs[0])
    sources = {target: source for source, target in op.record.passes(step, len(group))}
    return [
        group[sources[k]] if k in sources else u.b.zeros(unsharded_type(x))
        for k, x in enumerate(group)
    ]


Combine = Callable[[_Unrolling, dist.CollectiveOp, DeviceValues], DeviceValues]

COMBINED: dict[str, Combine] = {
    "reinterpret": lambda u, op, group: group,
    "all_reduce": lambda u, op, group: [u.reduced(op, group)] * len(group),
    "reduce_scatter": _scattered,
    "all_gather": lambda u, op, group: [u.concat(group, op.as_step(op.outs[0]).dim)] * len(group),
    "all_slice": lambda u, op, group: [
        u.shard(x, op.as_step(op.outs[0]).dim, len(group), k) for k, x in enumerate(group)
    ],
    "all_to_all": _exchanged,
    "permute": _permuted,
    "broadcast": lambda u, op, group: [group[op.as_step(op.outs[0]).root]] * len(group),
}
"""What a collective is on one device, by the name of its record."""
