"""The redistributions between two variables of a cost graph."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardir.algebra.routes import Table
from shardir.search.buckets import LateTransfer, Positions
from shardir.search.candidates import Candidates
from shardir.search.latency_shares import LatencyShares
from shardir.search.transfer_costs import ValueTransfer
from shardir.search.value_layouts import needed


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
        layouts = needed(self.candidates[choice[self.variable]], self.operands)
        return any(layout != transfer.source for layout in layouts)


class Edge(NamedTuple):
    """The redistributions between two variables: their times with shares of buckets, and the
    transfers for a value of each variable, at most `max_transfers` of tensors of so many `bytes`,
    with their `positions`, the last of which is before those of the `users` that wait."""

    ends: tuple[int, int]
    key: tuple
    max_transfers: int
    bytes: int
    table: Callable[[LatencyShares | None], Table]
    transfers: Callable[[int, int], list[ValueTransfer]]
    positions: Positions
    users: Sequence[User] = ()

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
