"""Live bytes as sums over variables, like costs: the memory of a solution, and its price."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardir.algebra.arrays import Table
from shardir.analysis.storages import Span
from shardir.search.problem.problem import CostProblem


@dataclass(frozen=True, eq=False)
class LiveBytes:
    """The bytes that the values of one or two variables hold, and the ops at which they do."""

    variables: tuple[int, ...]
    bytes: Table
    span: Span

    def at(self, choice: Sequence[int]) -> float:
        """Return the bytes of a solution."""
        return float(self.bytes[tuple([choice[v] for v in self.variables])])


def ops_of(held: Sequence[LiveBytes]) -> int:
    """Return the number of ops at which bytes are counted: the arguments (-1), and every op up to
    the last that holds any."""
    return max((h.span.end for h in held), default=-1) + 2


def live(held: Sequence[LiveBytes], choice: Sequence[int]) -> Table:
    """Return the live bytes of a solution: of the arguments alone, then at each op."""
    change = np.zeros(ops_of(held) + 1)
    for h in held:
        n = h.at(choice)
        change[h.span.start + 1] += n
        change[h.span.end + 2] -= n
    return np.cumsum(change)[:-1]


def priced(problem: CostProblem, held: Sequence[LiveBytes], price: Table) -> CostProblem:
    """Return the problem with a price for each byte: of the arguments alone, then at each op."""
    found = CostProblem(list(problem.unary), dict(problem.pairs))
    total = np.concatenate(([0.0], np.cumsum(price)))
    scaled: dict[tuple[int, float], Table] = {}
    for h in held:
        each = float(total[h.span.end + 2] - total[h.span.start + 1])
        if each <= 0:
            continue
        if (id(h.bytes), each) not in scaled:
            scaled[id(h.bytes), each] = each * h.bytes
        more = scaled[id(h.bytes), each]
        v, *other = h.variables
        if other:
            found.add(v, other[0], more)
        else:
            found.unary[v] = found.plus(found.unary[v], more)
    return found
