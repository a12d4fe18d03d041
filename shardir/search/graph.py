"""Layouts and strategies of least cost for a function: its ops and values as a sum of costs.

    an op                                    how it is calculated: its seconds
    a value with several users               the layout in which it lies
    an argument                              the same, and one more in which several users share
                                             it: the redistribution from one to the other; of equal
                                             ones what splits most
    who makes a value, who uses it           the redistribution from what comes out to what is
                                             needed, or to and from the layout in which it lies

That is what insert-redistributions makes of the strategies and layouts, seconds for seconds. What
it does better: where several ops need a value in the same layout, beside the two above, they are
counted one by one and made once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, Operation, OpResult, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.analysis.storages import Span
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.search.buckets import MAX_SCALINGS, Move, least
from shardir.search.choices import Candidate, Candidates, CandidateSource, late
from shardir.search.elimination import Solution
from shardir.search.memory import (
    LONG_LIVED_OPS,
    LiveBytes,
    Solve,
    peak,
    repeatable,
    shard_bytes,
    solve_within,
    spans,
)
from shardir.search.problem import CostProblem, Table
from shardir.search.ways import LatencyShares

ValueLayout = tuple[Layout, Layout | None]
"""In which layout a value lies, and in which else several users share it."""

ValueLayouts = tuple[ValueLayout, ...]


@dataclass(frozen=True)
class CostGraph:
    """What is made least: the sum of costs, and which of its variables says which choice of an op
    and which place of a value (at both ends of a tie, the same)."""

    problem: CostProblem
    choices: Mapping[Operation, Candidates]
    places: Mapping[SSAValue, ValueLayouts]
    of_op: Mapping[Operation, int]
    of_value: Mapping[SSAValue, int]


@dataclass(frozen=True)
class StrategyPlan:
    """What is chosen: for each op and each value of a function. Seconds of the objective, and what
    no choice takes less than. `held`: the bytes on a device, where they count: then what is
    redistributed in the forward part is so again in the backward part, and not kept."""

    choices: Mapping[TensorOp, Candidate]
    layouts: Mapping[SSAValue, Layout]
    solution: Solution
    graph: CostGraph
    held: int = 0

    def on(
        self, ops: Mapping[Operation, Operation], values: Mapping[SSAValue, SSAValue]
    ) -> "StrategyPlan":
        """The same of a copy of the function."""
        choices = {ops[op]: choice for op, choice in self.choices.items()}
        layouts = {values[v]: layout for v, layout in self.layouts.items()}
        return replace(self, choices=choices, layouts=layouts)


class Edge(NamedTuple):
    """What is redistributed between two variables: the seconds, by the shares of what moves
    together with others; and the moves for a value of each, at most so many."""

    ends: tuple[int, int]
    key: tuple
    most: int
    table: Callable[[LatencyShares | None], Table]
    moves: Callable[[int, int], list[Move]]


class Graph:
    """The sum of costs of a function.

    Args:
        ties: values that lie as another does, each with that other, which comes first: returned
            ones with the arguments of the next step that they become, and those of a group.
        tight: memory counts. Redistributions are then made for each use, and for the backward part
            again; and what lives long may lie elsewhere than where it is made.
    """

    def __init__(
        self,
        block: Block,
        offers: CandidateSource,
        ties: Mapping[SSAValue, SSAValue],
        tight: bool = False,
    ):
        self.block, self.offers, self.mesh = block, offers, offers.mesh
        self.spans = spans(block, ties) if tight else None
        self.gaps = repeatable(block, self.spans) if self.spans else {}
        self.problem = CostProblem()
        self.ties = ties
        self.tied: dict[SSAValue, list[SSAValue]] = {}
        for v, end in ties.items():
            self.tied.setdefault(end, []).append(v)
        self.choices: dict[Operation, Candidates] = {}
        self.of_op: dict[Operation, int] = {}
        self.places: dict[SSAValue, ValueLayouts] = {}
        self.of_value: dict[SSAValue, int] = {}
        self.users: dict[SSAValue, list[Operation]] = {}
        self._tables: dict[tuple, Table] = {}
        self._places: dict[tuple, ValueLayouts] = {}
        self.at = {op: i for i, op in enumerate(block.ops)}
        self.late = late(block)
        self.together: list[Edge] = []
        self.copied: list[LiveBytes] = []
        self._twice: dict[int, tuple[Candidates, Candidates]] = {}
        self.build()

    def build(self) -> None:
        constant: set[SSAValue] = set()
        ops = [op for op in self.block.ops if isinstance(op, TensorOp)]
        for op in ops:
            fixed = all(v in constant for v in op.operands)
            if fixed:
                constant.update(op.results)
            choices = self.offers.of(op, fixed)
            if any(v in self.gaps for v in op.results):
                choices = self.twice(choices)
            self.choices[op] = choices
            self.of_op[op] = self.problem.variable(self.seconds(choices))
        for op in self.block.ops:
            for v in dict.fromkeys(op.operands):
                self.users.setdefault(v, []).append(op)
        for v in self.block.args:
            if isinstance(v.type, TensorType):
                self.lie(v)
        for op in ops:
            for v in op.results:
                if v not in self.of_value and self.lies(v):
                    self.lie(v)
        for op in ops:
            for i, v in enumerate(op.results):
                self.made(op, i, v)
        for v, users in self.users.items():
            for op in users:
                if isinstance(op, TensorOp):
                    self.used(v, op)

    def twice(self, choices: Candidates) -> Candidates:
        """The choices, and each of them once more, done again in the backward part."""
        if id(choices) not in self._twice:
            again = tuple([replace(c, times=2) for c in choices])
            self._twice[id(choices)] = choices + again, choices
        return self._twice[id(choices)][0]

    def seconds(self, choices: Candidates) -> Table:
        return self.table((id(choices),), lambda: np.array([c.seconds * c.times for c in choices]))

    # ---- where values lie ----

    def lies(self, v: SSAValue) -> bool:
        """Whether it is to be decided where a result lies: otherwise it lies as it comes out, and
        its only user takes it from there."""
        users = self.users.get(v, [])
        returned = any(isinstance(op, ReturnOp) for op in users)
        tied = v in self.ties or v in self.tied
        return len(users) > 1 or returned or tied or layout_of(v) is not None or self.lasts(v)

    def lasts(self, v: SSAValue) -> bool:
        """Whether it counts where a value lies while others run."""
        span = self.spans.get(v) if self.spans else None
        return span is not None and span.end - span.start > LONG_LIVED_OPS

    def lie(self, v: SSAValue) -> None:
        """A variable for where a value lies; one for both ends of a tie."""
        if v in self.ties and (end := self.ties[v]) in self.of_value:
            self.places[v], self.of_value[v] = self.places[end], self.of_value[end]
            return
        places = self.places[v] = self.places_of(v)

        def costs() -> Table:
            lying, shared = (list(dict.fromkeys(ls)) for ls in zip(*places, strict=True))
            targets = [l for l in shared if l is not None]
            moves = self.offers.all_moving(unsharded_type(v), lying, targets)
            row, column = ({l: i for i, l in enumerate(ls)} for ls in (lying, targets))
            return np.array([0.0 if to is None else moves[row[l], column[to]] for l, to in places])

        self.of_value[v] = self.problem.variable(self.table((id(places),), costs))

    def places_of(self, v: SSAValue) -> ValueLayouts:
        alike = [v, *self.tied.get(v, [])]
        users = [(op, w) for w in alike for op in self.users.get(w, []) if isinstance(op, TensorOp)]
        made = [(self.choices[w.owner], place_of(w)) for w in alike if isinstance(w, OpResult)]
        needs = [(id(self.choices[op]), slots(op, w), w is v) for op, w in users]
        makers = [(id(choices), i) for choices, i in made]
        key = (*(w.type for w in alike), tuple(needs), tuple(makers))
        if key in self._places:
            return self._places[key]
        several: dict[Layout, int] = {}
        for op, w in users:
            needs_of = dict.fromkeys(l for c in self.choices[op] for l in needed(c, slots(op, w)))
            for need in needs_of:
                several[need] = several.get(need, 0) + (w is v)
        stated = next((l for l in map(layout_of, alike) if l is not None), None)
        if stated is not None:
            lying = [stated.simplified(self.mesh)]
        else:
            found = dict.fromkeys(l for l in several if not l.partial)
            for choices, i in made:
                found.update(dict.fromkeys(c.results[i].complete for c in choices))
            if not found:  # nothing calculates with it
                found[replicated(self.mesh.name, len(unsharded_type(v).get_shape()))] = None
            lying = sorted(found, key=lambda l: -self.mesh.extent(l.used))
        places: list[ValueLayout] = [(l, None) for l in lying]
        if not isinstance(v, OpResult) and self.spans is None:
            shared = [l for l, n in several.items() if n > 1 and not l.partial]
            places += [(l, t) for l in lying for t in shared if t != l]
        self._places[key] = tuple(places)
        return self._places[key]

    def come(self, choices: Candidates, i: int) -> ValueLayouts:
        """The layouts in which a result comes out."""
        key = id(choices), i
        if key not in self._places:
            self._places[key] = tuple([(c.results[i], None) for c in choices])
        return self._places[key]

    # ---- edges ----

    def table(self, key: tuple, make: Callable[[], Table]) -> Table:
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]

    def made(self, op: TensorOp, i: int, v: SSAValue) -> None:
        """From what comes out to where it lies."""
        if v not in self.of_value:
            return
        choices, places, t = self.choices[op], self.places[v], unsharded_type(v)
        ends = self.of_op[op], self.of_value[v]

        def table(shares: LatencyShares | None) -> Table:
            results, lying = [c.results[i] for c in choices], [l for l, _ in places]
            moves = self.offers.all_moving(t, results, lying, shares)
            return times(choices)[:, None] * moves

        def moves(x: int, y: int) -> list[Move]:
            return [(t, choices[x].results[i], places[y][0])]

        key = id(choices), "makes", i, id(places)
        self.edge(Edge(ends, key, 1, table, moves), self.users.get(v, []))

        def held() -> Table:
            return np.array([[self.copy(t, c.results[i], l) for l, _ in places] for c in choices])

        self.copies(op, ends, (id(choices), i, id(places), t), held)

    def copy(self, t: TensorType, copy: Layout, lying: Layout) -> float:
        """The bytes of a value that is in another layout than where it lies for a moment."""
        return 0.0 if copy.dims == lying.dims else float(shard_bytes(t, copy, self.mesh))

    def copies(
        self, op: Operation, ends: tuple[int, int], key: tuple, held: Callable[[], Table]
    ) -> None:
        """Counts what an op has copies of while it runs."""
        if self.spans is not None:
            at = self.at[op]
            self.copied.append(LiveBytes(ends, self.table(("copies", *key), held), Span(at, at)))

    def used(self, v: SSAValue, op: TensorOp) -> None:
        """From where a value lies, or from what comes out, to what an op needs."""
        choices, t, at = self.choices[op], unsharded_type(v), slots(op, v)
        if v in self.of_value:
            maker, places, shares = self.of_value[v], self.places[v], v not in self.ties
            key = id(places), id(choices), at, shares
        else:
            assert isinstance(v.owner, Operation)
            i, makers = place_of(v), self.choices[v.owner]
            maker, shares = self.of_op[v.owner], False
            places = self.come(makers, i)
            key = id(makers), i, id(choices), at
        ends = maker, self.of_op[op]

        def table(parts: LatencyShares | None) -> Table:
            return self.taken(t, places, choices, at, shares, parts)

        def moves(x: int, y: int) -> list[Move]:
            lies, shared = places[x]
            return [(t, lies, l) for l in needed(choices[y], at) if not (shares and l == shared)]

        self.edge(Edge(ends, key, len(at), table, moves), [op])

        def held() -> Table:
            needs = [needed(c, at) for c in choices]
            return np.array(
                [[sum(self.copy(t, n, l) for n in ns) for ns in needs] for l, _ in places]
            )

        self.copies(op, ends, (*key, t), held)

    def edge(self, edge: "Edge", users: Sequence[Operation]) -> None:
        """What is redistributed for these users, alone or with others at the end."""
        apart = (*edge.key, "apart")
        if self.late(users) and self.table(apart, lambda: edge.table(LatencyShares(1.0))).any():
            self.together.append(edge)
        else:
            self.problem.add(*edge.ends, self.table(edge.key, lambda: edge.table(None)))

    def taken(
        self,
        t: TensorType,
        places: Sequence[ValueLayout],
        choices: Candidates,
        at: Sequence[int],
        shares: bool,
        parts: LatencyShares | None,
    ) -> Table:
        """What each choice costs, of an op that uses a value at these operands, in each place."""
        needs = [tuple(needed(c, at)) for c in choices]
        every = {l: i for i, l in enumerate(dict.fromkeys(l for n in needs for l in n))}
        moves = self.offers.all_moving(t, [p[0] for p in places], [*every], parts)
        if shares:
            for i, (_, shared) in enumerate(places):
                if shared is not None and shared in every:
                    moves[i, every[shared]] = 0.0
        columns = {n: sum(moves[:, every[l]] for l in n) for n in dict.fromkeys(needs)}
        return np.stack([columns[n] for n in needs], axis=1) * times(choices)

    # ---- memory ----

    def held(self) -> list[LiveBytes]:
        """What is held by each value: by where it lies, or as it comes out of its op; and by what
        is redistributed, at the op for which it is."""
        assert self.spans is not None
        found = list(self.copied)
        for v, span in self.spans.items():
            if not isinstance(v.type, TensorType):
                continue
            t = unsharded_type(v)
            if v in self.of_value:
                i, key = self.of_value[v], (id(self.places[v]), "holds", t)
                layouts = [l for l, _ in self.places[v]]
            elif v.owner in self.of_op:
                assert isinstance(v.owner, Operation)
                n, choices = place_of(v), self.choices[v.owner]
                i, key = self.of_op[v.owner], (id(choices), "holds", n, t)
                layouts = [c.results[n] for c in choices]
            else:
                continue
            table = self.table(
                key, lambda t=t, layouts=layouts: np.array([
                    float(shard_bytes(t, l, self.mesh)) for l in layouts
                ])
            )  # fmt: skip
            gap = self.gaps.get(v)
            if gap is None or v not in self.of_value:
                found.append(LiveBytes((i,), table, span))
                continue
            assert isinstance(v.owner, Operation)
            makers = self.choices[v.owner]
            kept = self.table(
                (*key, id(makers), "kept"),
                lambda table=table, makers=makers: (2 - times(makers))[:, None] * table,
            )
            found += [LiveBytes((i,), table, Span(span.start, gap.start - 1)),
                      LiveBytes((self.of_op[v.owner], i), kept, gap),
                      LiveBytes((i,), table, Span(gap.end + 1, span.end))]  # fmt: skip
        return found

    # ---- the solution ----

    def plan(self, solve: Solve, scalings: int = MAX_SCALINGS) -> StrategyPlan:
        """The least costly plan that is found."""
        many, ways = sum(edge.most for edge in self.together), self.offers.way
        return self.read(*least(self.priced, self.moves, many, ways, solve, scalings))

    def priced(self, shares: LatencyShares) -> CostProblem:
        """The problem in which what moves together takes these shares."""
        found = CostProblem([*self.problem.unary], {**self.problem.pairs})
        tables: dict[tuple, Table] = {}
        for edge in self.together:
            if edge.key not in tables:
                tables[edge.key] = edge.table(shares)
            found.add(*edge.ends, tables[edge.key])
        return found

    def moves(self, choice: Sequence[int]) -> list[Move]:
        """What a solution redistributes together with others."""
        ends = [(e, *e.ends) for e in self.together]
        return [move for e, i, j in ends for move in e.moves(choice[i], choice[j])]

    def plan_within(self, limit: int, solve: Solve) -> StrategyPlan:
        """The least costly of those whose values hold no more than `limit` bytes on a device.

        Raises:
            TightError: none was found.
        """
        held = self.held()
        plan = self.plan(lambda problem: solve_within(problem, held, limit, solve), 1)
        return replace(plan, held=peak(held, plan.solution.choice).bytes)

    def read(self, solution: Solution, shares: LatencyShares) -> StrategyPlan:
        choice, ops = solution.choice, [op for op in self.block.ops if isinstance(op, TensorOp)]
        chosen = {op: self.choices[op][choice[self.of_op[op]]] for op in ops}
        layouts = {v: self.places[v][choice[i]][0] for v, i in self.of_value.items()}
        for op in ops:
            for v, layout in zip(op.results, chosen[op].results, strict=True):
                layouts.setdefault(v, layout)
        graph = CostGraph(self.priced(shares), self.choices, self.places, self.of_op, self.of_value)
        return StrategyPlan(chosen, layouts, solution, graph)


def place_of(v: SSAValue) -> int:
    """Which of its op's results a value is."""
    assert isinstance(v, OpResult)
    return v.index


def slots(op: Operation, v: SSAValue) -> tuple[int, ...]:
    """The operands at which an op uses a value."""
    return tuple(i for i, w in enumerate(op.operands) if w is v)


def needed(c: Candidate, at: Sequence[int]) -> Sequence[Layout]:
    """The layouts that a choice needs a value in."""
    return tuple(dict.fromkeys(c.operands[i] for i in at))


def times(choices: Candidates) -> Table:
    """How often each is done."""
    return np.array([float(c.times) for c in choices])
