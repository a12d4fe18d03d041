"""The redistributions between two variables of a cost graph."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardir.algebra.routes import Table
from shardir.search.buckets import LateTransfer, Positions
from shardir.search.latency_shares import LatencyShares
from shardir.search.transfer_costs import ValueTransfer


class Edge(NamedTuple):
    """The redistributions between two variables: their times with shares of buckets, and the
    transfers for a value of each variable, at most `max_transfers` of tensors of so many `bytes`,
    with their `positions`."""

    ends: tuple[int, int]
    key: tuple
    max_transfers: int
    bytes: int
    table: Callable[[LatencyShares | None], Table]
    transfers: Callable[[int, int], list[ValueTransfer]]
    positions: Positions

    def late_transfers(self, choice: Sequence[int]) -> list[LateTransfer]:
        """Return the transfers of a solution."""
        i, j = self.ends
        return [LateTransfer(t, self.positions) for t in self.transfers(choice[i], choice[j])]
