"""The fastest paths from one layout to many, or from many to one, of even shards: A*, of many
layouts at once.

    the 256 layouts by which a plan may be the fastest  ->  all moves from them, as arrays
    -> the layouts after them, each once, with a bound of what is left
    -> the times of those moves by which a plan may be faster than the best one
"""

from collections.abc import Callable

import numpy as np

from shardir.algebra.even_codes import KeyNumbers, Layouts, Spelling
from shardir.algebra.even_moves import MoveArrays
from shardir.algebra.even_times import EXCHANGE
from shardir.algebra.exchange_costs import Table
from shardir.algebra.traffic import Indices

AT_ONCE = 256
"""The number of layouts from which moves are made at once, at the maximum."""

LayoutBounds = Callable[[Layouts], Table]
"""Lower bounds of the time of what is left of a plan, by the layout at which a path ends."""

LayoutMoves = Callable[[Layouts], MoveArrays]

MoveTimes = Callable[[Layouts, MoveArrays], Table]
"""The times of moves, by the layouts at the end where the paths already are."""


class EvenPaths:
    """The layouts that are reached from `start`, and the fastest paths found. The order is that of
    the time so far and the bound of what is left times `weight`."""

    def __init__(
        self, spelling: Spelling, start: Layouts, moves: LayoutMoves, times: MoveTimes,
        bounds: LayoutBounds, weight: float = 1,
    ):  # fmt: skip
        self._spelling = spelling
        self._moves, self._times, self._bounds, self.weight = moves, times, bounds, weight
        self.layouts, self.so_far, self.left = start, np.zeros(1), bounds(start)
        self.open = np.ones(1, dtype=np.bool_)
        self.made = np.full((1, 5), -1)
        """The move by which each layout is reached (`MoveArrays.made`)."""
        self._numbers = KeyNumbers()
        self._numbers.add(spelling.keys(start))
        self.expanded = 0

    def number(self, layout: Layouts) -> int | None:
        """Return the number of a layout; None if it is not known."""
        found = int(self._numbers.find(self._spelling.keys(layout))[0])
        return found if found >= 0 else None

    def expand(self, limit: float) -> bool:
        """Go on from some of the layouts by which a plan may take less than `limit` seconds;
        return whether there were any."""
        todo = np.flatnonzero(self.open & (self.so_far + self.left < limit))
        if not len(todo):
            return False
        order = self.so_far[todo] + self.weight * self.left[todo]
        count = min(AT_ONCE, max(2, 2 * self.expanded))
        if len(todo) > count:
            todo = todo[np.argpartition(order, count)[:count]]
        self.open[todo] = False
        self.expanded += len(todo)
        moves = self._moves(self.layouts[todo])
        self._take(moves._replace(numbers=todo[moves.numbers]), limit)
        return True

    def ended(self, limit: float) -> bool:
        """Whether no layouts are left to go on from by which a plan may take less than `limit`."""
        return not (self.open & (self.so_far + self.left < limit)).any()

    def _take(self, moves: MoveArrays, limit: float) -> None:
        """Add the moves that may lead to a plan of less than `limit` seconds."""
        numbers, so_far = self._with_numbers(moves.others), self.so_far[moves.numbers]
        most = np.minimum(limit - self.left[numbers], self.so_far[numbers])
        useful = self._distinct(moves, numbers, np.flatnonzero(so_far < most))
        moves, numbers, most = moves.some(useful), numbers[useful], most[useful]
        seconds = so_far[useful] + self._times(self.layouts[moves.numbers], moves)
        faster = np.flatnonzero(seconds < most)
        # of the moves to one layout the fastest, first in order
        order = faster[np.lexsort((seconds[faster], numbers[faster]))]
        order = order[np.flatnonzero(np.diff(numbers[order], prepend=-1))]
        to = numbers[order]
        self.so_far[to], self.open[to] = seconds[order], True
        self.made[to] = moves.some(order).made()

    def _distinct(self, moves: MoveArrays, numbers: Indices, some: Indices) -> Indices:
        """Return some moves without the exchanges that are made twice."""
        exchanged = moves.kinds[some] == EXCHANGE
        if not exchanged.any():
            return some
        exchanges = some[exchanged]
        ends = moves.numbers[exchanges] * len(self.so_far) + numbers[exchanges]
        _, first = np.unique(ends, return_index=True)
        return np.sort(np.concatenate([some[~exchanged], exchanges[first]]))

    def _with_numbers(self, layouts: Layouts) -> Indices:
        """Return the numbers of layouts; new ones are added."""
        keys, first, at = np.unique(
            self._spelling.keys(layouts), return_index=True, return_inverse=True
        )
        numbers = self._numbers.find(keys)
        new = np.flatnonzero(numbers < 0)
        if len(new):
            numbers[new] = self._numbers.add(keys[new])
            self._add(layouts[first[new]])
        return numbers[at]

    def _add(self, layouts: Layouts) -> None:
        n = len(layouts)
        self.layouts = self.layouts.joined(layouts)
        self.so_far = np.concatenate([self.so_far, np.full(n, np.inf)])
        self.left = np.concatenate([self.left, self._bounds(layouts)])
        self.open = np.concatenate([self.open, np.zeros(n, dtype=np.bool_)])
        self.made = np.concatenate([self.made, np.full((n, 5), -1)])

    def path(self, at: int) -> list[int]:
        """Return the numbers of the layouts on the path to one, that first and `start` last."""
        found = [at]
        while (at := int(self.made[at, 0])) >= 0:
            found.append(at)
        return found
