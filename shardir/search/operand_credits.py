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
What an operand gets is a cost of its layout and the candidate, as its redistribution is; of a copy
that several ops share it is one of the copy, which is made once.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import chain
from operator import or_
from typing import NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.mesh import Mesh
from shardir.algebra.routes import Flags, Table
from shardir.search.candidates import Candidates
from shardir.search.kind_sets import NO_KIND, KindSets
from shardir.search.latency_shares import LatencyShares
from shardir.search.transfer_costs import path_kinds, transfer_seconds
from shardir.search.value_layouts import ValueLayouts, needed

NO_LATENCY = LatencyShares(0.0)
"""Shares with which collectives that may be fused take no latency."""

Credit = tuple[tuple[int, int], Table]
"""A negative cost of two variables, or of one that is named twice."""


class Use(NamedTuple):
    """The use of a value by an op, at the operands `at`.

    Attributes:
        ends: the variables of the value or of its maker, and of the op.
        key: equal for equal tables.
        may_share: whether it may use a copy that several ops share.
        runs: how often the value changes.
    """

    ends: tuple[int, int]
    key: tuple
    type: TensorType
    layouts: ValueLayouts
    candidates: Candidates
    at: Sequence[int]
    may_share: bool
    runs: int


class OperandMoves(NamedTuple):
    """The redistributions for a use: [layout, candidate].

    Attributes:
        kinds: of their collectives.
        saved: the seconds that they take less without latencies.
        several: of which candidates there are several: [candidate].
        copied: whether there is none, but a copy is used.
    """

    kinds: KindSets
    saved: Table
    several: Flags
    copied: Flags

    @staticmethod
    def of(use: Use, mesh: Mesh) -> "OperandMoves":
        sources, needs = [l for l, _ in use.layouts], [needed(c, use.at) for c in use.candidates]
        column = {l: i for i, l in enumerate(dict.fromkeys(chain(*needs)))}
        columns = [[column[l] for l in need] for need in needs]
        of_target = path_kinds(mesh, use.type, sources, [*column])
        alone, rest = (
            transfer_seconds(mesh, use.type, sources, [*column], shares)
            for shares in (None, NO_LATENCY)
        )
        saved, times = use.runs * (alone - rest), np.array([c.times for c in use.candidates])
        return OperandMoves(
            np.stack([np.bitwise_or.reduce(of_target[:, some], axis=1) for some in columns], 1),
            np.stack([saved[:, some].sum(axis=1) for some in columns], 1) * times,
            np.array([len(need) > 1 for need in needs]),
            np.array([[use.may_share and l in need for need in needs] for _, l in use.layouts]),
        )


def operand_credits(mesh: Mesh, ops: Iterable[Sequence[Use]]) -> list[Credit]:
    """Return the credits of ops, of each the uses of values of one element type. Those of equal
    uses are the same tables."""
    found, of_uses = list[Credit](), dict[tuple, list[tuple[Table, Table]]]()
    copies, of_copies = dict[int, list[Table]](), dict[tuple, Table]()
    for uses in ops:
        if len(uses) == 1 and len(uses[0].at) == 1:
            continue
        key = tuple([use.key for use in uses])
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


def _credits(uses: Sequence[OperandMoves]) -> list[tuple[Table, Table]]:
    """Return the credit of each use of an op, [layout, candidate], and that of its copy,
    [layout]."""
    of_any = [np.bitwise_or.reduce(use.kinds, axis=0) for use in uses]
    gains, means = list[Table](), list[Table]()
    for i, use in enumerate(uses):
        others = reduce(or_, of_any[:i] + of_any[i + 1 :], NO_KIND)
        gain = np.where((use.kinds & others != 0) | use.several, use.saved, 0.0)
        gains.append(gain)
        means.append(np.where(use.several, -1.0, gain.mean(axis=0)))
    most = np.argmax(means, axis=0)
    found = []
    for i, (use, gain) in enumerate(zip(uses, gains, strict=True)):
        credit = np.where((most == i) & ~use.several, 0.0, -gain)
        found.append((np.where(use.copied, 0.0, credit), (use.copied * credit).min(axis=1)))
    return found
