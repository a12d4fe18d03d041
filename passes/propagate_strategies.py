"""propagate-strategies: layouts on some values, strategies on some ops -> a layout on every value.

    %h = nn.matmul %x, %w : (tensor<8x4xf32, #dist.layout<@m, [{dp}, {}]>>,
                             tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<8x6xf32>
 -> %h = nn.matmul %x, %w : (...) -> tensor<8x6xf32, #dist.layout<@m, [{dp}, {tp}]>>

1. A layout that the text states is never changed; of a `#dist.sharding` open dimensions are split
   further, but over no axis that is to stay replicated, and dimensions of a priority take part
   after all of lower ones. An op with a strategy decides its other results.
2. Axes spread along factors, forward and backward, to a fixed point. First what activations know
   spreads to all, then what parameters do: a weight that is split over the batch's axis does not
   unsplit the batch.
3. Where proposals compete, at an op or for a value, what moves least is granted; ties go to what
   splits more, then to the dimension that comes first (`algebra/spread.py`).
4. An axis is added to a value only where it is not in use in that value.
5. Inputs that nothing reaches are split by rows over the axes that nothing uses: data parallel.
6. What is still open is replicated.
7. The order in which ops stand does not matter, only which uses what of which.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import fsum
from typing import NamedTuple

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import Factors, Placement
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import seconds
from shardir.algebra.sharding import Sharding
from shardir.algebra.spread import (
    Limits,
    Option,
    Seen,
    Split,
    Spread,
    best_first,
    spread,
    ways,
    widened,
)
from shardir.dialects.dist import layout_of, sharding_of, with_layout
from shardir.dialects.nn.base import TensorOp, has_parts, plain
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


@dataclass(frozen=True)
class PropagateStrategies(ModulePass):
    """Spreads layouts and strategies from some values and ops to all."""

    name = "propagate-strategies"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        propagate(op)


def propagate(module: ModuleOp) -> "list[Propagation]":
    """Gives each value of the global view a layout; how, for each function that has a mesh.

    Raises:
        Failure: what the text states is wrong.
    """
    faults: list[tuple[Operation | None, str]] = []
    found = []
    for f, block in bodies(module):
        try:
            mesh = mesh_of(f, module)
            if mesh is not None and not is_local_body(block):
                found.append(Propagation(f, block, mesh))
                found[-1].run()
        except Failure as e:
            faults += e.faults
    if faults:
        raise Failure(faults)
    return found


def strategy_placement(op: TensorOp, mesh: Mesh) -> Placement:
    """The placement that an op's strategy states.

    Raises:
        ShardirError: the strategy does not fit the op or the mesh.
    """
    assert op.strategy is not None
    return op.strategy.data.placement(splittable(op), mesh)


def splittable(op: TensorOp) -> Factors:
    """An op's factors, where it can be calculated in parts those that it wants whole too."""
    factors = op.factors()
    return replace(factors, replicate=frozenset()) if has_parts(type(op)) else factors


class Why(NamedTuple):
    """How axes came to a dimension of a value."""

    how: str
    """"stated", "strategy", "rows" (an input that nothing reached), or "factor"."""
    op: Operation | None = None
    """By which op."""
    sources: tuple[tuple[SSAValue, int], ...] = ()
    """From which values' dimensions."""


class Propagation:
    """What one function's values know, and how they came to know it."""

    def __init__(self, f: FuncOp, block: Block, mesh: Mesh):
        self.f, self.block, self.mesh = f, block, mesh
        self.known: dict[SSAValue, Split] = {}
        self.fixed: set[SSAValue] = set()
        self.stated: dict[SSAValue, Sharding] = {}
        """What is stated of values to which something may be added."""
        self.priority = 0
        """Up to which priority dimensions take part."""
        self.parameters: set[SSAValue] = set()
        self.waiting = True
        """Whether it is still the activations' turn to propose."""
        self.why: dict[tuple[SSAValue, int], Why] = {}
        self.contests: dict[Operation | SSAValue, tuple[Option, ...]] = {}
        """Where proposals competed, at an op or for a value: the options, the granted one first."""
        self.level: dict[Operation, int] = {}
        """How many ops of the longest way to each op: in this order they are visited."""
        for op in block.ops:
            made = [self.level[v.owner] for v in op.operands if isinstance(v.owner, Operation)]
            self.level[op] = 1 + max(made, default=0)

    def run(self) -> None:
        self.read()
        for priority in sorted({0, *(p for s in self.stated.values() for p in s.priorities)}):
            for waiting in (True, False):
                self.priority, self.waiting = priority, waiting
                self.spread(self.level)
        self.split_inputs()
        for v in values(self.block):
            if isinstance(v.type, TensorType) and layout_of(v) is None:
                set_type(v, with_layout(v.type, Layout(self.mesh.name, self.known[v])))
        update_signature(self.f)

    # ---- what the text states ----

    def read(self) -> None:
        faults: list[tuple[Operation | None, str]] = []
        for v in values(self.block):
            if not isinstance(v.type, TensorType):
                continue
            if (sharding := sharding_of(v)) is None:
                self.known[v] = ((),) * len(v.type.get_shape())
                continue
            sharding = sharding.simplified(self.mesh)
            self.know(v, sharding.layout.dims, Why("stated"))
            if layout_of(v) is None:
                self.stated[v] = sharding
            else:
                set_type(v, with_layout(v.type, sharding.layout))
                self.fixed.add(v)
        for arg, attrs in zip(self.block.args, arg_attrs(self.f), strict=True):
            if "train.parameter" in attrs or "train.state" in attrs:
                self.parameters.add(arg)
        placements: list[tuple[TensorOp, Placement]] = []
        for op in self.block.ops:
            if isinstance(op, CallOp):
                faults.append((op, "[F3] layouts do not spread through calls; run inline-calls"))
            if isinstance(op, TensorOp) and op.strategy is not None:
                try:
                    placements.append((op, strategy_placement(op, self.mesh)))
                except ShardirError as e:
                    faults.append((op, f"{op.name} in @{name_of(self.f)}: {e}"))
        if faults:
            raise Failure(faults)
        self.apply_strategies(placements)

    def apply_strategies(self, placements: list[tuple[TensorOp, Placement]]) -> None:
        """They decide the results of their ops, and what of operands nothing else does."""
        for op, placement in placements:
            for v, layout in zip(op.results, placement.results, strict=True):
                if v not in self.fixed and v not in self.stated:
                    self.know(v, layout.dims, Why("strategy", op))
                    self.fixed.add(v)
        wanted: dict[SSAValue, dict[Split, Operation]] = {}
        for op, placement in placements:
            for v, layout in zip(op.operands, placement.operands, strict=True):
                if v not in self.fixed:
                    wanted.setdefault(v, {}).setdefault(layout.dims, op)
        for v, by in wanted.items():
            self.known[v] = self.granted(v, [*by])
            for w, op in by.items():
                for d, axes in enumerate(w):
                    if axes and axes == self.known[v][d]:
                        self.why.setdefault((v, d), Why("strategy", op))

    def know(self, v: SSAValue, dims: Split, why: Why) -> None:
        """Writes what a value knows, and why, of each dimension that is another than before."""
        before = self.known.get(v, ((),) * len(dims))
        for d, (old, new) in enumerate(zip(before, dims, strict=True)):
            if new != old:
                self.why[v, d] = why
        self.known[v] = dims

    # ---- the fixed point ----

    def spread(self, ops: Iterable[Operation]) -> None:
        """To a fixed point: forward over all ops first, then wherever something changed. Ops of a
        level see the same, so that it does not matter which of them stands first."""
        todo = dict.fromkeys(ops)
        while todo:
            sweep, todo = Levels(self.level, todo), {}
            for level, batch in sweep:
                for v, by in self.visit(batch):
                    for op in self.touching(v):
                        if op is by:
                            continue
                        if self.level[op] <= level:
                            todo[op] = None
                        else:
                            sweep.add(op)

    def touching(self, v: SSAValue) -> Iterator[Operation]:
        """The ops that make a value or use it."""
        if isinstance(v.owner, Operation):
            yield v.owner
        for use in v.uses:
            yield use.operation

    def visit(self, ops: Iterable[Operation]) -> list[tuple[SSAValue, Operation | None]]:
        """What changed by these ops; with it the op that has nothing to learn from that."""
        wanted: dict[SSAValue, list[tuple[Split, Operation, Spread]]] = {}
        for op in ops:
            if not isinstance(op, TensorOp) or op.strategy is not None:
                continue
            touched = (*op.operands, *op.results)
            found = spread(splittable(op), tuple([self.seen(v) for v in touched]), self.mesh)
            if found.options:
                self.contests[op] = found.options
            for v, dims in zip(touched, found.dims, strict=True):
                if dims is not self.known[v] and dims != self.known[v]:
                    wanted.setdefault(v, []).append((dims, op, found))
        changed: list[tuple[SSAValue, Operation | None]] = []
        for v, all_wanted in wanted.items():
            dims = self.granted(v, [w for w, _, _ in all_wanted])
            before = self.known[v]
            for w, op, found in all_wanted:
                for d, axes in enumerate(dims):
                    if axes == w[d] != before[d]:
                        self.why[v, d] = self.reason(v, d, op, found)
            self.known[v] = dims
            changed.append((v, all_wanted[0][1] if len(all_wanted) == 1 else None))
        return changed

    def seen(self, v: SSAValue) -> Seen:
        assert isinstance(v.type, TensorType)
        every = frozenset(range(len(self.known[v])))
        parameter = v in self.parameters
        if (stated := self.stated.get(v)) is not None:
            late = frozenset(d for d in every if stated.priority(d) > self.priority)
            silent = every if parameter and self.waiting else late
            limits = Limits(stated.open - late, silent, stated.replicated)
            return Seen(v.type.get_shape(), self.known[v], limits, parameter)
        limits = Limits(
            frozenset() if v in self.fixed else every,
            every if parameter and self.waiting else frozenset(),
        )
        return Seen(v.type.get_shape(), self.known[v], limits, parameter)

    def granted(self, v: SSAValue, wanted: list[Split]) -> Split:
        """What a value is split as of which several ops know something. It moves least: from and
        to each of them."""
        mine, seen = self.known[v], self.seen(v)
        if len(wanted) == 1:
            return widened(mine, wanted[0], seen.limits, self.mesh)
        proposed = {
            d: {w[d]: None for w in wanted if w[d] != axes}
            for d, axes in enumerate(mine)
            if any(w[d] != axes for w in wanted)
        }

        def split_so(way: dict[int, tuple]) -> Split:
            return widened(
                mine, tuple(way.get(d, ()) for d in range(len(mine))), seen.limits, self.mesh
            )

        def cost(way: dict[int, tuple]) -> tuple[float, float]:
            have = Layout(self.mesh.name, split_so(way))
            costs = [
                seconds(seen.shape, self.mesh, have, Layout(self.mesh.name, w)) for w in wanted
            ]
            return fsum(a for a, _ in costs), fsum(b for _, b in costs)

        all_ways = ways(proposed, (), self.mesh)
        if len(all_ways) > 1:
            all_ways, self.contests[v] = best_first(all_ways, cost, self.mesh)
        return split_so(all_ways[0])

    def reason(self, v: SSAValue, d: int, op: Operation, found: Spread) -> Why:
        assert isinstance(op, TensorOp)
        factors = op.factors()
        touched = (*op.operands, *op.results)
        names = (*factors.operands, *factors.results)[touched.index(v)][d]
        sources = [found.sources[f] for f in names if f in found.sources]
        return Why("factor", op, tuple(dict.fromkeys((touched[i], e) for i, e in sources)))

    # ---- inputs that nothing reaches ----

    def split_inputs(self) -> None:
        """Data parallel for the inputs that nothing reaches."""
        used = [a for dims in self.known.values() for axes in dims for a in axes]
        names = self.mesh.simplify(self.mesh.names)  # an axis of size 1 splits nothing
        free = tuple(a for a in names if not any(self.mesh.overlap(a, b) for b in used))
        changed: list[Operation] = []
        for v in self.block.args:
            if v in self.fixed or v in self.parameters or not self.known.get(v):
                continue
            if any(self.known[v]) or v in self.stated:
                continue
            axes = free if self.reached(v) else free or names
            while axes and plain(v).get_shape()[0] % self.mesh.extent(axes):
                axes = axes[:-1]
            if axes:
                self.know(v, (axes, *self.known[v][1:]), Why("rows"))
                changed += [use.operation for use in v.uses]
        self.spread(changed)

    def reached(self, v: SSAValue) -> bool:
        """Whether an op that uses `v` has a split value."""
        return any(
            any(self.known.get(w, ()))
            for use in v.uses
            for w in (*use.operation.operands, *use.operation.results)
        )


class Levels:
    """Ops by their level, the lowest first; more may be added above that."""

    def __init__(self, level: dict[Operation, int], ops: Iterable[Operation]):
        self.level = level
        self.waiting: dict[int, dict[Operation, None]] = {}
        self.heap: list[int] = []
        for op in ops:
            self.add(op)

    def add(self, op: Operation) -> None:
        n = self.level[op]
        if n not in self.waiting:
            self.waiting[n] = {}
            heappush(self.heap, n)
        self.waiting[n][op] = None

    def __iter__(self) -> Iterator[tuple[int, Iterable[Operation]]]:
        while self.heap:
            n = heappop(self.heap)
            yield n, self.waiting.pop(n)
