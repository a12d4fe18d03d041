"""The redistributions between two variables of a cost graph."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from shardir.algebra.arrays import Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.search.graph.buckets import LateTransfer, Positions
from shardir.search.graph.candidates import Candidates
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.transfer_costs import ValueTransfer
from shardir.search.graph.value_layouts import ValueLayouts, needed
from shardir.search.graph.value_moves import MovedValue


class User(NamedTuple):
    """An op that uses a value that is redistributed where it is made: where it needs the value, its
    variable (None, if it has no candidates), its candidates, and the numbers of the operands."""

    at: int
    variable: int | None
    candidates: Candidates
    operands: tuple[int, ...]

    def waits(self, transfer: ValueTransfer, choice: Sequence[int]) -> bool:
        """Whether it needs the result, and not the value as it was made: slices of what is gathered
        cancel out (simplify-communication)."""
        if self.variable is None or not _only_gathers(transfer):
            return True
        return any(layout != transfer.source for layout in self.needs(choice))

    def needs(self, choice: Sequence[int]) -> tuple[Layout, ...]:
        """Return the layouts in which it needs the value."""
        if self.variable is None:
            return ()
        return needed(self.candidates[choice[self.variable]], self.operands)


class Edge(NamedTuple):
    """The redistributions between two variables: their times with shares of buckets, and the
    transfers for a value of each variable, at most `max_transfers` of tensors of so many `bytes`,
    with their `positions`, the last of which is before those of the `users` that wait. `sharing`
    users of the value may have moves in common, which the program makes once."""

    ends: tuple[int, int]
    key: tuple
    max_transfers: int
    bytes: int
    table: Callable[[LatencyShares | None], Table]
    transfers: Callable[[int, int], list[ValueTransfer]]
    positions: Positions
    users: Sequence[User] = ()
    sharing: int = 1

    def late_transfers(self, choice: Sequence[int]) -> list[LateTransfer]:
        """Return the transfers of a solution."""
        i, j = self.ends
        found = list[LateTransfer]()
        for transfer in self.transfers(choice[i], choice[j]):
            at = [user.at - 1 for user in self.users if user.waits(transfer, choice)]
            last = min((*at, self.positions.last))
            found.append(LateTransfer(transfer, self.positions._replace(last=last)))
        return found


def _only_gathers(transfer: ValueTransfer) -> bool:
    _, source, target = transfer
    dims = zip(source.dims, target.dims, strict=True)
    return source.partial == target.partial and all(old[: len(new)] == new for old, new in dims)


def times(candidates: Candidates) -> Table:
    """Return how many times each candidate is computed."""
    return np.array([float(c.times) for c in candidates])


def use_seconds(
    mesh: Mesh,
    moved: MovedValue,
    layouts: ValueLayouts,
    candidates: Candidates,
    at: Sequence[int],
    shares: LatencyShares | None,
) -> Table:
    """Return the time of the redistributions from each layout of a value for each candidate of an
    op that uses it at the operands `at`."""
    needs = [needed(c, at) for c in candidates]
    column = {l: i for i, l in enumerate(dict.fromkeys(l for n in needs for l in n))}
    seconds = moved.seconds(mesh, layouts, [*column], shares)
    columns = {n: sum(seconds[:, column[l]] for l in n) for n in dict.fromkeys(needs)}
    return np.stack([columns[n] for n in needs], axis=1) * times(candidates)
