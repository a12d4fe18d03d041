"""The latencies that fuse-communication may save by one collective for several operands of an op.

    %x1 = dist.all_gather %x over <a>        %x1, %w1 = dist.all_gather %x, %w over <a>
    %w1 = dist.all_gather %w over <a>    ->  %y = nn.matmul %x1, %w1
    %y = nn.matmul %x1, %w1

Before the update redistributions are priced one by one. Those of an op's operands are at the same
place, so collectives of one kind may become one. That takes one latency, and of each value the time
of its bytes in the buffer: together no less than what any one of them takes alone, and the others
without a latency. So the sum is a bound if all operands whose collectives may be of one kind with
another's get their latencies back, but for one of each candidate. That one is the operand that
would get most, on average of its layouts: plans in which no other moves then cost what they take.
What an operand gets is a cost of its layout and the candidate, as its redistribution is; of copies
that several ops share it is one of the copies, which are made once.

A value with several users is redistributed where it is made, and waits for the first of them. So
its collective may become one with those of that op's other operands: it pays then, and all of
theirs that may be of a kind with it get their latencies back.

The collectives of a decomposed op may become one with each other too: what that saves is a credit
of the candidate.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import numpy as np
from xdsl.ir import Operation, SSAValue

from shardir.algebra.arrays import Flags, Indices, Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.search.candidates import Candidates
from shardir.search.copies import ValueLayouts, sources
from shardir.search.kind_sets import NO_KIND, KindSets
from shardir.search.latency_shares import LatencyShares
from shardir.search.value_layouts import needed
from shardir.search.value_moves import MovedValue

NO_LATENCY = LatencyShares(0.0)
"""Shares with which collectives that may be fused take no latency."""

Credit = tuple[tuple[int, int], Table]
"""A negative cost of two variables, or of one that is named twice."""


class Use(NamedTuple):
    """The use of a value by an op, at the operands `at`.

    Attributes:
        value: the value.
        ends: the variables of the value or of its maker, and of the op.
        key: equal for equal tables.
        moved: what is redistributed for it.
        runs: how often the value changes.
        made: the layouts from which it is redistributed where it is made, to wait for the op.
    """

    value: SSAValue
    ends: tuple[int, int]
    key: tuple
    moved: MovedValue
    layouts: ValueLayouts
    candidates: Candidates
    at: Sequence[int]
    runs: int
    made: tuple[Layout, ...] = ()


class CandidateMoves(NamedTuple):
    """Redistributions: [layout, candidate].

    Attributes:
        kinds: of their collectives.
        saved: the seconds that they take less without latencies.
    """

    kinds: KindSets
    saved: Table

    def gain(self, kinds: KindSets | np.uint64, several: Flags) -> Table:
        """Return what they gain of collectives of these kinds, and what several of one operand do
        among each other."""
        return np.where((self.kinds & kinds != 0) | several, self.saved, 0.0)


class OperandMoves(NamedTuple):
    """The redistributions for a use.

    Attributes:
        own: those that it has to itself.
        copies: those of the copies that it uses.
        several: of which candidates there are several: [candidate].
        waiting: the kinds of collectives of the value where it is made.
    """

    own: CandidateMoves
    copies: CandidateMoves
    several: Flags
    waiting: np.uint64

    @staticmethod
    def of(use: Use, mesh: Mesh) -> "OperandMoves":
        needs, moved = [needed(c, use.at) for c in use.candidates], use.moved
        column = {l: i for i, l in enumerate(dict.fromkeys(chain(*needs)))}
        first = [column[need[0]] for need in needs]
        more = [(i, [column[l] for l in n]) for i, n in enumerate(needs) if len(n) > 1]
        ends, of = sources(mesh, moved.type, use.layouts, [*column])
        runs = use.runs * np.array([c.times for c in use.candidates])

        def moves(targets: Sequence[Layout], *places: Indices | range) -> CandidateMoves:
            """Those from layouts and copies to targets, at these places in the tables."""
            kinds = moved.kinds(mesh, ends, targets)[places]
            alone, rest = (
                moved.seconds(mesh, ends, targets, shares)[places] for shares in (None, NO_LATENCY)
            )
            saved = alone - rest
            every, total = kinds[:, first], saved[:, first]
            for i, some in more:
                every[:, i] = np.bitwise_or.reduce(kinds[:, some], axis=1)
                total[:, i] = saved[:, some].sum(axis=1)
            return CandidateMoves(every, total * runs)

        number = {layout: i for i, layout in enumerate(ends)}
        at = np.array([[number[layout]] for layout, *_ in use.layouts])
        several = np.array([len(need) > 1 for need in needs])
        own, copies = moves([*column], of, range(len(column))), moves(ends, at, of)
        made = moved.kinds(mesh, use.made, [layout for layout, *_ in use.layouts])
        return OperandMoves(own, copies, several, np.bitwise_or.reduce(made, axis=None))


def operand_credits(mesh: Mesh, ops: Iterable[Sequence[Use]]) -> list[Credit]:
    """Return the credits of ops, of each the uses of values of one element type. Those of equal
    uses are the same tables."""
    found, of_uses = list[Credit](), dict[tuple, list[tuple[Table, Table]]]()
    copies, of_copies = dict[int, list[Table]](), dict[tuple, Table]()
    for uses in ops:
        if len(uses) == 1 and len(uses[0].at) == 1:
            continue
        key = tuple([(use.key, use.made) for use in uses])
        if key not in of_uses:
            of_uses[key] = _credits([OperandMoves.of(use, mesh) for use in uses])
        for use, (own, copy) in zip(uses, of_uses[key], strict=True):
            if own.any():
                found.append((use.ends, own))
            if copy.any():
                copies.setdefault(use.ends[0], []).append(copy)
    for v, each in copies.items():
        key = tuple(map(id, each))
        if key not in of_copies:
            of_copies[key] = np.diag(np.min(each, axis=0))
        found.append(((v, v), of_copies[key]))
    return found


def decomposition_credits(
    variables: Mapping[Operation, int], candidates_of: Mapping[Operation, Candidates], loops: Loops
) -> list[Credit]:
    """Return the credits of decomposed ops, whose collectives may become one. Those of equal ops
    are the same tables."""
    found, tables = list[Credit](), dict[tuple[int, int], Table]()
    for op, v in variables.items():
        candidates, runs = candidates_of[op], loops.runs(op)
        if any(c.saved for c in candidates):
            key = id(candidates), runs
            if key not in tables:
                tables[key] = np.diag([-runs * c.times * c.saved for c in candidates])
            found.append(((v, v), tables[key]))
    return found


def _credits(uses: Sequence[OperandMoves]) -> list[tuple[Table, Table]]:
    """Return the credit of each use of an op, [layout, candidate], and that of its copies,
    [layout]."""
    of_any = [np.bitwise_or.reduce(use.own.kinds | use.copies.kinds, axis=0) for use in uses]
    gains, means = list[tuple[Table, ...]](), list[Table]()
    for i, use in enumerate(uses):
        rest = [*range(i), *range(i + 1, len(uses))]
        waiting = reduce(or_, [uses[j].waiting for j in rest], NO_KIND)
        others = reduce(or_, [of_any[j] for j in rest], waiting)
        moves = use.own, use.copies
        own, copies = (each.gain(others, use.several) for each in moves)
        gains.append((own, copies, *(each.gain(waiting, use.several) for each in moves)))
        means.append(np.where(use.several, -1.0, (own + copies).mean(axis=0)))
    most = np.argmax(means, axis=0)
    found = []
    for i, (use, (own, copies, *beside)) in enumerate(zip(uses, gains, strict=True)):
        pays = (most == i) & ~use.several
        own, copies = (-np.where(pays, *of) for of in zip(beside, (own, copies), strict=True))
        found.append((own, copies.min(axis=1)))
    return found
