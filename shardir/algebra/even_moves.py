"""The moves of moves.py from many layouts of even shards at once, and those that lead to them.

The splits are numbers (even_codes.py):

all layouts, one dimension, all runs     ->  the slices that are free to be taken
all layouts that are partial same       ->  the reductions over each set of these axes
"""

from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

import numpy as np

from shardir.algebra.even_codes import Layouts, Spelling, union
from shardir.algebra.even_times import EXCHANGE
from shardir.algebra.moves import RedistributionProblem
from shardir.algebra.traffic import Indices

SLICE, MAKE_PARTIAL, ROOTED, GATHER, ALL_TO_ALL, REDUCE, SCATTER = range(EXCHANGE)
"""The numbers of KINDS."""


class MoveArrays(NamedTuple):
    """Moves: the number of the layout at one end of each, the layout at the other, and the
    parameters of `EvenTimes.seconds`."""

    numbers: Indices
    others: Layouts
    kinds: Indices
    axes: Indices
    dims: Indices

    def some(self, which: Indices) -> "MoveArrays":
        return MoveArrays(
            self.numbers[which], self.others[which], self.kinds[which], self.axes[which],
            self.dims[which],
        )  # fmt: skip

    def made(self) -> Indices:
        """Return all but the layouts at the other end: [move, 5]."""
        return np.column_stack([self.numbers, self.kinds, self.axes, self.dims])


MoveRows = tuple[Indices, ...]
"""The same as columns: the codes of the splits and the bits of the partial axes of the layout at
the other end are the second and the third, and the two dimensions the last."""


class EvenMoves:
    """The moves between layouts over the sub-axes of `spelling`."""

    def __init__(self, problem: RedistributionProblem, spelling: Spelling):
        self.spelling, self.rank = spelling, len(problem.shape)
        self.sums = spelling.reduction == "sum"  # only of sums zeros are the identity
        self.runs = np.array([spelling.code(run) for run in problem.runs], dtype=np.int64)
        self.run_masks = spelling.masks(self.runs)
        self.target = np.array([spelling.code(axes) for axes in problem.target.dims])
        self.partial = spelling.bitmask(problem.target.partial)
        self.reduced = spelling.bitmask(problem.source.partial)
        split = sum(map(spelling.bitmask, problem.source.dims)) if self.sums else 0
        self.scattered = self.reduced | split
        """The axes over which a value is partial on the way to the target: the source's, and those
        that split it before it became partial."""
        self.divides = None
        if not problem.is_even:
            self.divides = np.array([n % spelling.extents == 0 for n in problem.shape])
        self._orders: dict[int, tuple[Indices, Indices]] = {}

    def of(self, layouts: Layouts) -> MoveArrays:
        """Return every move from layouts that a plan may need, some of them more than once."""
        return self._nested(layouts, _arrays([*self._named(layouts), self._exchanges(layouts)]))

    def named(self, layouts: Layouts) -> MoveArrays:
        """Return the same without exchanges."""
        return self._nested(layouts, _arrays([*self._named(layouts)]))

    def _named(self, layouts: Layouts) -> Iterator[MoveRows]:
        yield from self._local(layouts)
        yield from self._along_suffixes(layouts)
        for partial in {*layouts.partial.tolist()}:
            same = np.flatnonzero(layouts.partial == partial)
            yield from self._reductions(layouts, same, partial)

    def to(self, layouts: Layouts) -> MoveArrays:
        """Return the moves that lead to layouts, but for exchanges."""
        found = [*self._local_to(layouts), *self._gathers_to(layouts)]
        found += [*self._along_suffixes_to(layouts), *self._reductions_to(layouts)]
        return self._nested(layouts, _arrays(found))

    def _nested(self, layouts: Layouts, moves: MoveArrays) -> MoveArrays:
        """Return the moves that are possible with uneven shards: shards over more axes are within
        those over fewer where both divide the dimension, or it was unsharded. Others are gathered
        by exchanges."""
        if self.divides is None:
            return moves
        here, there = layouts.splits[moves.numbers], moves.others.splits
        fine = self.spelling.masks(np.maximum(here, there))
        nest = (here == there) | (np.minimum(here, there) == 0)
        nest |= self.divides[np.arange(self.rank), fine]
        possible, gathers = nest.all(axis=1), moves.kinds == GATHER
        changed = gathers & ~possible
        moves.kinds[changed], moves.axes[changed], moves.dims[changed] = EXCHANGE, 0, -1
        return moves.some(np.flatnonzero(possible | changed | (moves.kinds == EXCHANGE)))

    def _appended(self, splits: Indices, dim: int, axes: Indices) -> Indices:
        """Return splits of which one dimension is split over these axes too."""
        found = splits.copy()
        found[:, dim] = self.spelling.joined(splits[:, dim], axes)
        return found

    def _local(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield slices, and complete values made partial."""
        used = self._used(layouts)
        before, run = np.nonzero((used[:, None] & self.run_masks) == 0)
        axes, splits = self.runs[run], layouts.splits[before]
        for dim in range(self.rank):
            after = self._appended(splits, dim, axes)
            yield _rows(before, after, layouts.partial[before], SLICE, axes, dim)
        for i in range(self.spelling.count):
            if self.partial >> i & 1:
                before = np.flatnonzero((used >> i & 1) == 0)
                partial, axes = layouts.partial[before] | 1 << i, np.full(len(before), i + 1)
                yield _rows(before, layouts.splits[before], partial, MAKE_PARTIAL, axes)

    def _used(self, layouts: Layouts) -> Indices:
        return union(self.spelling.masks(layouts.splits)) | layouts.partial

    def _along_suffixes(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield gathers, all-to-alls and splits made partial, of all minor axes of a dimension."""
        spelling = self.spelling
        for dim in range(self.rank):
            lengths = spelling.lengths(layouts.splits[:, dim])
            before, gone = np.nonzero(lengths[:, None] > np.arange(spelling.count))
            splits, partial = layouts.splits[before], layouts.partial[before]
            splits[:, dim], axes = spelling.parted(splits[:, dim], lengths[before] - gone - 1)
            yield _rows(before, splits, partial, GATHER, axes, dim)
            if self.sums:
                among = partial | spelling.masks(axes)
                yield _rows(before, splits, among, ROOTED, axes, dim)
            for other in range(self.rank):
                if other != dim:
                    after = self._appended(splits, other, axes)
                    yield _rows(before, after, partial, ALL_TO_ALL, axes, other, dim)

    def _reductions(self, layouts: Layouts, same: Indices, partial: int) -> Iterator[MoveRows]:
        """Yield the reductions from layouts that are `partial` same."""
        if not partial:
            return
        sets, orders = self._scattered(partial)
        for kind, codes in ((REDUCE, sets), (SCATTER, orders)):
            before = np.repeat(same, len(codes))
            axes, splits = np.tile(codes, len(same)), layouts.splits[before]
            after = partial & ~self.spelling.masks(axes)
            if kind == REDUCE:
                yield _rows(before, splits, after, kind, axes)
                continue
            for dim in range(self.rank):
                split = self._appended(splits, dim, axes)
                yield _rows(before, split, after, kind, axes, dim)

    def _scattered(self, partial: int) -> tuple[Indices, Indices]:
        """Return the sets of some partial axes, and the orders in which they are scattered."""
        if partial not in self._orders:
            spelling = self.spelling
            left = spelling.of_bits(partial)
            some = [axes for n in range(1, len(left) + 1) for axes in combinations(left, n)]
            inner = self.runs[(self.run_masks & ~partial) == 0]
            rest = spelling.without(np.full(len(inner), spelling.code(left)), spelling.masks(inner))
            several = [spelling.code(axes) for axes in some if len(axes) > 1]
            every = [*inner.tolist(), *spelling.joined(inner, rest).tolist(), *several]
            orders = np.array([*dict.fromkeys(every)], dtype=np.int64)
            self._orders[partial] = np.array([*map(spelling.code, some)]), orders
        return self._orders[partial]

    def _parted(self, layouts: Layouts) -> Iterator[tuple[int, Indices, Indices, Indices, Indices]]:
        """Yield each dimension with the layouts of which it is split without its minor axes, one or
        more: their rows, splits and partial axes, and the axes."""
        spelling = self.spelling
        for dim in range(self.rank):
            lengths = spelling.lengths(layouts.splits[:, dim])
            row, n = np.nonzero(lengths[:, None] > np.arange(spelling.count))
            splits, partial = layouts.splits[row], layouts.partial[row]
            splits[:, dim], axes = spelling.parted(splits[:, dim], n)
            yield dim, row, splits, partial, axes

    def _local_to(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield the slices of all minor axes of a dimension, and the moves by which a value became
        partial over one axis: it was complete, or split over that axis too."""
        spelling = self.spelling
        for dim, row, splits, partial, axes in self._parted(layouts):
            yield _rows(row, splits, partial, SLICE, axes, dim)
        row, i = np.nonzero(layouts.partial[:, None] >> np.arange(spelling.count) & 1)
        splits, partial = layouts.splits[row], layouts.partial[row] & ~(1 << i)
        yield _rows(row, splits, partial, MAKE_PARTIAL, i + 1)
        for dim in range(self.rank if self.sums else 0):
            yield _rows(row, self._appended(splits, dim, i + 1), partial, ROOTED, i + 1, dim)

    def _gathers_to(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield the gathers of a run, or of some of all axes in the mesh's order or the reverse."""
        used = self._used(layouts)
        row, run = np.nonzero((used[:, None] & self.run_masks) == 0)
        found = [(row, self.runs[run])]
        found += [self._starts(used, reverse) for reverse in (False, True)]
        row, axes = (np.concatenate(x) for x in zip(*found, strict=True))
        splits, partial = layouts.splits[row], layouts.partial[row]
        for dim in range(self.rank):
            yield _rows(row, self._appended(splits, dim, axes), partial, GATHER, axes, dim)

    def _starts(self, used: Indices, reverse: bool) -> tuple[Indices, Indices]:
        """Return the first axes, two or more, of those that are not used, in the mesh's order or
        the reverse."""
        spelling = self.spelling
        free = spelling.of_sets(~used & (1 << spelling.count) - 1, reverse)
        row, n = np.nonzero(spelling.lengths(free)[:, None] > np.arange(1, spelling.count))
        return row, spelling.parted(free[row], n + 2)[0]

    def _along_suffixes_to(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield the all-to-alls by which the minor axes of a dimension came from another one, and
        the reduce-scatters."""
        for dim, row, splits, partial, axes in self._parted(layouts):
            for other in range(self.rank):
                if other != dim:
                    before = self._appended(splits, other, axes)
                    yield _rows(row, before, partial, ALL_TO_ALL, axes, dim, other)
            sets = self.spelling.masks(axes)
            some = np.flatnonzero((sets & ~self.scattered) == 0)
            among = (partial | sets)[some]
            yield _rows(row[some], splits[some], among, SCATTER, axes[some], dim)

    def _reductions_to(self, layouts: Layouts) -> Iterator[MoveRows]:
        """Yield the all-reduces of the source's partial values."""
        if not self.reduced:
            return
        sets, _ = self._scattered(self.reduced)
        masks = self.spelling.masks(sets)
        row, k = np.nonzero((self._used(layouts)[:, None] & masks) == 0)
        partial = layouts.partial[row] | masks[k]
        yield _rows(row, layouts.splits[row], partial, REDUCE, sets[k])

    def _exchanges(self, layouts: Layouts) -> MoveRows:
        """Return the exchanges of `_exchanges` in moves.py."""
        now, used, partial = layouts.splits, self._used(layouts), layouts.partial
        wanted = self.spelling.before(np.broadcast_to(self.target, now.shape), partial[:, None])
        parts = [*self._towards(layouts, wanted)]
        row, ends = np.tile(np.arange(len(now)), len(parts)), np.concatenate(parts)
        row, ends = self._valid(layouts, row, ends)
        found = [(row, ends), self._with_runs(row, ends, partial)]
        found += [*self._shifted(wanted), *self._single(now, used)]
        row, ends = (np.concatenate(x) for x in zip(*found, strict=True))
        row, ends = self._valid(layouts, row, ends)
        zeros = np.zeros(len(row), dtype=np.int64)
        return _rows(row, ends, partial[row], EXCHANGE, zeros)

    def _valid(self, layouts: Layouts, row: Indices, ends: Indices) -> tuple[Indices, Indices]:
        """Return the exchanges that are over some axes, and in which no axis is used twice."""
        spelling, old = self.spelling, layouts.splits[row]
        moves = ((old != ends) & (old > 0)).any(axis=1)
        row, ends = row[moves], ends[moves]
        masks = union(spelling.masks(ends))
        once = np.bitwise_count(masks) == spelling.lengths(ends).sum(axis=1)
        good = np.flatnonzero(once & (masks & layouts.partial[row] == 0))
        return row[good], ends[good]

    def _towards(self, layouts: Layouts, wanted: Indices) -> Iterator[Indices]:
        """Yield an end for each layout: the target's split as far as its axes are not partial
        (`wanted`), of all dimensions or of one, perhaps with others at the minor end."""
        spelling, rank, now = self.spelling, self.rank, layouts.splits
        new = self.partial & ~layouts.partial
        added = spelling.of_sets(new)
        for dim in range(rank):
            yield self._appended(np.broadcast_to(self.target, now.shape), dim, added)
        masks, aims = spelling.masks(now), spelling.masks(wanted)
        rest = spelling.without(now, union(aims)[:, None])
        yield spelling.joined(wanted, self._first(rest, new[:, None]))
        left = rest[:, 0]
        for dim in range(1, rank):
            left = spelling.joined(left, rest[:, dim])
        left = self._first(left, new)
        for dim in range(rank):
            yield self._appended(wanted, dim, left)
            others = union(np.delete(masks, dim, axis=1))
            aim = wanted[:, dim]
            mine = spelling.without(now[:, dim], aims[:, dim])
            for end in (aim, spelling.joined(aim, mine), spelling.before(aim, others)):
                ends = spelling.without(now, spelling.masks(end)[:, None])
                ends[:, dim] = end
                yield ends
        yield wanted

    def _first(self, codes: Indices, some: Indices) -> Indices:
        """Return the axes, those that are among some before the others."""
        spelling = self.spelling
        return spelling.joined(
            spelling.without(codes, some, keep=True), spelling.without(codes, some)
        )

    def _with_runs(self, row: Indices, ends: Indices, partial: Indices) -> tuple[Indices, Indices]:
        """Return the ends with axes that they do not use at the minor end of a dimension, to be
        gathered later: a run, or some of all axes in the reverse of the mesh's order, so that those
        along the outermost links are gathered first."""
        spelling = self.spelling
        masks = union(spelling.masks(ends)) | partial[row]
        at, run = np.nonzero((masks[:, None] & self.run_masks) == 0)
        free = spelling.of_sets(~masks & (1 << spelling.count) - 1, reverse=True)
        some, n = np.nonzero(spelling.lengths(free)[:, None] > np.arange(1, spelling.count))
        axes = np.concatenate([self.runs[run], spelling.parted(free[some], n + 2)[0]])
        at = np.concatenate([at, some])
        found = [self._appended(ends[at], dim, axes) for dim in range(self.rank)]
        return np.tile(row[at], self.rank), np.concatenate(found)

    def _shifted(self, wanted: Indices) -> Iterator[tuple[Indices, Indices]]:
        """Yield the target's split with the minor axes of one dimension in another."""
        spelling = self.spelling
        for dim in range(self.rank):
            lengths = spelling.lengths(wanted[:, dim])
            row, n = np.nonzero(lengths[:, None] > np.arange(max(lengths, default=0)))
            rest = wanted[row]
            rest[:, dim], axes = spelling.parted(rest[:, dim], n)
            for other in range(self.rank):
                if other != dim:
                    yield row, self._appended(rest, other, axes)

    def _single(self, now: Indices, used: Indices) -> Iterator[tuple[Indices, Indices]]:
        """Yield the exchanges of one sub-axis to the minor end of a dimension, perhaps with a run
        that is not used."""
        spelling = self.spelling
        for dim in range(self.rank):
            lengths = spelling.lengths(now[:, dim])
            row, at = np.nonzero(lengths[:, None] > np.arange(spelling.count))
            rest = now[row]
            major, minor = spelling.parted(rest[:, dim], at)
            axis, minor = spelling.parted(minor, 1)
            rest[:, dim] = major | minor << spelling.width * at
            for other in range(self.rank):
                ends = self._appended(rest, other, axis)
                yield row, ends
                some, run = np.nonzero((used[row][:, None] & self.run_masks) == 0)
                yield row[some], self._appended(ends[some], other, self.runs[run])


def _rows(
    numbers: Indices, splits: Indices, partial: Indices, kind: int, axes: Indices, dim: int = -1,
    concat: int = -1,
) -> MoveRows:  # fmt: skip
    n = len(numbers)
    rest = np.full(n, kind), axes, np.full(n, dim), np.full(n, concat)
    return numbers, splits, partial, *rest


def _arrays(found: list[MoveRows]) -> MoveArrays:
    (*columns,) = map(np.concatenate, zip(*found, strict=True))
    numbers, splits, partial, kinds, axes, *dims = columns
    return MoveArrays(numbers, Layouts(splits, partial), kinds, axes, np.stack(dims, axis=1))
