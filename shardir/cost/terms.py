"""The relative model of MindSpore's documentation: the cost of a plan, from bytes alone.

    T = alpha D_cal + beta1 D_inner + beta2 D_inter + gamma D_dp

    D_cal      read and written by computation
    D_inner    received to reduce partial values (within an op that is split)
    D_inter    received to change layouts (between ops)
    D_dp       received to reduce gradients before an update

Each D is in bytes of one device. The hardware changes it only through the plans of redistributions;
the coefficients depend on the hardware. T compares plans of a program, and is not a time.
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
from shardir.cost.report import op_text, table
from shardir.cost.seconds import PRODUCTS, flops_and_bytes, is_free
from shardir.dialects import dist
from shardir.dialects.blocks import ops_of
from shardir.dialects.locations import short_location
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
        """Return the seconds of a byte: beta1 and beta2 over the innermost links, gamma over the
        outermost, alpha 0 if the cluster has no memory bandwidth."""
        inner, outer = (1 / cluster.levels[i].bandwidth for i in (0, -1))
        memory = cluster.memory_bandwidth
        return Coefficients(1 / memory if memory else 0.0, inner, inner, outer)


@dataclass(frozen=True)
class Terms:
    """The four terms of one or several ops, in bytes."""

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
    """The terms of a function with layouts, by op; ops whose terms are 0 are left out."""

    name: str
    mesh: Mesh
    ops: tuple[tuple[Operation, Terms], ...]
    coefficients: Coefficients

    @property
    def terms(self) -> Terms:
        return sum((t for _, t in self.ops), Terms())

    @property
    def cube(self) -> int:
        """The part of D_cal on the cube units, in bytes."""
        return sum(t.cal for op, t in self.ops if isinstance(op, PRODUCTS))

    @property
    def cost(self) -> float:
        return self.terms.cost(self.coefficients)

    def __str__(self) -> str:
        head = "op", "location", "D_cal", "D_inner", "D_inter", "D_dp", ""
        rows: list[tuple[str, ...]] = [head]
        rows += [(op_text(op), short_location(op), *map(str, t.bytes), "") for op, t in self.ops]
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
    """Return the costs of the functions in the global view that have layouts.

    Without redistributions in the IR (before insert-redistributions) D_inter is 0.

    Args:
        cluster: of the default coefficients; the mesh's own if None.
    """
    costs = []
    for f, mesh in functions(module):
        if is_global(f):
            c = coefficients or Coefficients.of(on_cluster(mesh, cluster).cluster_or_default)
            costs.append(PlanCost(f.sym_name.data, mesh, tuple(_op_terms(f, mesh)), c))
    return costs


def _op_terms(f: FuncOp, mesh: Mesh) -> Iterator[tuple[Operation, Terms]]:
    """Yield the ops whose terms are not all 0, with the terms of all their runs."""
    ops = ops_of(f.body.block)
    reduced, loops = gradients(ops), Loops(ops)
    for op in ops:
        if isinstance(op, dist.RedistributeOp):
            terms = _received_bytes(op, mesh, op.out in reduced)
        elif isinstance(op, TensorOp):
            terms = Terms(cal=_touched_bytes(op, mesh))
        else:
            continue
        if any(terms.bytes):
            yield op, terms.times(loops.runs(op))


def _touched_bytes(op: TensorOp, mesh: Mesh) -> int:
    """Return the bytes that an op reads and writes on one device."""
    values: Sequence[SSAValue] = (*op.operands, *op.results)
    layouts = [l for v in values if (l := dist.layout_of(v)) is not None]
    types, factors = [unsharded_type(v) for v in values], op.factors(mesh)
    if is_free(type(op), factors, types) or len(layouts) < len(values):
        return 0
    shapes = [l.local_shape(mesh, t.get_shape()) for l, t in zip(layouts, types, strict=True)]
    chosen = factors.axes_of(layouts, mesh)
    return flops_and_bytes(type(op), factors, chosen, mesh, shapes, types)[1]


def _received_bytes(op: dist.RedistributeOp, mesh: Mesh, gradient: bool) -> Terms:
    """Return the bytes that the steps of a redistribution's plan receive."""
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
