"""The time of ops on a device: computation by the roofline, communication by its links.

    ratio max(flops / rate of the element type, bytes touched / memory bandwidth) + overhead

(Williams, Waterman and Patterson, 2009.) Where the cluster has a rate of operands in the type, the
bytes of a product take seconds beside its flops, as without overlap in the model of Treibig and
Hager, 2010:

    ratio (flops / rate of the element type + bytes touched / rate of operands) + overhead

The ratio is the cluster's for the op, or 1. A cluster
without rates has those of the default; other fields that it lacks cost nothing. A type without a
rate has the lowest rate of the cluster. Views cost nothing, unless the cluster has a ratio for
them: that of their time to the overhead.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import CallOp, ReturnOp
from xdsl.ir import Operation

from shardir.algebra.cluster import DEFAULT, Cluster
from shardir.algebra.factors import FactorAxes, Factors, try_op_sharding
from shardir.algebra.forms import direct, fastest, forms_of
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.analysis.aliasing import VIEWS, is_identity
from shardir.analysis.loops import Loops
from shardir.cost.collective_work import CollectiveWork, collective_work
from shardir.cost.ring_products import RingWork, ring_seconds, ring_work
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn, train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.attention import AttentionGradOp, AttentionOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.contraction import Contraction
from shardir.dialects.nn.convolution import Convolving
from shardir.dialects.nn.types import element_name, itemsize, size_of
from shardir.dialects.signatures import SignatureMemo

works = SignatureMemo()
"""The element type, the flops and the bytes of each signature on a mesh."""
costs = SignatureMemo()
"""The cost of each signature on a mesh, without the op."""

PRODUCTS = (Contraction, Convolving, AttentionOp, AttentionGradOp)
"""Ops of the cube units in MindSpore's documentation; the others are of the vector units."""

FREE = tuple(kind for kind in VIEWS if kind is not nn.FoldOp)
"""Ops without computation. The copy by a reshape of a non-contiguous value is not counted."""


class OpCost(NamedTuple):
    """The cost of one op on the device on which it costs most, in all its runs.

    `bytes` are those that a computation reads and writes, or that a collective receives, over
    `axes` and in the form `form`; `latency` of its seconds do not depend on the bytes."""

    op: Operation
    flops: int
    bytes: int
    seconds: float
    axes: Axes = ()
    form: str = ""
    latency: float = 0.0

    @property
    def communicates(self) -> bool:
        return bool(self.form)

    def times(self, runs: int) -> "OpCost":
        """Return the cost of several runs of the op, one after the other."""
        if runs == 1:
            return self
        return self._replace(
            flops=runs * self.flops, bytes=runs * self.bytes,
            seconds=runs * self.seconds, latency=runs * self.latency,
        )  # fmt: skip


def op_seconds(
    kind: type[TensorOp],
    factors: Factors,
    chosen: FactorAxes,
    types: Sequence[TensorType],
    mesh: Mesh,
) -> float:
    """Return the seconds of an op whose factors are split as `chosen`, before the op exists.

    Args:
        types: global types of the operands, then of the results.
        mesh: with the cluster of its devices.

    Raises:
        ShardirError: the op cannot be split like that.
    """
    if is_free(kind, factors, types):
        return view_seconds(mesh.cluster_or_default, kind)
    found = try_op_sharding(factors, chosen, mesh)
    if found is None:
        got = ", ".join(f"{f} over {{{', '.join(map(str, axes))}}}" for f, axes in chosen.items())
        raise ShardirError(
            f"expected a split of the factors of {kind.name} in which each axis of @{mesh.name} "
            f"splits one of them, got {got}"
        )
    layouts = (*found.operands, *found.results)
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    flops, touched = work(kind, factors, chosen, mesh, shapes, types)
    return computation_seconds(
        mesh.cluster_or_default, kind, element_name(types[0].element_type), flops, touched
    )


def computation_seconds(
    cluster: Cluster, kind: type[Operation], element: str, flops: int, touched: int
) -> float:
    """Return the seconds of an op of a kind, for `flops` in an element type and `touched`
    bytes."""
    rates = cluster.rates or DEFAULT.rates
    computing = flops / (rates.get(element) or min(rates.values()))
    moving = touched / cluster.memory_bandwidth if cluster.memory_bandwidth else 0.0
    rate = cluster.operand_rates.get(element) if issubclass(kind, PRODUCTS) else None
    spent = max(computing, moving) if rate is None else computing + touched / rate
    return cluster.op_times[kind.name] * spent + cluster.overhead


def view_seconds(cluster: Cluster, kind: type[Operation]) -> float:
    """Return the seconds of a free op."""
    known = issubclass(kind, FREE) and kind.name in cluster.op_times
    return cluster.op_times[kind.name] * cluster.overhead if known else 0.0


def work(
    kind: type[TensorOp], factors: Factors, chosen: FactorAxes, mesh: Mesh,
    shapes: Sequence[Shape], types: Sequence[TensorType],
) -> tuple[int, int]:  # fmt: skip
    """Return the flops, and the bytes read and written, of one device."""
    sizes = {f: mesh.largest(n, chosen.get(f, ())) for f, n in factors.sizes}
    touched = kind.touched(shapes)
    return kind.flops(sizes, shapes), sum(
        n * itemsize(t) for n, t in zip(touched, types, strict=True)
    )


class Work(ABC):
    """The work of an op on the device that has most of it, as far as it does not depend on the
    speed of devices and links."""

    @abstractmethod
    def cost(self, mesh: Mesh) -> OpCost:
        """Return the cost on a mesh whose cluster has the same levels, of any speed."""


@dataclass(frozen=True)
class Computation(Work):
    """The flops in an element type, and the bytes read and written."""

    op: Operation
    element: str
    flops: int
    bytes: int

    def cost(self, mesh: Mesh) -> OpCost:
        on = mesh.cluster_or_default
        seconds = computation_seconds(on, type(self.op), self.element, self.flops, self.bytes)
        return OpCost(self.op, self.flops, self.bytes, seconds)


@dataclass(frozen=True)
class Communication(Work):
    """A collective, which moves all its values together, in one form: the step of each."""

    op: dist.CollectiveOp
    moves: CollectiveWork

    def cost(self, mesh: Mesh) -> OpCost:
        values = self.moves.together_on(mesh)
        form, _ = values.fastest
        moved, axes = self.moves.moved, self.op.axes.data
        return OpCost(self.op, 0, moved, values.seconds, axes, form.name, form.latency)


@dataclass(frozen=True)
class Receipt(Work):
    """The bytes that one device receives from another."""

    op: Operation
    bytes: int
    axes: Axes

    def cost(self, mesh: Mesh) -> OpCost:
        axes = self.axes
        form = fastest(forms_of("recv", direct, mesh, axes), self.bytes)
        seconds = form.seconds(self.bytes)
        return OpCost(self.op, 0, self.bytes, seconds, axes, form.name, form.latency)


@dataclass(frozen=True)
class Called(Work):
    """The work of the function that is called: that of a stage."""

    op: CallOp
    works: tuple[Work, ...]

    def cost(self, mesh: Mesh) -> OpCost:
        costs = [work.cost(mesh) for work in self.works]
        flops = sum(c.flops for c in costs)
        touched = sum(c.bytes for c in costs if not c.communicates)
        return OpCost(self.op, flops, touched, sum(c.seconds for c in costs))


@dataclass(frozen=True)
class RingProduct(Work):
    """A product in steps beside which shards go around a ring (`cost/ring_products.py`)."""

    op: dist.RingProductOp
    steps: RingWork

    def cost(self, mesh: Mesh) -> OpCost:
        on, work = mesh.cluster_or_default, self.steps
        link = fastest(forms_of("permute", direct, mesh, self.op.axes.data), work.sent)
        step = computation_seconds(on, nn.EinsumOp, work.element, work.flops, work.touched)
        step += work.copied / on.memory_bandwidth if on.memory_bandwidth else 0.0
        seconds = ring_seconds(work.steps, step, link.seconds(work.sent), link.latency, on)
        n = work.steps
        return OpCost(self.op, n * work.flops, n * (work.touched + work.copied), seconds)


@dataclass(frozen=True)
class NoWork(Work):
    """An op that moves and computes nothing."""

    op: Operation

    def cost(self, mesh: Mesh) -> OpCost:
        return OpCost(self.op, 0, 0, view_seconds(mesh.cluster_or_default, type(self.op)))


@dataclass(frozen=True)
class Repeated(Work):
    """The work of an op in a loop."""

    once: Work
    runs: int

    def cost(self, mesh: Mesh) -> OpCost:
        return self.once.cost(mesh).times(self.runs)


def works_of(ops: Sequence[Operation], mesh: Mesh) -> Iterator[Work]:
    """Yield the work of ops of the local view, in all their runs; none of marks.

    Raises:
        ShardirError: an op has no cost.
    """
    loops = Loops(ops)
    for op in ops:
        if (work := work_of(op, mesh)) is not None:
            runs = loops.runs(op)
            yield work if runs == 1 else Repeated(work, runs)


_made = partial(tuple.__new__, OpCost)  # half the time of OpCost()


def cost_of(op: Operation, mesh: Mesh) -> OpCost | None:
    """Return the cost of one run of an op of the local view; None for a mark.

    Raises:
        ShardirError: the op has no cost.
    """

    def once() -> tuple[int, int, float, Axes, str, float] | None:
        if (found := work_of(op, mesh)) is None:
            return None
        c = found.cost(mesh)
        return c.flops, c.bytes, c.seconds, c.axes, c.form, c.latency

    found = costs.of_op(op, once, mesh)
    return None if found is None else _made((op, *found))


def work_of(op: Operation, mesh: Mesh) -> Work | None:
    """Return the work of one run of an op of the local view; None for a mark.

    Raises:
        ShardirError: the op has no cost.
    """
    match op:
        case ReturnOp() | train.Mark():
            return None
        case train.EitherOp():
            return NoWork(op)
        case train.TransferOp():
            return Receipt(op, size_of(op.out), (Axis(train.STAGE_AXIS),))
        case TensorOp():
            return _computation(op, mesh)
        case dist.CollectiveOp():
            return _communication(op, mesh)
        case dist.SendOp() | dist.WaitOp():
            return NoWork(op)
        case dist.RingProductOp():
            return RingProduct(op, ring_work(op, mesh))
        case dist.RecvOp():
            return Receipt(op, size_of(op.out), op.axes.data)
        case CallOp() if (callee := train.callee_of(op)) is not None:
            return Called(op, tuple(works_of(ops_of(callee.body.block), mesh)))
        case _:
            raise ShardirError(
                f"expected an op with a cost, got {op.name}; use ops of nn, dist and train"
            )


def _computation(op: TensorOp, mesh: Mesh) -> Work:
    types = [v.type for v in (*op.operands, *op.results) if isinstance(v.type, TensorType)]

    def once() -> tuple[str, int, int]:
        """Return the element type, the flops and the bytes; no bytes of a free op."""
        factors = op.factors(mesh)
        if is_free(type(op), factors, types):
            return "", 0, 0
        layouts = [l for t in types if (l := dist.type_layout(t)) is not None]
        chosen = factors.axes_of(layouts, mesh) if layouts else {}
        shapes = [t.get_shape() for t in types]
        element = element_name(types[0].element_type)
        return element, *work(type(op), factors, chosen, mesh, shapes, types)

    element, flops, touched = works.get_or((type(op), mesh, *types), op.properties, once)
    return Computation(op, element, flops, touched) if element else NoWork(op)


def is_free(kind: type[TensorOp], factors: Factors, types: Sequence[TensorType]) -> bool:
    """Whether an op computes nothing: a view, an identity, or a scalar constant, which is part of
    the ops that use it."""
    if issubclass(kind, nn.ConstantOp):
        return not types[-1].get_shape()
    return issubclass(kind, FREE) or is_identity(kind, factors, types)


def _communication(op: dist.CollectiveOp, mesh: Mesh) -> Work:
    if op.record.forms is None or not op.moves(mesh):
        return NoWork(op)
    return Communication(op, collective_work(op, mesh))
