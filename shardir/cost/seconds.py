"""How long ops take on a device: calculation by the roofline, communication by its wires.

    max(flops / rate of the element type, bytes touched / memory bandwidth) + overhead

(Williams, Waterman and Patterson, 2009.) What a cluster does not state counts nothing. A type
without a rate is calculated as the slowest that has one. Views cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.cluster import Cluster
from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import FactorAxes, Factors, placed
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.steps import Step, elements, received_by_level, step_memory
from shardir.cost import collectives
from shardir.cost.collectives import Form, levels_of
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp, itemsize, plain
from shardir.dialects.views import VIEWS, moves_nothing

FREE = tuple(kind for kind in VIEWS if kind is not nn.FoldOp)
"""Ops that calculate nothing. A reshape of what is not contiguous copies; that is not counted."""


@dataclass(frozen=True)
class OpCost:
    """What one op costs on the device on which it costs most.

    `bytes` are those that a calculation reads and writes, or that a collective receives, then over
    `axes` and in the form `form`."""

    op: Operation
    flops: int
    bytes: int
    seconds: float
    axes: Axes = ()
    form: str = ""

    @property
    def communicates(self) -> bool:
        return bool(self.axes)


def op_seconds(
    kind: type[TensorOp],
    factors: Factors,
    chosen: FactorAxes,
    types: Sequence[TensorType],
    mesh: Mesh,
) -> float:
    """The seconds of an op whose factors are split as `chosen`, without an op.

    Args:
        types: global types of the operands, then of the results.
        mesh: with the cluster of its devices.

    Raises:
        ShardirError: the op cannot be split so.
    """
    if issubclass(kind, FREE):
        return 0.0
    found = placed(factors, chosen, mesh)
    if found is None:
        raise ShardirError(f"{kind.name} cannot be split as {chosen} on the mesh {mesh}")
    layouts = (*found.operands, *found.results)
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    flops, touched = work(kind, factors, chosen, mesh, shapes, types)
    return calculation_seconds(mesh.wires, str(types[0].element_type), flops, touched)


def calculation_seconds(cluster: Cluster, element: str, flops: int, touched: int) -> float:
    """The roofline of one op, for `flops` in an element type and `touched` bytes."""
    rates = dict(cluster.flops)
    rate = rates.get(element) or min(rates.values(), default=None)
    calculating = flops / rate if rate else 0.0
    moving = touched / cluster.memory_bandwidth if cluster.memory_bandwidth else 0.0
    return max(calculating, moving) + cluster.overhead


def work(
    kind: type[TensorOp], factors: Factors, chosen: FactorAxes, mesh: Mesh,
    shapes: Sequence[Shape], types: Sequence[TensorType],
) -> tuple[int, int]:  # fmt: skip
    """Flops, and bytes read and written, of one device."""
    sizes = {f: mesh.largest(n, chosen.get(f, ())) for f, n in factors.sizes}
    touched = kind.touched(shapes)
    return kind.flops(sizes, shapes), sum(
        n * itemsize(t) for n, t in zip(touched, types, strict=True)
    )


def size_of(v: SSAValue) -> int:
    """The bytes of a value on one device, in the local view."""
    assert isinstance(v.type, TensorType)
    return prod(v.type.get_shape()) * itemsize(v.type)


def chosen_of(factors: Factors, layouts: Sequence[Layout], mesh: Mesh) -> FactorAxes:
    """How an op's factors are split where its operands, then its results, lie so."""
    chosen: FactorAxes = {}
    for dims, layout in zip((*factors.operands, *factors.results), layouts, strict=True):
        for dim, axes in zip(dims, layout.dims, strict=True):
            for f, mine in factors.assign(dim, axes, mesh)[0].items():
                if mine:
                    chosen.setdefault(f, mine)
    return chosen


def cost_of(op: Operation, mesh: Mesh) -> OpCost | None:
    """What an op of the local view costs; None for one that is not of the program.

    Raises:
        ShardirError: nothing is known of such an op.
    """
    match op:
        case ReturnOp() | train.Mark():
            return None
        case TensorOp():
            return _calculation(op, mesh)
        case dist.Collective():
            return _communication(op, mesh)
        case dist.SendOp():
            return OpCost(op, 0, 0, 0.0)
        case dist.RecvOp():
            size = size_of(op.out)
            form = collectives.direct(size, levels_of(mesh, op.axes.data))
            return OpCost(op, 0, size, form.seconds, op.axes.data, form.name)
        case _:
            raise ShardirError(f"there is no cost of {op.name}")


def _calculation(op: TensorOp, mesh: Mesh) -> OpCost:
    if isinstance(op, FREE) or moves_nothing(op, mesh) or is_number(op):
        return OpCost(op, 0, 0, 0.0)
    values = (*op.operands, *op.results)
    types = [v.type for v in values if isinstance(v.type, TensorType)]
    layouts = [l for v in values if (l := dist.layout_of(v)) is not None]
    factors = op.factors(mesh)
    chosen = chosen_of(factors, layouts, mesh) if layouts else {}
    shapes = [t.get_shape() for t in types]
    flops, touched = work(type(op), factors, chosen, mesh, shapes, types)
    seconds = calculation_seconds(mesh.wires, str(types[0].element_type), flops, touched)
    return OpCost(op, flops, touched, seconds)


def is_number(op: TensorOp) -> bool:
    """A scalar that is part of the ops that use it."""
    return isinstance(op, nn.ConstantOp) and not plain(op.out).get_shape()


def _communication(op: dist.Collective, mesh: Mesh) -> OpCost:
    axes, n = op.axes.data, mesh.extent(op.axes.data)
    levels = levels_of(mesh, axes)
    if not levels or isinstance(op, dist.LOCAL):
        return OpCost(op, 0, 0, 0.0)
    before, after = (sum(map(size_of, vs)) for vs in (op.values, op.outs))
    match op:
        case dist.AllReduceOp():
            form = collectives.all_reduce(before, levels)
            received = sum(_ring(v, n) for v in op.values)
        case dist.ReduceScatterOp():
            form, received = collectives.all_gather(n * after, levels), after * (n - 1)
        case dist.AllGatherOp():
            form, received = collectives.all_gather(n * before, levels), before * (n - 1)
        case dist.BroadcastOp():
            form, received = collectives.broadcast(before, levels), before
        case dist.GatherOp():
            form, received = collectives.gather(n * before, levels), before * (n - 1)
        case dist.ScatterOp():
            form, received = collectives.gather(n * after, levels), after
        case dist.AllToAllOp() | dist.ExchangeOp():
            form, received = _pieces(op, mesh)
        case dist.WindowsOp():
            received = sum(
                _halo(op, v, out, mesh) for v, out in zip(op.values, op.outs, strict=True)
            )
            form = collectives.direct(received, levels)
        case _:
            form, received = collectives.direct(before, levels), before
    seconds = form.seconds + _packing(op, mesh)
    return OpCost(op, 0, received, seconds, axes, form.name)


def _packing(op: dist.Collective, mesh: Mesh) -> float:
    """The seconds of copying within a device, each buffer written once and read once; several
    values are put into one."""
    joined = sum(map(size_of, op.values)) if len(op.values) > 1 else 0
    speed = mesh.wires.memory_bandwidth
    return 2 * (buffers(op, mesh) + joined) / speed if speed else 0.0


def _ring(v: SSAValue, n: int) -> int:
    """The bytes of a value that one of n devices receives in the ring of an all-reduce."""
    assert isinstance(v.type, TensorType)
    return -(-2 * prod(v.type.get_shape()) * (n - 1) // n) * itemsize(v.type)


def _pieces(op: dist.AllToAllOp | dist.ExchangeOp, mesh: Mesh) -> tuple[Form, int]:
    """Each device fetches pieces, all at once, from the levels where they are."""
    wires, seconds, received = mesh.wires.levels, 0.0, 0
    kind = op.name.removeprefix("dist.")
    for value, out in zip(op.values, op.outs, strict=True):
        have, want = dist.layout_of(value), dist.layout_of(out)
        assert have is not None and want is not None and isinstance(value.type, TensorType)
        size, shape = itemsize(value.type), dist.global_shape(value.type, mesh)
        cases = received_by_level(mesh, shape, have, Step(kind, op.axes.data, want))
        seconds += max(
            sum(n * size / l.bandwidth for n, l in zip(case, wires, strict=True)) for case in cases
        )
        received += max(map(sum, cases)) * size
    rounds = collectives.rounds(mesh.extent(op.axes.data))
    return Form("direct", rounds * wires[mesh.level(op.axes.data)].latency + seconds), received


def buffers(op: Operation, mesh: Mesh) -> int:
    """The bytes that a collective holds besides its operands and results, to pack what lies apart
    and to take apart what arrives."""
    if not isinstance(op, dist.Collective) or mesh.extent(op.axes.data) == 1:
        return 0
    total = 0
    for value, out in zip(op.values, op.outs, strict=True):
        have, want = dist.layout_of(value), dist.layout_of(out)
        assert have is not None and want is not None and isinstance(value.type, TensorType)
        match op:
            case dist.ReduceScatterOp() | dist.AllGatherOp():
                dim, concat = op.dim.value.data, -1
            case dist.AllToAllOp():
                dim, concat = op.split.value.data, op.concat.value.data
            case dist.ExchangeOp():
                dim = concat = -1
            case _:
                return 0
        shape = dist.global_shape(value.type, mesh)
        step = Step(op.name.removeprefix("dist."), op.axes.data, want, dim, concat)
        held, after = elements(mesh, shape, have), elements(mesh, shape, want)
        peak, _ = step_memory(mesh, shape, have, step, held)
        total += max(0, peak - held - after) * itemsize(value.type)
    return total


def _halo(op: dist.WindowsOp, value: SSAValue, out: SSAValue, mesh: Mesh) -> int:
    """The bytes of the rows that a device needs of others' (of a fold: that others have of its)."""
    rows = op.ends(value, out)[0]
    assert isinstance(rows.type, TensorType)
    shape, d = rows.type.get_shape(), op.dim.value.data
    row = prod((*shape[:d], *shape[d + 1 :])) * itemsize(rows.type)
    return op.windows(value, out, mesh).halo(mesh.extent(op.axes.data)) * row
