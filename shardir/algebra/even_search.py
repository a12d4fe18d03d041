"""The search for the fastest plan between layouts of even shards: A*, of many layouts at once.

    the 64 layouts by which a plan may be the fastest  ->  all moves from them, as arrays
    -> the layouts after them, each once, with a bound of what is left
    -> the times of those moves by which a plan may be faster than the best one

The order is that of the time so far and the bound of what is left times WEIGHT, so that some plan
is found soon; a layout is left out only by the bound itself. So when none is left, no plan by these
moves is faster (Hansen and Zhou, Anytime heuristic search, 2007).
"""

import numpy as np

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.even_codes import Layouts, Spelling
from shardir.algebra.even_moves import EvenMoves, MoveArrays, numbered
from shardir.algebra.even_times import EXCHANGE, KINDS, EvenTimes
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.mesh import Axes
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.traffic import Indices

WEIGHT = 1.5

AT_ONCE = 64
"""The number of layouts from which moves are made at once, at the maximum."""


class EvenSearch:
    """A search, which can go on when a faster plan is known, of a problem that `fits`."""

    def __init__(self, problem: RedistributionProblem, itemsize: int):
        self.problem = problem
        mesh = problem.mesh
        spelling = self.spelling = Spelling(mesh, _axes(problem))
        self.moves = EvenMoves(problem, spelling)
        self.times = EvenTimes(mesh, problem.shape, itemsize, spelling, problem.target)
        self.layouts = numbered(spelling, problem.source)
        self.so_far, self.left = np.zeros(1), self.times.bounds(self.layouts)
        self.open = np.ones(1, dtype=np.bool_)
        self.made = np.full((1, 5), -1)
        """The `numbers` of the move by which each layout is reached."""
        self.keys = self._keys(self.layouts)
        self.sorted = np.zeros(1, dtype=np.int64)
        self.target = self._keys(numbered(spelling, problem.target))
        self.expanded = 0

    @staticmethod
    def fits(problem: RedistributionProblem) -> bool:
        """Whether all layouts on the way are of even shards and partial sums, a layout is a number
        of 63 bits, and exchanges have a closed form: no inner link is slower than an outer one."""
        k, rank = len(_axes(problem)), len(problem.shape)
        speeds = [level.bandwidth for level in problem.mesh.cluster_or_default.levels]
        sums = problem.source.reduction == problem.target.reduction == "sum"
        fits = (k + 1) ** (k + rank) << k < 2**63
        return problem.is_even and sums and fits and speeds == sorted(speeds, reverse=True)

    def _keys(self, layouts: Layouts) -> Indices:
        """Return a number for each layout: its axes, with a 0 after each dimension."""
        spelling, key, at = self.spelling, np.zeros(len(layouts.partial), dtype=np.int64), 0
        base = spelling.base
        powers = np.array([base**i for i in range(spelling.count + layouts.splits.shape[1])])
        for codes in layouts.splits.T:
            key += codes * powers[at]
            at = at + spelling.lengths(codes) + 1
        return (key << spelling.count) | layouts.partial

    def run(self, best: float, limit: int) -> tuple[bool, float]:
        """Search until no plan can be faster, or moves are made from `limit` layouts; return
        whether none can, and the time of the fastest plan."""
        while True:
            if len(at := self._numbers(self.target)):
                best = min(best, float(self.so_far[at[0]]))
            lowest = self.so_far + self.left
            todo = np.flatnonzero(self.open & (lowest < best * IMPROVEMENT))
            if not len(todo):
                return True, best
            if self.expanded >= limit:
                return False, best
            order = self.so_far[todo] + WEIGHT * self.left[todo]
            count = min(AT_ONCE, max(2, 2 * self.expanded))
            if len(todo) > count:
                todo = todo[np.argpartition(order, count)[:count]]
            self._expand(todo, best * IMPROVEMENT)

    def _numbers(self, keys: Indices) -> Indices:
        """Return the numbers of the layouts of some keys that are known."""
        at = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return self.sorted[at][self.keys[at] == keys]

    def _expand(self, some: Indices, limit: float) -> None:
        """Make the moves from some layouts that may lead to a plan of less than `limit` seconds."""
        self.open[some] = False
        self.expanded += len(some)
        moves = self.moves.of(self.layouts[some])
        moves = moves._replace(before=some[moves.before])
        moves, numbers = self._with_numbers(moves)
        so_far = self.so_far[moves.before]
        most = np.minimum(limit - self.left[numbers], self.so_far[numbers])
        useful = self._distinct(moves, numbers, np.flatnonzero(so_far < most))
        moves, numbers, most = moves.some(useful), numbers[useful], most[useful]
        before = self.layouts[moves.before]
        seconds = so_far[useful] + self.times.seconds(
            before, moves.after, moves.kinds, moves.axes, moves.dims
        )
        faster = np.flatnonzero(seconds < most)
        # of the moves to one layout the fastest, first in order
        order = faster[np.lexsort((seconds[faster], numbers[faster]))]
        first = np.flatnonzero(np.diff(numbers[order], prepend=-1))
        order = order[first]
        to = numbers[order]
        self.so_far[to], self.open[to] = seconds[order], True
        self.made[to] = moves.some(order).numbers()

    def _distinct(self, moves: MoveArrays, numbers: Indices, some: Indices) -> Indices:
        """Return some moves without the exchanges that are made twice."""
        exchanged = moves.kinds[some] == EXCHANGE
        exchanges = some[exchanged]
        ends = moves.before[exchanges] * len(self.so_far) + numbers[exchanges]
        _, first = np.unique(ends, return_index=True)
        return np.sort(np.concatenate([some[~exchanged], exchanges[first]]))

    def _with_numbers(self, moves: MoveArrays) -> tuple[MoveArrays, Indices]:
        """Return the moves, and the numbers of the layouts after them; new ones are bounded."""
        keys = self._keys(moves.after)
        distinct, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
        at = np.searchsorted(self.keys, distinct).clip(max=len(self.keys) - 1)
        known = self.keys[at] == distinct
        numbers = np.where(known, self.sorted[at], -1)
        new = first[~known]
        if len(new):
            layouts = moves.after[new]
            n = len(self.so_far)
            numbers[~known] = np.arange(n, n + len(new))
            self._add(layouts, distinct[~known])
        return moves, numbers[inverse]

    def _add(self, layouts: Layouts, keys: Indices) -> None:
        n, count = len(self.so_far), len(keys)
        self.layouts = Layouts(
            np.concatenate([self.layouts.splits, layouts.splits]),
            np.concatenate([self.layouts.partial, layouts.partial]),
        )
        self.so_far = np.concatenate([self.so_far, np.full(count, np.inf)])
        self.left = np.concatenate([self.left, self.times.bounds(layouts)])
        self.open = np.concatenate([self.open, np.zeros(count, dtype=np.bool_)])
        self.made = np.concatenate([self.made, np.full((count, 5), -1)])
        at = np.searchsorted(self.keys, keys)
        self.keys = np.insert(self.keys, at, keys)
        self.sorted = np.insert(self.sorted, at, np.arange(n, n + count))

    def steps(self) -> list[CollectiveStep]:
        """Return the steps of the fastest path to the target."""
        problem, found = self.problem, list[CollectiveStep]()
        at = int(self._numbers(self.target)[0])
        path = [at]
        while (at := int(self.made[at, 0])) >= 0:
            path.append(at)
        now = problem.source
        for at in reversed(path[:-1]):
            _, kind, axes, dim, concat = self.made[at].tolist()
            layout = self.times.layout(self.layouts[at])
            if kind == EXCHANGE:
                found.append(CollectiveStep("exchange", exchange_axes(now, layout), layout))
            else:
                spelled = self.spelling.spelled(axes)
                start, end = KINDS[kind]
                found.append(problem.move(start, end, now, spelled, dim, concat))
            now = layout
        return found


def _axes(problem: RedistributionProblem) -> Axes:
    """Return all sub-axes, in the mesh's order."""
    mesh = problem.mesh
    return tuple(sorted(mesh.cut(mesh.names, problem.spellings[0]), key=mesh.order))
