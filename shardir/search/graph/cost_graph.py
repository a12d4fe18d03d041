"""The cost graph of a function: its estimated time as a sum over candidates and layouts.

    an op                                    its candidates: their own times
    an argument, a value with several users  its layouts
    from a value's maker to its users        the redistribution from the layout of the result to the
                                             one that is needed, or to and from the value's layout
    a pin, a redistribution that the         its one layout, with the time of the redistribution
    program has (pins.py)

The lowered program makes the redistributions of a plan. It may take less: moves that several users
of a value share are made once, and several collectives before one op are one. Therefore the sum is
a proposal, which is lowered and measured, and the bound is that of another sum (`bounding_problem`)
in which no fusible collective has a latency, and n users of a value pay an n-th each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.arrays import Table
from shardir.analysis.loops import Loops
from shardir.dialects.dist import sharding_of
from shardir.dialects.nn.base import TensorOp, decomposes
from shardir.dialects.nn.types import size_of, unsharded_type
from shardir.search.graph.buckets import LateTransfer, Positions, smallest_shares
from shardir.search.graph.candidates import Candidates, CandidateSource
from shardir.search.graph.domination import Fixed
from shardir.search.graph.edges import Edge, User, times, use_seconds
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.live_bytes import LONG_LIVED_OPS, storages_of
from shardir.search.graph.pins import Pin, pins
from shardir.search.graph.transfer_costs import ValueTransfer
from shardir.search.graph.transients import Transients
from shardir.search.graph.unsaved import UnsavedValues
from shardir.search.graph.use_positions import UsePositions
from shardir.search.graph.value_layouts import (
    Ties,
    Uses,
    ValueLayouts,
    needed,
    operand_indices,
    result_index,
)
from shardir.search.graph.value_moves import MovedValue
from shardir.search.problem.problem import CostProblem

NO_LATENCY = LatencyShares(0.0)
"""Shares with which collectives that may be fused take no latency."""


class CostGraph:
    """The cost graph of a block.

    Args:
        ties: values that have the layout of another one.
        counts_memory: redistributions are made for each use, and again for the backward part;
            long-lived values may have another layout than the one they are made in.
        repeats: whether ops of the forward part may be computed again then, instead of saved.

    Attributes:
        problem: the sum of costs, less the edges in buckets.
        candidates, op_variable: of each op.
        layouts, value_variable: of each value that has a variable; tied values have one.
        bucket_edges: the edges whose transfers may be in buckets.
        transients: the bytes of redistributed copies and of buffers, if it counts memory.
        unsaved: the values that may be computed again.
    """

    def __init__(
        self, block: Block, source: CandidateSource, ties: Ties, counts_memory: bool = False,
        repeats: bool = True,
    ):  # fmt: skip
        self.block, self.source, self.mesh, self.ties = block, source, source.mesh, ties
        storages = storages_of(block, ties) if counts_memory else None
        self.unsaved = UnsavedValues(block, storages if repeats else None)
        self.spans = storages.spans() if storages else None
        self.pins: Mapping[Operation, Pin] = {**pins(block, self.mesh, counts_memory)}
        self.problem = CostProblem()
        self.candidates: dict[Operation, Candidates] = {}
        self.op_variable: dict[Operation, int] = {}
        self.layouts: dict[SSAValue, ValueLayouts] = {}
        self.value_variable: dict[SSAValue, int] = {}
        self.bucket_edges: list[Edge] = []
        self._other_edges: list[Edge] = []
        self.transients = Transients(self.mesh, self.table) if counts_memory else None
        self._tied: dict[SSAValue, list[SSAValue]] = {}
        for v, end in ties.items():
            self._tied.setdefault(end, []).append(v)
        self._users: dict[SSAValue, list[Operation]] = {}
        self._tables: dict[tuple, Table] = {}
        self._layouts: dict[tuple, ValueLayouts] = {}
        self._twice: dict[int, tuple[Candidates, Candidates]] = {}
        self._positions = UsePositions(block)
        self._at, self._late = self._positions.at, self._positions.late
        self._loops = Loops(self._at)
        self._build()

    def _build(self) -> None:
        for op in self.block.ops:
            for v in dict.fromkeys(op.operands):
                self._users.setdefault(v, []).append(op)
        unsharded: set[SSAValue] = set()  # those that depend on no argument, and are never split
        ops = [op for op in self.block.ops if isinstance(op, TensorOp)]
        for op in ops:
            is_constant = unsharded.issuperset(op.operands)
            candidates = self.source.of(op, is_constant, self._fixed(op))
            if is_constant and not any(l.complete.used for c in candidates for l in c.results):
                unsharded.update(op.results)
            if op in self.unsaved.repeated:
                candidates = self._with_recomputed(candidates)
            self.candidates[op] = candidates
        self._most = sum(float(self._op_seconds(op).max()) for op in ops)
        for v in self.block.args:
            if isinstance(v.type, TensorType):
                self._add_value(v)
        for op in self.block.ops:  # in this order the solver's bound grows fastest
            if isinstance(op, TensorOp):
                self.op_variable[op] = self.problem.variable(self._op_seconds(op))
            for v in op.results if op in self.candidates or op in self.pins else ():
                if v not in self.value_variable and self._needs_variable(v):
                    self._add_value(v)
            if op in self.pins:
                i, more = self.value_variable[op.results[0]], self._pin_seconds(self.pins[op])
                self.problem.unary[i] = self.problem.plus(self.problem.unary[i], more)
        for op in ops:
            for i, v in enumerate(op.results):
                if v in self.value_variable:
                    self._add_maker(op, i, v)
            for other in self.unsaved.needs.get(op, ()):
                ends = self.op_variable[op], self.op_variable[other]
                self.problem.add(*ends, self._both(op, other))
        for v, users in self._users.items():
            for op in users:
                if isinstance(op, TensorOp):
                    self._add_user(v, op)

    # ---- variables ----

    def _fixed(self, op: TensorOp) -> Fixed | None:
        """Return which results may be in buckets, so that the graph counts less than the sum of
        their redistributions; None if all candidates are needed, since some need less memory."""
        if self.spans is not None or not decomposes(type(op)):
            return None
        return tuple([self._late(self._users.get(v, [])) for v in op.results])

    def _with_recomputed(self, candidates: Candidates) -> Candidates:
        """Return the candidates, and then each of them computed again in the backward part."""
        if id(candidates) not in self._twice:
            again = tuple([replace(c, times=2) for c in candidates])
            self._twice[id(candidates)] = candidates + again, candidates
        return self._twice[id(candidates)][0]

    def _both(self, op: Operation, other: Operation) -> Table:
        """Return the cost of computing an op again without another one: more than any gains."""
        mine, others = self.candidates[op], self.candidates[other]
        return self.table(
            (id(mine), id(others), "both"),
            lambda: self._most * ((times(mine)[:, None] > 1) & (times(others) == 1)),
        )

    def computed_once(self, choice: Sequence[int]) -> list[int]:
        """Return the solution in which nothing is computed again."""
        found = list(choice)
        for op in self.unsaved.repeated:
            i = self.op_variable[op]
            found[i] %= len(self.candidates[op]) // 2
        return found

    def _op_seconds(self, op: TensorOp) -> Table:
        candidates, runs = self.candidates[op], self._loops.runs(op)
        return self.table(
            (id(candidates), runs),
            lambda: np.array([runs * c.seconds * c.times for c in candidates]),
        )

    def pin_of(self, v: SSAValue) -> Pin | None:
        """Return the pin that makes a value, if one does."""
        return self.pins.get(v.owner) if isinstance(v.owner, Operation) else None

    def _pin_seconds(self, pin: Pin) -> Table:
        key = "pin", pin.transfer, pin.runs
        return self.table(key, lambda: np.array([pin.seconds(self.mesh)]))

    def _needs_variable(self, v: SSAValue) -> bool:
        """Whether a result may have another layout than the one it is made in. Otherwise its only
        user redistributes it from there; one that nothing uses stays there."""
        if not (users := self._users.get(v, [])):
            return False
        returned = any(isinstance(op, ReturnOp) for op in users)
        tied = v in self.ties or v in self._tied
        span = self.spans.get(v) if self.spans else None
        is_long_lived = span is not None and span.end - span.start > LONG_LIVED_OPS
        return len(users) > 1 or returned or tied or sharding_of(v) is not None or is_long_lived

    def _add_value(self, v: SSAValue) -> None:
        """Add a variable for the layout of a value; tied values share one."""
        if v in self.ties and (end := self.ties[v]) in self.value_variable:
            self.layouts[v], self.value_variable[v] = self.layouts[end], self.value_variable[end]
            return
        uses = Uses.of(v, self._tied.get(v, []), self._users, self.candidates)
        key = uses.key
        if key not in self._layouts:
            self._layouts[key] = uses.layouts(self.mesh)
        layouts = self.layouts[v] = self._layouts[key]
        free = self.table((id(layouts), "free"), lambda: np.zeros(len(layouts)))
        self.value_variable[v] = self.problem.variable(free)

    # ---- edges ----

    def table(self, key: tuple, make: Callable[[], Table]) -> Table:
        """Return the table of a key, made once."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def _add_maker(self, op: TensorOp, i: int, v: SSAValue) -> None:
        """Add the edge from an op to the layout of its result."""
        candidates, layouts, moved = self.candidates[op], self.layouts[v], MovedValue.of(v)
        ends, runs = (self.op_variable[op], self.value_variable[v]), self._loops.changes(v)
        t = unsharded_type(v)

        def table(shares: LatencyShares | None) -> Table:
            sources = [c.results[i] for c in candidates]
            seconds = moved.seconds(self.mesh, sources, layouts, shares)
            return runs * times(candidates)[:, None] * seconds

        def transfers(x: int, y: int) -> list[ValueTransfer]:
            return [moved.transfer(candidates[x].results[i], layouts[y])]

        key = id(candidates), "makes", i, id(layouts), runs
        users, at = self._users.get(v, []), self._at[op]
        positions = Positions(at, at, at, self._positions.last)
        uses = [self._user(op, v) for op in users]
        self._add(Edge(ends, key, 1, size_of(v), table, transfers, positions, uses), users)

        if self.transients is not None:
            key = id(candidates), i, id(layouts), t
            self.transients.add(
                at, ends, key, t, lambda: [(c.results[i],) for c in candidates], layouts, made=True
            )

    def _add_user(self, v: SSAValue, op: TensorOp) -> None:
        """Add the edge to an op from the layout of an operand, or from the operand's maker."""
        candidates, t, at = self.candidates[op], unsharded_type(v), operand_indices(op, v)
        moved = MovedValue.of(v)
        if v in self.value_variable:
            maker, layouts = self.value_variable[v], self.layouts[v]
            key = id(layouts), id(candidates), at
        else:
            assert isinstance(v.owner, Operation)
            i, makers = result_index(v), self.candidates[v.owner]
            maker, layouts = self.op_variable[v.owner], self.made_in(makers, i)
            key = id(makers), i, id(candidates), at
        ends, runs = (maker, self.op_variable[op]), self._loops.changes(v)
        key = *key, runs, moved.dims

        def table(shares: LatencyShares | None) -> Table:
            return runs * use_seconds(self.mesh, moved, layouts, candidates, at, shares)

        def transfers(x: int, y: int) -> list[ValueTransfer]:
            needs = needed(candidates[y], at)
            return [moved.transfer(layouts[x], l) for l in needs]

        here, last = self._at[op] - 1, self._positions.first_use([op]) - 1
        positions = self._positions.between(self._positions.made(v), here, last)
        sharing = len(self._users[v])
        edge = Edge(ends, key, len(at), size_of(v), table, transfers, positions, sharing=sharing)
        self._add(edge, [op])

        if self.transients is not None:
            self.transients.add(
                self._at[op], ends, (*key, t), t, lambda: [needed(c, at) for c in candidates],
                layouts,
            )  # fmt: skip

    def _user(self, op: Operation, v: SSAValue) -> User:
        at, candidates = self._positions.first_use([op]), self.candidates.get(op)
        if candidates is None:  # such as the return, which has many operands
            return User(at, None, (), ())
        return User(at, self.op_variable[op], candidates, operand_indices(op, v))

    def made_in(self, candidates: Candidates, i: int) -> ValueLayouts:
        """Return the layouts in which a result is made."""
        key = id(candidates), i
        if key not in self._layouts:
            self._layouts[key] = tuple([c.results[i] for c in candidates])
        return self._layouts[key]

    def _add(self, edge: Edge, users: Sequence[Operation]) -> None:
        """Add an edge: to the problem, or to those whose transfers may be in buckets."""
        key = *edge.key, "in a bucket"
        if self._late(users) and self.table(key, lambda: edge.table(LatencyShares(1.0))).any():
            self.bucket_edges.append(edge)
        else:
            self.problem.add(*edge.ends, self.table(edge.key, lambda: edge.table(None)))
            self._other_edges.append(edge)

    # ---- solutions ----

    @property
    def smallest_shares(self) -> LatencyShares:
        """The shares with which no solution costs more than in its buckets."""
        of = [(edge.max_transfers, edge.bytes) for edge in self.bucket_edges]
        return smallest_shares(sum(n for n, _ in of), sum(n * size for n, size in of))

    def problem_with(self, shares: LatencyShares) -> CostProblem:
        """Return the problem in which transfers pay these shares of buckets."""
        found = self.problem.copy()
        tables: dict[tuple, Table] = {}
        for edge in self.bucket_edges:
            if edge.key not in tables:
                tables[edge.key] = edge.table(shares)
            found.add(*edge.ends, tables[edge.key])
        return found

    @cached_property
    def smallest_problem(self) -> CostProblem:
        """The problem with the smallest shares, in which each redistribution before the update is a
        collective of its own."""
        return self.problem_with(self.smallest_shares)

    @cached_property
    def bounding_problem(self) -> CostProblem:
        """A problem in which no solution costs more than its lowered program, as long as passes
        remove no redistribution: fusible collectives have no latency, those of decomposed ops
        neither, and of the moves for n users of a value each pays an n-th, since they may be made
        once."""
        found = CostProblem()
        for seconds in self.problem.unary:
            found.variable(seconds)
        for op, i in self.op_variable.items():
            candidates = self.candidates[op]
            if any(c.saved for c in candidates):
                found.unary[i] = found.plus(found.unary[i], self._saved(candidates, op))
        for op, needs in self.unsaved.needs.items():
            for other in needs:
                found.add(self.op_variable[op], self.op_variable[other], self._both(op, other))
        for op, pin in self.pins.items():
            i = self.value_variable[op.results[0]]
            found.unary[i] = found.plus(found.unary[i], self._saved_of_pin(op, pin))
        for edges, shares in (
            (self._other_edges, NO_LATENCY), (self.bucket_edges, self.smallest_shares)
        ):  # fmt: skip
            for edge in edges:
                found.add(*edge.ends, self._lowest(edge, shares))
        return found

    def _saved(self, candidates: Candidates, op: Operation) -> Table:
        """Return the seconds that the decompositions of an op take less, with negative signs."""
        runs = self._loops.runs(op)
        return self.table(
            (id(candidates), runs, "saved in parts"),
            lambda: np.array([-runs * c.times * c.saved for c in candidates]),
        )

    def _saved_of_pin(self, op: Operation, pin: Pin) -> Table:
        """Return the seconds that a pin may take less, with a negative sign: the users of its
        operand may share it, and it may be fused."""
        sharing = len(self._users[op.operands[0]])
        return self.table(
            ("pin", pin.transfer, pin.runs, "saved", sharing),
            lambda: np.array([
                pin.seconds(self.mesh, NO_LATENCY) / sharing - pin.seconds(self.mesh)
            ]),
        )  # fmt: skip

    def _lowest(self, edge: Edge, shares: LatencyShares) -> Table:
        """Return lower bounds of the times of an edge's redistributions."""
        key = *edge.key, "lowest", shares, edge.sharing
        return self.table(key, lambda: edge.table(shares) / edge.sharing)

    def bucket_transfers(self, choice: Sequence[int]) -> list[LateTransfer]:
        """Return the transfers of a solution that may be in buckets."""
        return [transfer for edge in self.bucket_edges for transfer in edge.late_transfers(choice)]
