"""How long ops take on a device: calculation by the roofline, communication by its links.

    max(flops / rate of the element type, bytes touched / memory bandwidth) + overhead

(Williams, Waterman and Patterson, 2009.) What a cluster does not state counts nothing. A type
without a rate is calculated as the slowest that has one. Views cost nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.cluster import Cluster
from shardir.algebra.collectives import Step
from shardir.algebra.factors import FactorAxes, Factors, try_op_sharding
from shardir.algebra.forms import Form, copying, direct, forms_of, quickest
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.steps import step_buffers, step_forms, step_received
from shardir.analysis.aliasing import VIEWS, moves_nothing
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import element_name, itemsize, unsharded_type

FREE = tuple(kind for kind in VIEWS if kind is not nn.FoldOp)
"""Ops that calculate nothing. A reshape of what is not contiguous copies; that is not counted."""


@dataclass(frozen=True)
class OpCost:
    """What one op costs on the device on which it costs most.

    `bytes` are those that a calculation reads and writes, or that a collective receives, then over
    `axes` and in the form `form`, in which `latency` of the seconds are spent waiting."""

    op: Operation
    flops: int
    bytes: int
    seconds: float
    axes: Axes = ()
    form: str = ""
    latency: float = 0.0

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
    if issubclass(kind, FREE) or is_number(kind, types[-1]):
        return 0.0
    found = try_op_sharding(factors, chosen, mesh)
    if found is None:
        raise ShardirError(f"{kind.name} cannot be split as {chosen} on the mesh {mesh}")
    layouts = (*found.operands, *found.results)
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    flops, touched = work(kind, factors, chosen, mesh, shapes, types)
    return calculation_seconds(
        mesh.cluster_or_default, element_name(types[0].element_type), flops, touched
    )


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
        case dist.CollectiveOp():
            return _communication(op, mesh)
        case dist.SendOp() | dist.WaitOp():
            return OpCost(op, 0, 0, 0.0)
        case dist.RecvOp():
            size = size_of(op.out)
            form = quickest(forms_of("recv", direct, mesh, op.axes.data), size)
            seconds = form.seconds(size)
            return OpCost(op, 0, size, seconds, op.axes.data, form.name, form.latency)
        case _:
            raise ShardirError(f"there is no cost of {op.name}")


def _calculation(op: TensorOp, mesh: Mesh) -> OpCost:
    if (
        isinstance(op, FREE)
        or moves_nothing(op, mesh)
        or is_number(type(op), unsharded_type(op.results[0]))
    ):
        return OpCost(op, 0, 0, 0.0)
    values = (*op.operands, *op.results)
    types = [v.type for v in values if isinstance(v.type, TensorType)]
    layouts = [l for v in values if (l := dist.layout_of(v)) is not None]
    factors = op.factors(mesh)
    chosen = factors.axes_of(layouts, mesh) if layouts else {}
    shapes = [t.get_shape() for t in types]
    flops, touched = work(type(op), factors, chosen, mesh, shapes, types)
    seconds = calculation_seconds(
        mesh.cluster_or_default, element_name(types[0].element_type), flops, touched
    )
    return OpCost(op, flops, touched, seconds)


def is_number(kind: type[TensorOp], t: TensorType) -> bool:
    """A scalar that is part of the ops that use it."""
    return issubclass(kind, nn.ConstantOp) and not t.get_shape()


def _communication(op: dist.CollectiveOp, mesh: Mesh) -> OpCost:
    """All values move together, in one form."""
    axes = op.axes.data
    if not op.record.communicates or mesh.extent(axes) == 1:
        return OpCost(op, 0, 0, 0.0)
    received = sum(
        step_received(mesh, shape, before, step) * size
        for shape, before, step, size in _steps(op, mesh)
    )
    form, each = min(together(op, mesh), key=lambda way: way[0].latency + sum(way[1]))
    seconds = form.latency + sum(each) + _joining(op, mesh)
    return OpCost(op, 0, received, seconds, axes, form.name, form.latency)


def together(op: dist.CollectiveOp, mesh: Mesh) -> list[tuple[Form, list[float]]]:
    """The forms in which the values of a collective can move, each with the seconds
    that the bytes of each value take, besides the one latency."""
    ways = [
        [(form, form.rate * prod(shape) * size) for form in step_forms(mesh, shape, have, step)]
        for shape, have, step, size in _steps(op, mesh)
    ]
    return [(way[0][0], [s for _, s in way]) for way in zip(*ways, strict=True)]


def _joining(op: dist.CollectiveOp, mesh: Mesh) -> float:
    """The seconds in which several values are put into one buffer."""
    return sum(joining(v, mesh) for v in op.values) if len(op.values) > 1 else 0.0


def joining(v: SSAValue, mesh: Mesh) -> float:
    """The seconds in which a value is put into a buffer with others."""
    return copying(size_of(v), mesh)


def buffers(op: Operation, mesh: Mesh) -> int:
    """The bytes that a collective holds besides its operands and results, to pack what lies apart
    and to take apart what arrives."""
    if not isinstance(op, dist.CollectiveOp):
        return 0
    alone = len(op.values) == 1
    return sum(
        step_buffers(mesh, shape, have, step, alone) * size
        for shape, have, step, size in _steps(op, mesh)
    )


def _steps(op: dist.CollectiveOp, mesh: Mesh) -> Iterator[tuple[Shape, Layout, Step, int]]:
    """What a collective does with each of its values: the global shape, the layout before, the
    step, and the bytes of an element."""
    for value, out in zip(op.values, op.outs, strict=True):
        have = dist.layout_of(value)
        assert have is not None and isinstance(value.type, TensorType)
        yield (
            dist.global_shape(value.type, mesh),
            have,
            dist.step_of(op, value, out, mesh),
            itemsize(value.type),
        )
