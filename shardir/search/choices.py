"""What may be chosen for one op: the ways to place it, and the seconds that each takes.

    nn.matmul (i, k), (k, j) -> (i, j) on <dp = 2, tp = 4>: dp on i, k, j or none, tp on i, k, j or
    none: 16 choices

1. Each axis splits one factor, as a whole, or repeats the calculation. A factor is split evenly.
2. A linear op may also take operands that are partial sums over an axis, and pass them on.
3. An op that wants a dimension whole may have it split where it can be calculated by its parts.
4. What the text says, a strategy, is the only choice.
5. What is calculated from no argument is calculated whole on every device: slices of it are free.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, dropwhile, product
from math import inf, prod
from typing import Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation

from shardir.algebra.factors import FactorAxes, Factors, OpSharding, try_op_sharding
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.redistribution import seconds
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError
from shardir.dialects.dist import RedistributeOp, layout_of, with_layout
from shardir.dialects.nn.base import Composite, TensorOp, splits_replicated, strategy_factors
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.dialects.train import UpdateOp
from shardir.rewriting.rewriter import Rewriter
from shardir.search.buckets import Move, settle
from shardir.search.problem import Table
from shardir.search.ways import Bucket, LatencyShares, transfer_costs

OpSeconds = Callable[[type[TensorOp], Factors, FactorAxes, Sequence[TensorType]], float]
"""The seconds that an op takes on the device that has most to do, by its factors, the axes that
split them, and the global types of its operands, then of its results."""


@dataclass(frozen=True)
class Candidate:
    """One way to place an op, as `strategy` says it; the layouts that its operands must have, and
    those that its results come out with."""

    strategy: Strategy
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    seconds: float
    times: int = 1
    """How often it is done: twice where its result is not kept for the backward part."""


Candidates = tuple[Candidate, ...]


def late(block: Block) -> Callable[[Sequence[Operation]], bool]:
    """Whether what these ops use is redistributed at the end of a training step, behind its mark
    train.update: there fuse-communication puts into one buffer what moves alike."""
    ops = set(dropwhile(lambda op: not isinstance(op, UpdateOp), block.ops))
    return lambda users: bool(users) and ops.issuperset(users)


class CandidateSource:
    """The choices of ops on a mesh, made once for each signature, and what lies between them."""

    def __init__(self, mesh: Mesh, op_seconds: OpSeconds):
        self.mesh, self.op_seconds = mesh, op_seconds
        self.axes = [a for a in mesh.names if mesh.extent((a,)) > 1]
        self._made: dict[Any, Candidates] = {}

    def all_moving(
        self,
        t: TensorType,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        shares: LatencyShares | None = None,
    ) -> Table:
        """The seconds of the redistributions from each layout to each other; with `shares` as
        parts of buckets."""
        shape, size = t.get_shape(), itemsize(t)
        found = np.full((len(sources), len(targets)), inf)
        for reduction in {l.reduction for l in (*sources, *targets)}:
            known = transfer_costs(self.mesh, len(shape), reduction)
            if known is None:
                continue
            rows = [i for i, l in enumerate(sources) if l in known.index]
            columns = [j for j, l in enumerate(targets) if l in known.index]
            table = known.seconds(shape, size, shares)[
                np.ix_(
                    [known.index[sources[i]] for i in rows],
                    [known.index[targets[j]] for j in columns],
                )
            ]
            among = np.ix_(rows, columns)
            found[among] = np.minimum(found[among], table)
        for i, j in np.argwhere(np.isinf(found)):
            found[i, j] = sum(seconds(shape, self.mesh, sources[i], targets[j], size))
        return found

    def way(self, move: Move, shares: LatencyShares) -> tuple[float, dict[Bucket, float]]:
        """The seconds of a redistribution as part of buckets, and the latencies of these."""
        t, source, target = move
        shape, size = t.get_shape(), itemsize(t)
        seconds = float(self.all_moving(t, [source], [target], shares)[0, 0])
        reduction = source.reduction if source.partial else target.reduction
        known = transfer_costs(self.mesh, len(shape), reduction)
        return seconds, known.buckets(shape, size, source, target, shares) if known else {}

    def of(self, op: TensorOp, constant: bool) -> Candidates:
        """The choices of an op; `constant`: it depends on no argument."""
        whole = constant and op.strategy is None
        types = tuple(v.type for v in (*op.operands, *op.results))
        key = (type(op), whole, types, tuple(op.properties.items()))
        if key not in self._made:
            self._made[key] = tuple(self.make(op, whole))
        return self._made[key]

    def make(self, op: TensorOp, whole: bool) -> Iterator[Candidate]:
        if op.strategy is not None:
            strategy = op.strategy.data
            yield self.choice(op, strategy, strategy.op_sharding(strategy_factors(op), self.mesh))
            return
        factors = strategy_factors(op)
        for kept in self.kept(op) if not whole else [()]:
            for chosen in self.splits(factors, kept) if not whole else [{}]:
                try:
                    said = self.strategy(factors, chosen, kept)
                    if said is not None:
                        yield self.choice(op, *said)
                except ShardirError:
                    continue  # its parts can't be calculated so

    def kept(self, op: TensorOp) -> Iterator[Axes]:
        """The axes over which operands may be partial; where results are larger, none."""
        shapes, n = op.shapes(), len(op.operands)
        yield ()
        if op.factors().linear and max(map(prod, shapes[:n])) >= max(map(prod, shapes[n:])):
            for k in range(1, len(self.axes) + 1):
                yield from combinations(self.axes, k)

    def splits(self, factors: Factors, kept: Axes) -> Iterator[FactorAxes]:
        """Each axis that is not kept on one factor or on none."""
        fixed = factors.replicate | factors.moved | factors.sliding
        names = [f for f, _ in factors.sizes if f not in fixed]
        axes = [a for a in self.axes if a not in kept]
        for combination in product([None, *names], repeat=len(axes)):
            chosen: FactorAxes = {}
            for axis, f in zip(axes, combination, strict=True):
                if f is not None:
                    chosen[f] = (*chosen.get(f, ()), axis)
            if all(factors.size(f) % self.mesh.extent(a) == 0 for f, a in chosen.items()):
                yield {f: self.mesh.simplify(a) for f, a in chosen.items()}

    def strategy(
        self, factors: Factors, chosen: FactorAxes, kept: Axes
    ) -> tuple[Strategy, OpSharding] | None:
        """What says in the text how factors are split, and where that places values; None where
        nothing does."""
        partial = Layout(self.mesh.name, (), kept) if kept else None
        found = try_op_sharding(factors, chosen, self.mesh, partial)
        if found is None:
            return None
        operands = tuple(o.dims for o in found.operands)
        for results in (None, tuple(r.dims for r in found.results)):
            strategy = Strategy(self.mesh.name, operands, results, kept)
            try:
                if strategy.op_sharding(factors, self.mesh) == found:
                    return strategy, found
            except ShardirError:
                continue
        return None

    def choice(self, op: TensorOp, strategy: Strategy, found: OpSharding) -> Candidate:
        """How an op is calculated with a strategy, which places values so.

        Raises:
            ShardirError: it can't be.
        """
        if isinstance(op, Composite) or splits_replicated(op.factors(), found.operands):
            results, time = self.by_parts(op, found)
            return Candidate(strategy, found.operands, results, time)
        time = self.time(op, strategy_factors(op), found.axes)
        return Candidate(strategy, found.operands, found.results, time)

    def time(self, op: TensorOp, factors: Factors, chosen: FactorAxes) -> float:
        types = [unsharded_type(v) for v in (*op.operands, *op.results)]
        return self.op_seconds(type(op), factors, chosen, types)

    def by_parts(self, op: TensorOp, found: OpSharding) -> tuple[tuple[Layout, ...], float]:
        """The layouts of an op's results, complete, and its time, where its parts calculate it."""
        types = [
            with_layout(unsharded_type(v), l)
            for v, l in zip(op.operands, found.operands, strict=True)
        ]
        block = Block(arg_types=types)
        builder = Rewriter(self.mesh, block)
        made = type(op).create(
            operands=block.args, result_types=[unsharded_type(v) for v in op.results],
            properties=dict(op.properties),
        )  # fmt: skip
        parts = made.decompose(builder)
        assert parts is not None
        ends = [builder.complete(v) for v in parts]
        time = self.seconds(block)
        results = tuple(builder.layout(v) for v in ends)
        made.erase()
        return results, time

    def seconds(self, block: Block) -> float:
        """The seconds of ops that are laid out."""
        at_end, together, total = late(block), [], 0.0
        for op in block.ops:
            if not isinstance(op, RedistributeOp):
                total += self.spent(op)
                continue
            source, target = layout_of(op.value), layout_of(op.out)
            assert source is not None and target is not None
            if at_end([use.operation for use in op.out.uses]):
                together.append((unsharded_type(op.value), source, target))
            else:
                total += self.all_moving(unsharded_type(op.value), [source], [target])[0, 0]
        return total + settle(together, self.way)[0]

    def spent(self, op: Operation) -> float:
        """The seconds of a calculation."""
        if not isinstance(op, TensorOp):
            return 0.0
        factors = op.factors()
        layouts = [l for v in (*op.operands, *op.results) if (l := layout_of(v)) is not None]
        return self.time(op, factors, factors.axes_of(layouts, self.mesh))
