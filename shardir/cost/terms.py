"""The relative model of MindSpore's documentation: the cost of a plan, from bytes alone.

    T = alpha D_cal + beta1 D_inner + beta2 D_inter + gamma D_dp

Each D is in bytes on one device, and depends on the hardware only by the plans of redistributions.
D_cal are the bytes that computation reads and writes, D_inner those received to reduce partial
values (within an op that is split), D_inter those received to change layouts (between ops), D_dp
those received to reduce gradients before an update. The coefficients depend on the hardware. The
model compares plans of a program; it is not a time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.cluster import Cluster
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import plan
from shardir.algebra.steps import step_moved
from shardir.analysis.loops import Loops
from shardir.cost.functions import functions, is_global, on_cluster
from shardir.cost.memory import gradients
from shardir.cost.report import called, location, table
from shardir.cost.seconds import PRODUCTS, is_free, work
from shardir.dialects import dist
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import itemsize, unsharded_type


@dataclass(frozen=True)
class Coefficients:
    """The weight of a byte of each term."""

    alpha: float
    beta1: float
    beta2: float
    gamma: float

    @staticmethod
    def of(cluster: Cluster) -> "Coefficients":
        """Return seconds per byte: of model parallel communication over the innermost links, data
        parallel over the outermost. Fields that the cluster lacks cost nothing."""
        inner, outer = (1 / cluster.levels[i].bandwidth for i in (0, -1))
        memory = cluster.memory_bandwidth
        return Coefficients(1 / memory if memory else 0.0, inner, inner, outer)


@dataclass(frozen=True)
class Terms:
    """The four terms in bytes: of one op, or of several."""

    cal: int = 0
    inner: int = 0
    inter: int = 0
    dp: int = 0

    def __add__(self, other: "Terms") -> "Terms":
        pairs = zip(self.bytes, other.bytes, strict=True)
        return Terms(*(a + b for a, b in pairs))

    def times(self, runs: int) -> "Terms":
        """Return the terms of several runs."""
        return Terms(*(runs * n for n in self.bytes))

    @property
    def bytes(self) -> tuple[int, int, int, int]:
        return self.cal, self.inner, self.inter, self.dp

    def cost(self, c: Coefficients) -> float:
        """Return T."""
        return c.alpha * self.cal + c.beta1 * self.inner + c.beta2 * self.inter + c.gamma * self.dp


@dataclass(frozen=True)
class PlanCost:
    """The terms of a function with layouts: of each op with any, and their sum."""

    name: str
    mesh: Mesh
    ops: tuple[tuple[Operation, Terms], ...]
    coefficients: Coefficients

    @property
    def terms(self) -> Terms:
        return sum((t for _, t in self.ops), Terms())

    @property
    def cube(self) -> int:
        """The part of D_cal that is of the cube units."""
        return sum(t.cal for op, t in self.ops if isinstance(op, PRODUCTS))

    @property
    def cost(self) -> float:
        return self.terms.cost(self.coefficients)

    def __str__(self) -> str:
        head = "op", "location", "D_cal", "D_inner", "D_inter", "D_dp", ""
        rows: list[tuple[str, ...]] = [head]
        rows += [(called(op), location(op), *map(str, t.bytes), "") for op, t in self.ops]
        rows.append(("sum", "", *map(str, self.terms.bytes), ""))
        c, cal = self.coefficients, self.terms.cal
        return "\n".join([
            f"@{self.name} on {self.mesh} of {self.mesh.size} devices: T = {self.cost:.3g}",
            *table(rows),
            f"  D_cal: {self.cube} of products, {cal - self.cube} of other ops",
            f"  alpha = {c.alpha:.3g}, beta1 = {c.beta1:.3g}, beta2 = {c.beta2:.3g}, "
            f"gamma = {c.gamma:.3g}",
        ])  # fmt: skip


def relative(
    module: ModuleOp, cluster: Cluster | None = None, coefficients: Coefficients | None = None
) -> list[PlanCost]:
    """Return the terms of the functions with layouts, in the global view.

    Before insert-redistributions the communication of edges is missing.

    Args:
        cluster: that of the default coefficients, if not the mesh's.
    """
    found = []
    for f, mesh in functions(module):
        if is_global(f):
            c = coefficients or Coefficients.of(on_cluster(mesh, cluster).cluster_or_default)
            found.append(PlanCost(f.sym_name.data, mesh, tuple(_ops(f, mesh)), c))
    return found


def _ops(f: FuncOp, mesh: Mesh) -> Iterator[tuple[Operation, Terms]]:
    ops = ops_of(f.body.block)
    found, loops = gradients(ops), Loops(ops)
    for op in ops:
        if isinstance(op, dist.RedistributeOp):
            terms = _communication(op, mesh, op.out in found)
        elif isinstance(op, TensorOp):
            terms = Terms(cal=_touched(op, mesh))
        else:
            continue
        if any(terms.bytes):
            yield op, terms.times(loops.runs(op))


def _touched(op: TensorOp, mesh: Mesh) -> int:
    """Return the bytes that an op reads and writes on one device."""
    values: Sequence[SSAValue] = (*op.operands, *op.results)
    layouts = [l for v in values if (l := dist.layout_of(v)) is not None]
    types, factors = [unsharded_type(v) for v in values], op.factors(mesh)
    if is_free(type(op), factors, types) or len(layouts) < len(values):
        return 0
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    return work(type(op), factors, factors.axes_of(layouts, mesh), mesh, shapes, types)[1]


def _communication(op: dist.RedistributeOp, mesh: Mesh, gradient: bool) -> Terms:
    source, target = dist.layout_of(op.value), dist.layout_of(op.out)
    assert source is not None and target is not None and isinstance(op.value.type, TensorType)
    layout, target = source.simplified(mesh), target.simplified(mesh)
    shape, size = op.value.type.get_shape(), itemsize(op.value.type)
    inner = inter = 0
    for step in plan(shape, mesh, layout, target, size):
        received = step_moved(mesh, shape, layout, step) * size
        if step.record.reduces:
            inner += received
        else:
            inter += received
        layout = step.layout
    return Terms(dp=inner + inter) if gradient else Terms(inner=inner, inter=inter)
