"""The candidates of an op: the strategies that may be chosen for it, each with its estimated time.

    nn.matmul (i, k), (k, j) -> (i, j) on <dp = 2, tp = 4>: dp on i, k, j or none, tp on i, k, j or
    none: 16 candidates

1. Each axis splits one factor, with all of its devices, or none: then the op is computed
   redundantly along it. Shards are equal, or nearly so if no axis divides the factor. An only axis
   may be divided in two, and each part splits a factor then. Several axes split a factor in the
   order of the mesh, or in that of an annotated layout.
2. A linear op may also take operands that are partial over an axis, and pass the partial sums on.
3. An op that needs a dimension unsharded may have it split where it has a sharded decomposition;
   not where another candidate is faster with the redistributions from and to its layouts
   (domination.py). That is known before its ops are made: they take at least the time of the ops
   of which only such dimensions are split, divided by the number of devices along other axes.
   Ops that only results without uses need are not made, as in the lowered program.
4. An annotated strategy is the only candidate.
5. An op that costs nothing and depends on no argument is computed redundantly on every device, if
   all that it depends on is: slices of it are free.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice, product
from math import prod
from typing import NamedTuple

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, Operation

from shardir.algebra.factors import FactorAxes, Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.routes import full_axes, parts
from shardir.algebra.strategy import Strategy
from shardir.cost import op_seconds
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import RedistributeOp, layout_of, with_layout
from shardir.dialects.nn.base import TensorOp, is_in_parts, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.signatures import Memo, SignatureMemo
from shardir.rewriting.rewriter import Rewriter
from shardir.search.graph.bucket_prices import TransferPrices
from shardir.search.graph.buckets import LateTransfer, Positions, shared_seconds
from shardir.search.graph.domination import Fixed, dominated
from shardir.search.graph.transfer_costs import transfer_of, transfer_seconds
from shardir.search.graph.use_positions import UsePositions


@dataclass(frozen=True)
class Candidate:
    """A strategy of an op, the layouts that it needs its operands in, those of its results, and its
    estimated time in seconds."""

    strategy: Strategy
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    seconds: float
    times: int = 1
    """How many times the op is computed: twice if its result is not saved for the backward part."""
    saved: float = 0.0
    """The seconds that its decomposition takes less with its collectives in buckets."""


Candidates = tuple[Candidate, ...]


class Decomposed(NamedTuple):
    """The layouts of the results of a decomposed op, its seconds, and those that it takes less with
    its collectives in buckets."""

    results: tuple[Layout, ...]
    seconds: float
    saved: float


MAX_IMBALANCE = 1.05
"""How much larger than their mean the largest shard of a dimension may be."""

MAX_UNEVEN_AXES = 2
"""The maximum number of axes of a mesh on which dimensions are split unevenly: each redistribution
of such a value is planned alone, and the pairs of layouts multiply with the axes."""


def divisions(mesh: Mesh) -> tuple[Axes, ...]:
    """Return the divisions of a mesh: its axes, and an only axis in two, at each end of a part."""
    axes, cut = full_axes(mesh), parts(mesh)
    if len(axes) != 1:
        return (axes,)
    ends = range(1, len(cut))
    return axes, *[(*mesh.simplify(cut[:i]), *mesh.simplify(cut[i:])) for i in ends]


class OpFacts(NamedTuple):
    """The kind of an op, its factors, those that a strategy may split, and its types without
    layouts."""

    kind: type[TensorOp]
    factors: Factors
    split: Factors
    types: tuple[TensorType, ...]

    @staticmethod
    def of(op: TensorOp) -> "OpFacts":
        types = tuple([unsharded_type(v) for v in (*op.operands, *op.results)])
        return OpFacts(type(op), op.factors(), strategy_factors(op), types)

    def seconds(self, factors: Factors, split: FactorAxes, mesh: Mesh) -> float:
        """Return the estimated time of the op with a split of factors."""
        return op_seconds(self.kind, factors, split, self.types, mesh)


@lru_cache(maxsize=16)
def candidate_source(mesh: Mesh) -> "CandidateSource":
    """Return the candidates on a mesh, for all searches on it."""
    return CandidateSource(mesh)


class CandidateSource:
    """The candidates of ops on a mesh, made once for each signature."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.divisions = divisions(mesh)
        self._made = Memo()
        self._seconds = SignatureMemo()
        self._parts = SignatureMemo()

    def of(self, op: TensorOp, constant: bool, fixed: Fixed | None = None) -> Candidates:
        """Return the candidates of an op.

        Args:
            constant: it depends on no argument, and its operands are never split.
            fixed: of which results only equal layouts are compared, to leave out candidates that
                others dominate; None: to leave out none.
        """
        types = tuple(v.type for v in (*op.operands, *op.results))
        key = (type(op), constant, fixed, types, _used(op), tuple(op.properties.items()))
        if key not in self._made:
            self._made[key] = tuple(self._candidates(op, constant, fixed))
        return self._made[key]

    def seconds(self, op: Operation) -> float:
        """Return the estimated time of an op whose values have layouts, or of a redistribution; 0
        for other ops."""
        return self._seconds.of_op(op, lambda: self._seconds_of(op))

    def _seconds_of(self, op: Operation) -> float:
        if isinstance(op, TensorOp):
            facts = OpFacts.of(op)
            layouts = [l for v in (*op.operands, *op.results) if (l := layout_of(v)) is not None]
            factors = facts.factors
            return facts.seconds(factors, factors.axes_of(layouts, self.mesh), self.mesh)
        if isinstance(op, RedistributeOp):
            t, source, target = transfer_of(op)
            return float(transfer_seconds(self.mesh, t, [source], [target])[0, 0])
        return 0.0

    def _candidates(self, op: TensorOp, constant: bool, fixed: Fixed | None) -> Iterator[Candidate]:
        facts = OpFacts.of(op)
        if op.strategy is not None:
            strategy = op.strategy.data
            yield self._candidate(op, facts, strategy, strategy.op_sharding(facts.split, self.mesh))
            return
        choices = self._choices(op, facts)
        if constant and not facts.seconds(facts.split, {}, self.mesh):
            choices = islice(choices, 1)  # unsharded: all of it costs nothing, nor do its slices
        found = [
            each for over, split in choices
            if (each := self._strategy(facts.split, split, over)) is not None
        ]  # fmt: skip
        left_out = self._dominated(op, facts, found, fixed) if fixed else set[int]()
        for i, (strategy, sharding) in enumerate(found):
            if i not in left_out:
                try:
                    yield self._candidate(op, facts, strategy, sharding)
                except ShardirError:
                    continue  # it has no decomposition with this sharding

    def _dominated(
        self,
        op: TensorOp,
        facts: "OpFacts",
        found: Sequence[tuple[Strategy, OpSharding]],
        fixed: Fixed,
    ) -> set[int]:
        """Return the numbers of the shardings in parts that another one dominates."""
        kind, factors, mesh = facts.kind, facts.factors, self.mesh
        parts = [i for i, (_, s) in enumerate(found) if is_in_parts(kind, factors, s.operands)]
        undivided = [s for i, (_, s) in enumerate(found) if i not in parts]
        if not parts or not undivided:
            return set()
        bases: dict[frozenset[tuple[str, Axes]], float] = {}

        def bound(axes: FactorAxes) -> float:
            divided = {f: a for f, a in axes.items() if f in factors.replicate | factors.moved}
            key = frozenset(divided.items())
            if key not in bases:
                bases[key] = self._seconds_in_parts(op, facts, divided)
            rest = tuple([a for f in axes.keys() - divided.keys() for a in axes[f]])
            return bases[key] / mesh.extent(rest)

        shardings = [found[i][1] for i in parts]
        ends = [(s.operands, tuple([l.complete for l in s.results])) for s in shardings]
        bounds = [(e, bound(s.axes)) for e, s in zip(ends, shardings, strict=True)]
        others = [
            ((s.operands, s.results), facts.seconds(facts.split, s.axes, mesh)) for s in undivided
        ]
        is_left_out = dominated(mesh, facts.types, bounds, others, fixed)
        return {i for i, out in zip(parts, is_left_out, strict=True) if out}

    def _seconds_in_parts(self, op: TensorOp, facts: "OpFacts", split: FactorAxes) -> float:
        """Return the time of the decomposition with a split, with its collectives in buckets; 0 if
        there is none."""
        sharding = try_op_sharding(facts.split, split, self.mesh)
        try:
            _, time, saved = self._decomposed(op, sharding) if sharding else ((), 0.0, 0.0)
        except ShardirError:
            return 0.0
        return time - saved

    def _choices(self, op: TensorOp, facts: "OpFacts") -> Iterator[tuple[Axes, FactorAxes]]:
        """Yield axes over which the operands are partial, and a split over others, each once."""
        seen, orders = set(), self._orders(op, facts.split)
        for axes in self.divisions:
            for over in self._partial_axes(op, facts.factors, axes):
                for split in self._splits(facts.split, tuple([a for a in axes if a not in over])):
                    ordered = {f: orders.get((f, frozenset(a)), a) for f, a in split.items()}
                    for each in (split, ordered):
                        choice = self.mesh.simplify(over), each
                        key = choice[0], frozenset(each.items())
                        if key not in seen:
                            seen.add(key)
                            yield choice

    def _orders(self, op: TensorOp, factors: Factors) -> dict[tuple[str, frozenset[Axis]], Axes]:
        """Return the axes that split a factor in an annotated layout, by the factor and the set of
        axes."""
        layouts = [layout_of(v) for v in (*op.operands, *op.results)]
        if not any(layouts):
            return {}
        annotated = factors.assignments([l.dims if l else None for l in layouts], self.mesh)
        return {(f, frozenset(axes)): axes for _, _, f, axes in annotated if len(axes) > 1}

    def _partial_axes(self, op: TensorOp, factors: Factors, axes: Axes) -> Iterator[Axes]:
        """Yield the axes over which operands may be partial: none, if a result is larger than all
        operands."""
        shapes, n = op.shapes(), len(op.operands)
        yield ()
        if factors.linear and max(map(prod, shapes[:n])) >= max(map(prod, shapes[n:])):
            for k in range(1, len(axes) + 1):
                yield from combinations(axes, k)

    def _splits(self, factors: Factors, axes: Axes) -> Iterator[FactorAxes]:
        """Yield the splits in which each of the axes splits one factor or none."""
        fixed = factors.replicate | factors.moved | factors.sliding
        names = [f for f, _ in factors.sizes if f not in fixed]
        for combination in product([None, *names], repeat=len(axes)):
            split: FactorAxes = {}
            for axis, f in zip(axes, combination, strict=True):
                if f is not None:
                    split[f] = (*split.get(f, ()), axis)
            if all(self._splits_well(factors.size(f), a) for f, a in split.items()):
                yield {f: self.mesh.simplify(a) for f, a in split.items()}

    def _splits_well(self, size: int, axes: Axes) -> bool:
        """Whether the shards of a dimension are equal; or of one that none of the axes divides,
        whether the largest shard is not much larger than the mean."""
        sizes = [self.mesh.extent((a,)) for a in axes]
        if size % prod(sizes) == 0:
            return True
        few = len(full_axes(self.mesh)) <= MAX_UNEVEN_AXES
        most = self.mesh.largest(size, axes) * prod(sizes)
        return few and all(size % n for n in sizes) and most <= size * MAX_IMBALANCE

    def _strategy(
        self, factors: Factors, split: FactorAxes, over: Axes
    ) -> tuple[Strategy, OpSharding] | None:
        """Return the strategy with a split of factors, and its sharding; None if no strategy has
        it."""
        addend = Layout(self.mesh.name, (), over) if over else None
        sharding = try_op_sharding(factors, split, self.mesh, addend)
        if sharding is None:
            return None
        operands = tuple(o.dims for o in sharding.operands)
        for results in (None, tuple(r.dims for r in sharding.results)):
            strategy = Strategy(self.mesh.name, operands, results, over)
            try:
                if strategy.op_sharding(factors, self.mesh) == sharding:
                    return strategy, sharding
            except ShardirError:
                continue
        return None

    def _candidate(
        self, op: TensorOp, facts: "OpFacts", strategy: Strategy, sharding: OpSharding
    ) -> Candidate:
        """Return the candidate with a strategy.

        Raises:
            ShardirError: the op has no decomposition with this sharding.
        """
        if is_in_parts(facts.kind, facts.factors, sharding.operands):
            results, time, saved = self._decomposed(op, sharding)
            return Candidate(strategy, sharding.operands, results, time, saved=saved)
        time = facts.seconds(facts.split, sharding.axes, self.mesh)
        return Candidate(strategy, sharding.operands, sharding.results, time)

    def _decomposed(self, op: TensorOp, sharding: OpSharding) -> "Decomposed":
        """Return the layouts of an op's results, and its time, by its decomposition."""
        types = [
            with_layout(unsharded_type(v), l)
            for v, l in zip(op.operands, sharding.operands, strict=True)
        ]
        parts = type(op), *types, *(unsharded_type(v) for v in op.results), *_used(op)
        return self._parts.get_or(parts, op.properties, lambda: self._lowered(op, types))

    def _lowered(self, op: TensorOp, types: Sequence[TensorType]) -> "Decomposed":
        """Return the layouts of an op's results, and its time, by its decomposition for
        operands of these types."""
        block = Block(arg_types=types)
        builder = Rewriter(self.mesh, block)
        trial = type(op).create(
            operands=block.args, result_types=[unsharded_type(v) for v in op.results],
            properties=dict(op.properties),
        )  # fmt: skip
        results = trial.parts(builder)
        assert results is not None
        layouts = tuple(builder.layout(v) for v in results)
        trial.erase()
        kept = [v for v, is_used in zip(results, _used(op), strict=True) if is_used]
        builder.insert(ReturnOp(*kept))
        builder.erase_unused(None, None)
        return Decomposed(layouts, sum(map(self.seconds, block.ops)), self._saved(block))

    def _saved(self, block: Block) -> float:
        """Return the seconds that the redistributions of a block take less in buckets."""
        at, moves = UsePositions(block), [op for op in block.ops if isinstance(op, RedistributeOp)]
        if len(moves) < 2:
            return 0.0
        found = list[LateTransfer]()
        for op in moves:
            last = at.first_use([use.operation for use in op.out.uses]) - 1
            positions = Positions(at.made(op.value), at.at[op], at.at[op], last)
            found.append(LateTransfer(transfer_of(op), positions))
        return sum(map(self.seconds, moves)) - shared_seconds(found, TransferPrices(self.mesh))[0]


def _used(op: TensorOp) -> tuple[bool, ...]:
    """Return of each result whether an op uses it."""
    return tuple([v.first_use is not None for v in op.results])
