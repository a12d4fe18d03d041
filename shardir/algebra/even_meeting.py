"""Plans of even shards whose two ends meet in one exchange, for all pairs of ends at once.

    [{a, b}, {}]    the ends of paths from the source    0b011 at places 0, 1
    [{b}, {a}]      those of paths to the target         gone: b of the first; paired: b for a

A bound of the time of each exchange, without packing, is found from the places of all old and all
new splits as bits (even_places.py), in arrays of all pairs. Where it is low enough, it is priced.
"""

from typing import NamedTuple

import numpy as np

from shardir.algebra.even_codes import Layouts
from shardir.algebra.even_paths import EvenPaths
from shardir.algebra.even_times import EvenTimes
from shardir.algebra.exchange_costs import Table
from shardir.algebra.traffic import Indices

MAX_PAIRS = 100_000
"""The number of exchanges that are bounded at once, which limits the memory."""

MAX_PRICED = 2000
"""The number of exchanges that are priced at once: the fastest limits the others."""


class MeetingEnds(NamedTuple):
    """The ends of some paths, partial over the same axes, with the numbers and the seconds of the
    paths: in the order of the seconds."""

    numbers: Indices
    layouts: Layouts
    seconds: Table

    @staticmethod
    def of(paths: EvenPaths, some: Indices) -> "MeetingEnds":
        order = some[np.argsort(paths.so_far[some], kind="stable")]
        return MeetingEnds(order, paths.layouts[order], paths.so_far[order])

    def some(self, which: slice) -> "MeetingEnds":
        return MeetingEnds(self.numbers[which], self.layouts[which], self.seconds[which])


Meeting = tuple[float, int, int]
"""The seconds of a plan, and the numbers of the paths from the source and to the target."""


class EvenMeetings:
    """The fastest plans of a path from the source, an exchange and a path to the target."""

    def __init__(self, times: EvenTimes, limit: float, count: int):
        self._times, self.limit, self._count = times, limit, count
        self.found = list[Meeting]()
        """At most `count` plans of less than `limit` seconds."""

    def add(self, heads: MeetingEnds, tails: MeetingEnds) -> None:
        """Find plans between some ends, partial over the same axes."""
        done, bounds = 0, self._times.lowest(heads.layouts, tails.layouts)
        while done < len(heads.numbers):
            count = int(np.searchsorted(tails.seconds, self.limit - heads.seconds[done]))
            if not count:
                return
            rows, columns = slice(done, done + max(MAX_PAIRS // count, 1)), slice(count)
            block, some = heads.some(rows), tails.some(columns)
            done += len(block.numbers)
            lowest = bounds.seconds(rows, columns)
            lowest += block.seconds[:, None]
            lowest += some.seconds
            self._price(block, some, lowest)

    def _price(self, heads: MeetingEnds, tails: MeetingEnds, lowest: Table) -> None:
        """Price the exchanges of plans whose bounds are below the limit, those first."""
        some = np.flatnonzero(lowest < self.limit)
        while len(some):
            first, some = _parted(some, lowest.flat[some], MAX_PRICED)
            i, j = np.divmod(first, len(tails.numbers))
            seconds = self._times.meetings(heads.layouts[i], tails.layouts[j])
            seconds += heads.seconds[i] + tails.seconds[j]
            best = np.argsort(seconds, kind="stable")[: self._count]
            best = best[seconds[best] < self.limit]
            rows = seconds[best], heads.numbers[i[best]], tails.numbers[j[best]]
            more = zip(*(row.tolist() for row in rows), strict=True)
            self.found = sorted({*self.found, *more})[: self._count]
            if len(self.found) == self._count:
                self.limit = self.found[-1][0]
            some = some[lowest.flat[some] < self.limit]


def _parted(some: Indices, values: Table, count: int) -> tuple[Indices, Indices]:
    """Return those of the lowest values, at most `count`, in their order, and the others."""
    if len(some) <= count:
        return some, some[:0]
    order = np.argpartition(values, count)
    return np.sort(some[order[:count]]), some[order[count:]]
