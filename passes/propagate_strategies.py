"""propagate-strategies: layouts on some values, strategies on some ops -> a layout on every value.

    %h = nn.matmul %x, %w : (tensor<8x4xf32, #dist.layout<@m, [{dp}, {}]>>,
                             tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<8x6xf32>
 -> %h = nn.matmul %x, %w : (...) -> tensor<8x6xf32, #dist.layout<@m, [{dp}, {tp}]>>

1. A layout that the text states is never changed. An op with a strategy decides its results.
2. Axes spread along factors, forward and backward, to a fixed point; the order is fixed.
3. Where proposals for a factor compete, activations come before parameters, so that a weight that
   is split over the batch's axis does not unsplit the batch; then what splits more.
4. An axis is added to a value only where it is not in use in that value.
5. Inputs that nothing reaches are split by rows over the axes that nothing uses: data parallel.
6. What is still open is replicated.
"""

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import FactorAxes, Factors, Placement
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.base import TensorOp, has_parts
from shardir.dialects.train import arg_attrs
from shardir.passes.functions import (
    bodies,
    is_local_body,
    mesh_of,
    name_of,
    set_type,
    update_signature,
    values,
)
from shardir.syntax.diagnostics import Failure

Known = tuple[Axes | None, ...]
"""Per dimension: the axes that are known to split it; None is open."""


@dataclass(frozen=True)
class PropagateStrategies(ModulePass):
    """Spreads layouts and strategies from some values and ops to all."""

    name = "propagate-strategies"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        faults: list[tuple[Operation | None, str]] = []
        for f, block in bodies(op):
            try:
                mesh = mesh_of(f, op)
                if mesh is not None and not is_local_body(block):
                    _Propagation(f, block, mesh).run()
            except Failure as e:
                faults += e.faults
        if faults:
            raise Failure(faults)


def strategy_placement(op: TensorOp, mesh: Mesh) -> Placement:
    """The placement that an op's strategy states.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    assert op.strategy is not None
    factors = op.factors()
    if has_parts(type(op)):
        factors = replace(factors, replicate=frozenset())
    return op.strategy.data.placement(factors, mesh)


class _Propagation:
    def __init__(self, f: FuncOp, block: Block, mesh: Mesh):
        self.f, self.block, self.mesh = f, block, mesh
        self.known: dict[SSAValue, Known] = {}
        self.fixed: set[SSAValue] = set()
        self.parameters: set[SSAValue] = set()

    def run(self) -> None:
        self.read()
        self.spread(list(self.block.ops))
        self.split_inputs()
        for v in values(self.block):
            if isinstance(v.type, TensorType) and v not in self.fixed:
                dims = tuple(axes or () for axes in self.known[v])
                set_type(v, with_layout(v.type, Layout(self.mesh.name, dims)))
        update_signature(self.f)

    def read(self) -> None:
        """What the text states: layouts of values, strategies of ops."""
        faults: list[tuple[Operation | None, str]] = []
        for v in values(self.block):
            if not isinstance(v.type, TensorType):
                continue
            if (layout := layout_of(v)) is None:
                self.known[v] = (None,) * len(v.type.get_shape())
                continue
            layout = layout.simplified(self.mesh)
            set_type(v, with_layout(v.type, layout))
            self.known[v] = layout.dims
            self.fixed.add(v)
        for arg, attrs in zip(self.block.args, arg_attrs(self.f), strict=True):
            if "train.parameter" in attrs or "train.state" in attrs:
                self.parameters.add(arg)
        for op in self.block.ops:
            if isinstance(op, CallOp):
                faults.append((op, "layouts do not spread through calls; inline the function"))
            if isinstance(op, TensorOp) and op.strategy is not None:
                try:
                    self.apply_strategy(op)
                except ShardirError as e:
                    faults.append((op, f"{op.name} in @{name_of(self.f)}: {e}"))
        if faults:
            raise Failure(faults)

    def apply_strategy(self, op: TensorOp) -> None:
        placement = strategy_placement(op, self.mesh)
        for v, layout in zip(op.results, placement.results, strict=True):
            if v not in self.fixed:
                self.known[v] = layout.dims
                set_type(v, with_layout(v.type, layout.complete))  # type: ignore[arg-type]
                self.fixed.add(v)
        for v, layout in zip(op.operands, placement.operands, strict=True):
            if v in self.fixed or any(self.known[v]):
                continue
            if not isinstance(v.owner, TensorOp) or v.owner.strategy is None:
                self.known[v] = tuple(axes or None for axes in layout.dims)

    def spread(self, ops: list[Operation]) -> None:
        """To a fixed point: forward over all ops first, then wherever something changed."""
        todo, queued = deque(ops), set(ops)
        while todo:
            op = todo.popleft()
            queued.discard(op)
            if not isinstance(op, TensorOp) or op.strategy is not None:
                continue
            touched = (*op.operands, *op.results)
            n = len(op.operands)
            new = spread_op(
                op.factors(),
                tuple([self.known[v] for v in touched]),
                tuple([v in self.fixed for v in touched]),
                tuple([v in self.parameters for v in op.operands]),
                self.mesh,
            )
            for i, (v, dims) in enumerate(zip(touched, new, strict=True)):
                if dims is self.known[v] or dims == self.known[v]:
                    continue
                self.known[v] = dims
                if i < n and isinstance(v.owner, Operation) and v.owner not in queued:
                    todo.append(v.owner)
                    queued.add(v.owner)
                for use in v.uses:
                    if use.operation is not op and use.operation not in queued:
                        todo.append(use.operation)
                        queued.add(use.operation)

    def split_inputs(self) -> None:
        """Data parallel for the inputs that nothing reaches."""
        used = [a for dims in self.known.values() for axes in dims for a in axes or ()]
        names = self.mesh.simplify(self.mesh.names)  # an axis of size 1 splits nothing
        free = tuple(a for a in names if not any(self.mesh.overlap(a, b) for b in used))
        changed: list[Operation] = []
        for v in self.block.args:
            if v in self.fixed or v in self.parameters or not self.known.get(v):
                continue
            if any(self.known[v]):
                continue
            assert isinstance(v.type, TensorType)
            axes = free if self.reached(v) else free or names
            while axes and v.type.get_shape()[0] % self.mesh.extent(axes):
                axes = axes[:-1]
            if axes:
                self.known[v] = (axes, *self.known[v][1:])
                changed += [use.operation for use in v.uses]
        self.spread(changed)

    def reached(self, v: SSAValue) -> bool:
        """Whether an op that uses `v` has a split value."""
        return any(
            any(self.known.get(w, ()))
            for use in v.uses
            for w in (*use.operation.operands, *use.operation.results)
        )


@lru_cache(maxsize=65536)
def spread_op(
    factors: Factors,
    known: tuple[Known, ...],
    fixed: tuple[bool, ...],
    parameter: tuple[bool, ...],
    mesh: Mesh,
) -> tuple[Known, ...]:
    """One op's values, with what each knows spread to the others along the op's factors."""
    dims = (*factors.operands, *factors.results)
    chosen = _proposals(factors, dims, known, parameter, mesh)
    out: list[Known] = []
    for value, (mine, closed) in enumerate(zip(known, fixed, strict=True)):
        if closed:
            out.append(mine)
            continue
        new = list(mine)
        for d, names in enumerate(dims[value]):
            if new[d] or not names:
                continue
            axes = factors.compose(names, chosen, mesh)
            used = [a for axes in new for a in axes or ()]
            if axes and not any(mesh.overlap(a, b) for a in axes for b in used):
                new[d] = axes
        out.append(tuple(new) if tuple(new) != mine else mine)
    return tuple(out)


def _proposals(
    factors: Factors,
    dims: tuple[tuple[tuple[str, ...], ...], ...],
    known: tuple[Known, ...],
    parameter: tuple[bool, ...],
    mesh: Mesh,
) -> FactorAxes:
    """The axes of each factor: what values know, the best proposal first; no axis for two."""
    found: list[tuple[bool, int, int, str, Axes]] = []
    n = len(parameter)
    for i, (value, mine) in enumerate(zip(dims, known, strict=True)):
        of_parameter = i < n and parameter[i]
        for names, axes in zip(value, mine, strict=True):
            if axes:
                assigned, _ = factors.assign(names, axes, mesh)
                found += [
                    (of_parameter, -mesh.extent(a), i, f, a) for f, a in assigned.items() if a
                ]
    chosen: FactorAxes = {}
    for _, _, _, f, axes in sorted(found, key=lambda p: p[:3]):
        taken = [a for g, mine in chosen.items() for a in mine if g != f]
        if f not in chosen and not any(mesh.overlap(a, b) for a in axes for b in taken):
            chosen[f] = axes
    return chosen
