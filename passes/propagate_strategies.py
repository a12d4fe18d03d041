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
8. Values of a `dist.sharding_group` are split alike: what is stated of one, or what one learns,
   holds for all. So are old and new values of parameters and states, and states as their parameter
   is, unless it is stated otherwise.
9. Over a `dist.propagation_barrier` axes spread in its direction only.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from math import fsum
from typing import NamedTuple

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import CallOp, FuncOp
from xdsl.ir import Block, Operation, SSAValue
from xdsl.passes import ModulePass

from shardir.algebra.errors import ShardirError
from shardir.algebra.factors import Placement
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
    meet,
    spread,
    ways,
    widened,
)
from shardir.analysis.functions import is_local_body, mesh_of, name_of, values
from shardir.analysis.groups import contradiction, sharding_groups
from shardir.analysis.roles import ties
from shardir.dialects.dist import (
    PropagationBarrierOp,
    ShardingGroupOp,
    layout_of,
    sharding_of,
    with_layout,
)
from shardir.dialects.nn.base import TensorOp, plain, strategy_factors
from shardir.dialects.train import Update, arg_attrs
from shardir.passes.functions import bodies, set_type, update_signature
from shardir.rewriting.placement import strategy_placement
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


class Why(NamedTuple):
    """How axes came to a dimension of a value."""

    how: str
    """"stated", "strategy", "rows" (an input that nothing reached), "group", or "factor"."""
    op: Operation | None = None
    """By which op; of a group, that which says that the value is in it."""
    sources: tuple[tuple[SSAValue, int], ...] = ()
    """From which values' dimensions."""


class Propagation:
    """What one function's values know, and how they came to know it."""

    def __init__(self, f: FuncOp, block: Block, mesh: Mesh):
        self.f, self.block, self.mesh = f, block, mesh
        self.known: dict[SSAValue, Split] = {}
        self.stated: dict[SSAValue, Sharding] = {}
        """What is stated of values, by the text, a strategy or another of their group."""
        self.groups: dict[SSAValue, dict[SSAValue, ShardingGroupOp]] = {}
        """The values that lie as a value does, itself included, each with what says so."""
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
        said: dict[SSAValue, tuple[Sharding, Why]] = {}
        for v in values(self.block):
            if not isinstance(v.type, TensorType):
                continue
            self.known[v] = ((),) * len(v.type.get_shape())
            if (sharding := sharding_of(v)) is not None:
                said[v] = sharding.simplified(self.mesh), Why("stated")
                if layout_of(v) is not None:
                    set_type(v, with_layout(v.type, said[v][0].layout))
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
        try:
            groups = sharding_groups(self.block)
        except Failure as e:
            raise Failure([*faults, *e.faults]) from None
        for op, placement in placements:  # they decide results of which nothing is stated
            for v, layout in zip(op.results, placement.results, strict=True):
                said.setdefault(
                    v, (Sharding(Layout(self.mesh.name, layout.dims)), Why("strategy", op))
                )
        for members in groups:
            self.groups.update(dict.fromkeys(members, members))
            stated = {v: said.pop(v) for v in members if v in said}
            try:
                if stated:
                    self.state(next(iter(members)), self.agreed(members, stated), stated)
            except Failure as e:
                faults += e.faults
        if faults:
            raise Failure(faults)
        for v, what in said.items():
            self.state(v, what[0], {v: what})
        self.keep_together()
        self.need(placements)

    def agreed(
        self,
        members: dict[SSAValue, ShardingGroupOp],
        said: dict[SSAValue, tuple[Sharding, Why]],
    ) -> Sharding:
        """What all that is stated of values of a group says together.

        Raises:
            Failure: they contradict each other.
        """
        first, *others = said
        both = said[first][0]
        for i, v in enumerate(others):
            sharding = said[v][0]
            met = meet(both, sharding, self.mesh)
            if met is None:
                before = [first, *others[:i]]
                w = next(
                    (w for w in before if meet(said[w][0], sharding, self.mesh) is None), before[-1]
                )
                said_of = [(x, said[x][0]) for x in (v, w)]
                raise Failure([(members[v], contradiction(members[v], *said_of))])
            both = met
        return both

    def state(
        self, v: SSAValue, sharding: Sharding, said: dict[SSAValue, tuple[Sharding, Why]]
    ) -> None:
        """What is stated of a value holds for all of its group: together, of what is said of some
        of them."""
        alike, dims = self.alike(v), sharding.layout.dims
        self.stated.update(dict.fromkeys(alike, sharding))
        self.know(v, dims)
        for w, (mine, why) in said.items():
            for d, axes in enumerate(mine.layout.dims):
                if axes and axes == dims[d]:
                    self.why[w, d] = why
        for d, axes in enumerate(dims):
            others = [w for w in alike if axes and (w, d) not in self.why]
            for w in others:
                source = next(x for x in alike if x not in others)
                self.why[w, d] = Why("group", self.groups[w][w], ((source, d),))

    def keep_together(self) -> None:
        """Old and new values of a parameter or state lie alike, and states as their parameter does,
        where nothing else is stated: so no step moves them."""
        pairs = [
            (op.operands[0], v, op)
            for op in self.block.ops
            if isinstance(op, Update)
            for v in (*op.operands[2:], *op.results)
        ]
        end = self.block.last_op
        assert end is not None
        for v, w, op in [*pairs, *((arg, v, end) for v, arg in ties(self.f, self.block).items())]:
            if w in self.alike(v) or plain(v).get_shape() != plain(w).get_shape():
                continue
            s, t = self.stated.get(v), self.stated.get(w)
            both = meet(s, t, self.mesh) if s is not None and t is not None else s or t
            if both is None and s is not None:
                continue
            members = self.groups.get(v, {v: op}) | self.groups.get(w, {w: op})
            self.groups.update(dict.fromkeys(members, members))
            self.parameters.update(members)
            if both is not None:
                self.state(v, both, {})

    def need(self, placements: list[tuple[TensorOp, Placement]]) -> None:
        """What strategies need their operands split as, where nothing else is stated."""
        wanted: dict[SSAValue, dict[Split, tuple[SSAValue, Operation]]] = {}
        for op, placement in placements:
            for v, layout in zip(op.operands, placement.operands, strict=True):
                if not self.closed(v):
                    wanted.setdefault(self.alike(v)[0], {}).setdefault(layout.dims, (v, op))
        for first, by in wanted.items():
            self.know(first, self.granted(first, [*by]))
            for dims, (v, op) in by.items():
                for d, axes in enumerate(dims):
                    if axes and axes == self.known[v][d] and (v, d) not in self.why:
                        self.because(v, d, Why("strategy", op))

    def alike(self, v: SSAValue) -> tuple[SSAValue, ...]:
        """The values of its group; of none, itself."""
        return tuple(self.groups.get(v, (v,)))

    def closed(self, v: SSAValue) -> bool:
        """Whether nothing may be added to what is stated of a value."""
        return v in self.stated and not self.stated[v].open

    def know(self, v: SSAValue, dims: Split) -> None:
        """What is known of a value, and so of all of its group."""
        self.known.update(dict.fromkeys(self.alike(v), dims))

    def because(self, v: SSAValue, d: int, why: Why) -> None:
        """How axes came to a dimension of a value, and by it to others of its group."""
        self.why[v, d] = why
        for w in self.alike(v):
            if w is not v:
                self.why[w, d] = Why("group", self.groups[w][w], ((v, d),))

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
        wanted: dict[SSAValue, list[tuple[Split, SSAValue, Learnt]]] = {}
        for op in ops:
            if isinstance(op, PropagationBarrierOp):
                found = self.behind(op)
            elif isinstance(op, TensorOp) and op.strategy is None:
                seen = tuple([self.seen(v) for v in (*op.operands, *op.results)])
                found = spread(strategy_factors(op), seen, self.mesh)
            else:
                continue
            if found.options:
                self.contests[op] = found.options
            for v, dims in zip((*op.operands, *op.results), found.dims, strict=True):
                if dims is not self.known[v] and dims != self.known[v]:
                    first = self.alike(v)[0]
                    wanted.setdefault(first, []).append((dims, v, Learnt(op, found)))
        changed: list[tuple[SSAValue, Operation | None]] = []
        for first, all_wanted in wanted.items():
            alike = self.alike(first)
            before, dims = self.known[first], self.granted(first, [w for w, _, _ in all_wanted])
            for w, v, learnt in all_wanted:
                for d, axes in enumerate(dims):
                    if axes == w[d] != before[d]:
                        self.because(v, d, learnt.why(v, d))
            self.know(first, dims)
            alone = all_wanted[0][2].op if len(all_wanted) == len(alike) == 1 else None
            changed += [(v, alone) for v in alike]
        return changed

    def behind(self, op: PropagationBarrierOp) -> Spread:
        """What a barrier lets through."""
        ends = [self.seen(op.value), self.seen(op.out)]
        every = frozenset(range(len(ends[0].shape)))
        for end, (given, taken) in enumerate((("forward", "backward"), ("backward", "forward"))):
            limits = ends[end].limits
            if op.allowed.data != given:
                limits = limits._replace(silent=every)
            if op.allowed.data != taken:
                limits = limits._replace(open=frozenset())
            ends[end] = ends[end]._replace(limits=limits)
        return spread(op.factors(), tuple(ends), self.mesh)

    def seen(self, v: SSAValue) -> Seen:
        assert isinstance(v.type, TensorType)
        every = frozenset(range(len(self.known[v])))
        parameter = v in self.parameters
        open, late, barred = every, frozenset[int](), ()
        if (stated := self.stated.get(v)) is not None:
            if stated.priorities:
                late = frozenset(d for d in every if stated.priority(d) > self.priority)
            open, barred = stated.open - late, stated.replicated
        limits = Limits(open, every if parameter and self.waiting else late, barred)
        return Seen(v.type.get_shape(), self.known[v], limits, parameter)

    def granted(self, v: SSAValue, wanted: list[Split]) -> Split:
        """What a value is split as of which several ops know something. It moves least: from and
        to each of them."""
        mine, seen = self.known[v], self.seen(v)
        if len(wanted) == 1:
            return widened(mine, wanted[0], seen.limits, self.mesh)
        proposed = {
            d: {w[d]: None for w in wanted if w[d] not in ((), axes)}
            for d, axes in enumerate(mine)
            if any(w[d] not in ((), axes) for w in wanted)
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
            all_ways, compared = best_first(all_ways, cost, self.mesh)
            self.contests.update(dict.fromkeys(self.alike(v), compared))
        return split_so(all_ways[0])

    # ---- inputs that nothing reaches ----

    def split_inputs(self) -> None:
        """Data parallel for the inputs that nothing reaches."""
        used = [a for dims in self.known.values() for axes in dims for a in axes]
        names = self.mesh.simplify(self.mesh.names)  # an axis of size 1 splits nothing
        free = tuple(a for a in names if not any(self.mesh.overlap(a, b) for b in used))
        changed: list[Operation] = []
        for v in self.block.args:
            alike = self.alike(v)
            if v in self.stated or not self.known.get(v) or any(self.known[v]):
                continue
            if any(w in self.parameters for w in alike):
                continue
            axes = free if any(map(self.reached, alike)) else free or names
            while axes and plain(v).get_shape()[0] % self.mesh.extent(axes):
                axes = axes[:-1]
            if axes:
                self.know(v, (axes, *self.known[v][1:]))
                self.because(v, 0, Why("rows"))
                changed += [use.operation for w in alike for use in w.uses]
        self.spread(changed)

    def reached(self, v: SSAValue) -> bool:
        """Whether an op that uses `v` has a split value."""
        return any(
            any(self.known.get(w, ()))
            for use in v.uses
            for w in (*use.operation.operands, *use.operation.results)
        )


class Learnt(NamedTuple):
    """What an op does to its values."""

    op: TensorOp | PropagationBarrierOp
    spread: Spread

    def why(self, v: SSAValue, d: int) -> Why:
        """How axes came by it to a dimension of one of them."""
        factors, touched = self.op.factors(), (*self.op.operands, *self.op.results)
        names = (*factors.operands, *factors.results)[touched.index(v)][d]
        sources = [self.spread.sources[f] for f in names if f in self.spread.sources]
        found = dict.fromkeys((touched[i], e) for i, e in sources)
        return Why("factor", self.op, tuple(found))


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
