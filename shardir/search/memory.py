"""The least costly plan that keeps to a device's memory.

What lives at a moment is a sum over variables, like the costs, so that a price for each byte at
some moments makes the same kind of problem (Lagrange's multipliers; Everett 1963): its solution is
the least costly of all that hold no more at those moments. The moments are those at which solutions
held most, the price is found by halving. And what no plan costs less than, prices included, less
the price of the limit, is a bound for plans that keep to it.

Counted are the shards of values from the op that makes them to the last that uses them or a view
of them: arguments throughout, what updates make in the place of the old; and for one op what is
redistributed for it, or behind it. What redistributions and the parts of an op need while they run
is not: the program that comes of a plan says what it holds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import views
from shardir.analysis.storages import Span, Storages
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import itemsize
from shardir.dialects.train import BackwardOp, Update
from shardir.search.elimination import Solution
from shardir.search.problem import CostProblem, Table

LONG_LIVED_OPS = 20
"""Over how many ops a value must live for its memory to count apart from where it is made."""

RAISES, HALVINGS = 14, 5
"""How often the price is raised until a solution keeps to the limit, and how often the interval in
which the right one lies is halved then."""

Solve = Callable[[CostProblem], Solution]


def spans(block: Block, ties: Mapping[SSAValue, SSAValue]) -> dict[SSAValue, Span]:
    """When the storages of a block in the global view are live: views lie in that of their
    operand, and the new value of what is updated in that of the old."""
    ops = list(block.ops)
    storages = Storages(block.args, ops)
    for op in ops:
        for v, operand in views(op, None):
            storages.join(v, operand)
        if isinstance(op, Update):
            for v in op.results:
                if v in ties:
                    storages.join(v, ties[v])
    return dict(storages.spans())


def repeatable(block: Block, spans: Mapping[SSAValue, Span]) -> dict[SSAValue, Span]:
    """The values of the forward part that might be calculated again in the backward part: those
    whose operands are there anyway when it begins to use them. For each, from when to when it would
    not be kept: from behind its last use in the forward part to before the first one later."""
    ops = list(block.ops)
    border = next((i for i, op in enumerate(ops) if isinstance(op, BackwardOp)), len(ops))
    at = {op: i for i, op in enumerate(ops)}
    found = {}
    for op in ops[:border]:
        if not isinstance(op, TensorOp) or len(op.results) != 1 or not op.operands:
            continue
        (v,) = op.results
        uses = sorted(at[use.operation] for use in v.uses)
        last = max((i for i in uses if i < border), default=at[op])
        first = next((i for i in uses if i > border), None)
        if v not in spans or first is None or first - last <= LONG_LIVED_OPS:
            continue
        if all(x in spans and spans[x].end >= first for x in op.operands):
            found[v] = Span(last + 1, first - 1)
    return found


def shard_bytes(t: TensorType, layout: Layout, mesh: Mesh) -> int:
    """What a device holds of a value."""
    return prod(layout.local_shape(mesh, t.get_shape())) * itemsize(t)


@dataclass(frozen=True)
class LiveBytes:
    """The bytes that are held by the values of a variable, or of two, and when."""

    variables: tuple[int, ...]
    bytes: Table
    span: Span


class Peak(NamedTuple):
    """The most bytes that live at once, and the op at which they do."""

    bytes: int
    at: int


def peak(held: Sequence[LiveBytes], choice: Sequence[int]) -> Peak:
    """Where a solution holds most."""
    change = np.zeros(max((h.span.end for h in held), default=0) + 3)
    for h in held:
        n = h.bytes[tuple(choice[v] for v in h.variables)]
        change[h.span.start + 1] += n
        change[h.span.end + 2] -= n
    now = np.cumsum(change)
    at = int(now.argmax())
    return Peak(int(now[at]), at - 1)


def priced(
    problem: CostProblem, held: Sequence[LiveBytes], at: set[int], price: float
) -> CostProblem:
    """The problem in which each byte held at these ops costs so much."""
    found = CostProblem(list(problem.unary), dict(problem.pairs))
    scaled: dict[tuple[int, int], Table] = {}
    for h in held:
        if n := sum(h.span.start <= i <= h.span.end for i in at):
            if (id(h.bytes), n) not in scaled:
                scaled[id(h.bytes), n] = price * n * h.bytes
            more = scaled[id(h.bytes), n]
            v, *other = h.variables
            if other:
                found.add(v, other[0], more)
            else:
                found.unary[v] = found.plus(found.unary[v], more)
    return found


class TightError(Exception):
    """No plan was found that keeps to the limit: what the smallest one needs."""

    def __init__(self, needed: int):
        super().__init__(needed)
        self.needed = needed


def least(problem: CostProblem, held: Sequence[LiveBytes]) -> list[int]:
    """The solution whose values hold least, each by itself."""
    total = [np.zeros(len(u)) for u in problem.unary]
    for h in held:
        if len(h.variables) == 1:
            total[h.variables[0]] = total[h.variables[0]] + h.bytes
    return [int(t.argmin()) for t in total]


def solve_within(
    problem: CostProblem, held: Sequence[LiveBytes], limit: int, solve: Solve
) -> Solution:
    """The least costly solution that holds no more than `limit` bytes at once.

    Raises:
        TightError: none was found, or even values that are split as far as can be need more.
    """
    values = [h for h in held if len(h.variables) == 1]
    if (needed := peak(values, least(problem, held)).bytes) > limit:
        raise TightError(needed)
    best, bound, at, smallest = None, -np.inf, set[int](), np.inf

    def attempt(price: float) -> bool:
        """Whether the solution for a price keeps to the limit."""
        nonlocal best, bound, smallest
        while True:
            found = solve(priced(problem, held, at, price))
            bound = max(bound, found.bound - price * len(at) * limit)
            most = peak(held, found.choice)
            smallest = min(smallest, most.bytes)
            if most.bytes <= limit:
                cost = problem.cost(found.choice)
                if best is None or cost < best.objective:
                    best = Solution(found.choice, cost, cost)
                return True
            if most.at in at:
                return False
            at.add(most.at)

    low, high = 0.0, 0.0
    for _ in range(RAISES):
        if attempt(high):
            break
        low, high = high, 4 * high or sum(float(u.min()) for u in problem.unary) / limit / 64
    for _ in range(HALVINGS if low else 0):
        middle = (low * high) ** 0.5
        if attempt(middle):
            high = middle
        else:
            low = middle
    if best is None:
        raise TightError(int(smallest))
    return Solution(best.choice, best.objective, min(bound, best.objective))
