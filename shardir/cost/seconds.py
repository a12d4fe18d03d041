"""The seconds of ops on a device: computation by the roofline, communication by its links.

    ratio max(flops / rate of the element type, bytes touched / memory bandwidth) + overhead

(Williams, Waterman and Patterson, 2009.) If the cluster has a rate of operands for the element
type, the bytes of a product add to its flops (Treibig and Hager, 2010, without overlap):

    ratio (flops / rate of the element type + bytes touched / rate of operands) + overhead

The ratio is the cluster's for the op, or for the op that it is `TIMED_AS`, or 1. A cluster without
rates takes the default's; any other missing field costs nothing. An element type without a rate
takes the cluster's lowest. A view costs nothing, or, if the cluster has a ratio for it, that ratio
of the overhead.
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
"""Element type, flops and bytes, by signature and mesh."""
costs = SignatureMemo()
"""The fields of `OpCost` but for the op, by signature and mesh."""

PRODUCTS = (Contraction, Convolving, AttentionOp, AttentionGradOp)
"""Ops of the cube units in MindSpore's documentation; other ops run on the vector units."""

FREE = tuple(kind for kind in VIEWS if kind is not nn.FoldOp)
"""Ops without computation. The copy that a reshape of a non-contiguous value makes is free too."""


class OpCost(NamedTuple):
    """The cost of an op on the device on which it costs most, in all its runs.

    Attributes:
        bytes: read and written by a computation, received by a collective.
        axes: of a collective; empty for a host copy.
        form: the name of a collective's fastest form; empty for a computation.
        latency: the part of the seconds that does not depend on the bytes.
    """

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
    sharding = try_op_sharding(factors, chosen, mesh)
    if sharding is None:
        got = ", ".join(f"{f} over {{{', '.join(map(str, axes))}}}" for f, axes in chosen.items())
        raise ShardirError(
            f"expected a split of the factors of {kind.name} in which each axis of @{mesh.name} "
            f"splits one of them, got {got}"
        )
    layouts = (*sharding.operands, *sharding.results)
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    flops, touched = flops_and_bytes(kind, factors, chosen, mesh, shapes, types)
    return computation_seconds(
        mesh.cluster_or_default, kind, element_name(types[0].element_type), flops, touched
    )


def computation_seconds(
    cluster: Cluster, kind: type[Operation], element: str, flops: int, touched: int
) -> float:
    """Return the seconds of an op that does `flops` in an element type and touches `touched`
    bytes."""
    rates = cluster.rates or DEFAULT.rates
    computing = flops / (rates.get(element) or min(rates.values()))
    moving = touched / cluster.memory_bandwidth if cluster.memory_bandwidth else 0.0
    rate = cluster.operand_rates.get(element) if issubclass(kind, PRODUCTS) else None
    seconds = max(computing, moving) if rate is None else computing + touched / rate
    name = kind.name if kind.name in cluster.op_times else getattr(kind, "TIMED_AS", kind.name)
    return cluster.op_times[name] * seconds + cluster.overhead


def view_seconds(cluster: Cluster, kind: type[Operation]) -> float:
    """Return the seconds of a free op."""
    has_ratio = issubclass(kind, FREE) and kind.name in cluster.op_times
    return cluster.op_times[kind.name] * cluster.overhead if has_ratio else 0.0


def flops_and_bytes(
    kind: type[TensorOp], factors: Factors, chosen: FactorAxes, mesh: Mesh,
    shapes: Sequence[Shape], types: Sequence[TensorType],
) -> tuple[int, int]:  # fmt: skip
    """Return the flops of one device, and the bytes that it reads and writes.

    Args:
        chosen: the axes that split each factor.
        shapes: local shapes of the operands, then of the results.
        types: their types.
    """
    sizes = {f: mesh.largest(n, chosen.get(f, ())) for f, n in factors.sizes}
    elements = zip(kind.touched(shapes), types, strict=True)
    return kind.flops(sizes, shapes), sum(n * itemsize(t) for n, t in elements)


class Work(ABC):
    """The work of an op on the device that has most of it, whatever the speed of the cluster."""

    @abstractmethod
    def cost(self, mesh: Mesh) -> OpCost:
        """Return the cost on a mesh whose cluster has levels of equal sizes, of any speed."""


@dataclass(frozen=True)
class Computation(Work):
    """The flops in an element type, and the bytes read and written."""

    op: Operation
    element: str
    flops: int
    bytes: int

    def cost(self, mesh: Mesh) -> OpCost:
        seconds = computation_seconds(
            mesh.cluster_or_default, type(self.op), self.element, self.flops, self.bytes
        )
        return OpCost(self.op, self.flops, self.bytes, seconds)


@dataclass(frozen=True)
class Communication(Work):
    """A collective, which moves all its values in one form."""

    op: dist.CollectiveOp
    work: CollectiveWork

    def cost(self, mesh: Mesh) -> OpCost:
        times, axes = self.work.times_on(mesh), self.op.axes.data
        form, _ = times.fastest
        return OpCost(self.op, 0, self.work.moved, times.seconds, axes, form.name, form.latency)


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
class Together(Work):
    """The work of the ops of an op: of a stage's function that is called, or of one run of a loop
    whose number of runs depends on values."""

    op: Operation
    works: tuple[Work, ...]

    def cost(self, mesh: Mesh) -> OpCost:
        costs = [work.cost(mesh) for work in self.works]
        flops = sum(c.flops for c in costs)
        touched = sum(c.bytes for c in costs if not c.communicates)
        return OpCost(self.op, flops, touched, sum(c.seconds for c in costs))


@dataclass(frozen=True)
class RingProduct(Work):
    """A product in steps beside transfers around a ring (`cost/ring_products.py`)."""

    op: dist.RingProductOp
    work: RingWork

    def cost(self, mesh: Mesh) -> OpCost:
        on, work = mesh.cluster_or_default, self.work
        link = fastest(forms_of("permute", direct, mesh, self.op.axes.data), work.sent)
        step = computation_seconds(on, nn.EinsumOp, work.element, work.flops, work.touched)
        step += work.copied / on.memory_bandwidth if on.memory_bandwidth else 0.0
        seconds = ring_seconds(work.steps, step, link.seconds(work.sent), link.latency, on)
        n = work.steps
        return OpCost(self.op, n * work.flops, n * (work.touched + work.copied), seconds)


@dataclass(frozen=True)
class NoWork(Work):
    """An op that moves and computes nothing, such as a view."""

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
    """Yield the work of each op of the local view but marks, in all its runs.

    Raises:
        ShardirError: an op has no cost.
    """
    loops = Loops(ops)
    for op in ops:
        if (work := work_of(op, mesh)) is not None:
            runs = loops.runs(op)
            yield work if runs == 1 else Repeated(work, runs)


_new_op_cost = partial(tuple.__new__, OpCost)  # half the time of OpCost()


def cost_of(op: Operation, mesh: Mesh) -> OpCost | None:
    """Return the cost of one run of an op of the local view; None for a mark.

    Raises:
        ShardirError: the op has no cost.
    """

    def once() -> tuple[int, int, float, Axes, str, float] | None:
        if (work := work_of(op, mesh)) is None:
            return None
        c = work.cost(mesh)
        return c.flops, c.bytes, c.seconds, c.axes, c.form, c.latency

    fields = once() if op.regions else costs.of_op(op, once, mesh)  # no signature has regions
    return None if fields is None else _new_op_cost((op, *fields))


def work_of(op: Operation, mesh: Mesh) -> Work | None:
    """Return the work of one run of an op of the local view; None for a mark.

    Raises:
        ShardirError: the op has no cost.
    """
    match op:
        case ReturnOp() | nn.YieldOp() | train.Mark():
            return None
        case train.EitherOp():
            return NoWork(op)
        case train.TransferOp():
            return Receipt(op, size_of(op.out), (Axis(train.STAGE_AXIS),))
        case nn.WhileOp():
            return Together(
                op, tuple(w for r in op.regions for w in works_of(ops_of(r.block), mesh))
            )
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
            return Together(op, tuple(works_of(ops_of(callee.body.block), mesh)))
        case _:
            raise ShardirError(
                f"expected an op with a cost, got {op.name}; use ops of nn, dist and train"
            )


def _computation(op: TensorOp, mesh: Mesh) -> Work:
    types = [v.type for v in (*op.operands, *op.results) if isinstance(v.type, TensorType)]

    def once() -> tuple[str, int, int]:
        """Return the element type, the flops and the bytes; "", 0, 0 for a free op."""
        factors = op.factors(mesh)
        if is_free(type(op), factors, types):
            return "", 0, 0
        layouts = [l for t in types if (l := dist.type_layout(t)) is not None]
        chosen = factors.axes_of(layouts, mesh) if layouts else {}
        shapes = [t.get_shape() for t in types]
        element = element_name(types[0].element_type)
        return element, *flops_and_bytes(type(op), factors, chosen, mesh, shapes, types)

    element, flops, touched = works.get_or((type(op), mesh, *types), op.properties, once)
    return Computation(op, element, flops, touched) if element else NoWork(op)


def is_free(kind: type[TensorOp], factors: Factors, types: Sequence[TensorType]) -> bool:
    """Whether an op computes nothing: a view, an identity, or a scalar constant, which its users
    contain."""
    if issubclass(kind, nn.ConstantOp):
        return not types[-1].get_shape()
    return issubclass(kind, FREE) or is_identity(kind, factors, types)


def _communication(op: dist.CollectiveOp, mesh: Mesh) -> Work:
    if op.record.forms is None or not op.moves(mesh):
        return NoWork(op)
    return Communication(op, collective_work(op, mesh))
