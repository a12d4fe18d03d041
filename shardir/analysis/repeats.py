"""Equal blocks of ops: repeated parts of a sequence, compared by kinds, properties and types of ops
and by the sources of operands, not by names.

An operand in a block comes from an op of this block, or of the previous block, at one place in all
blocks; or from before all blocks. The streams of random numbers are at equal distances.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from xdsl.ir import Operation, OpResult

from shardir.compat.xdsl import operands_of
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import Array, TensorOp
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.train import LOOP, BackwardOp, EitherOp, TransferOp

MIN_BLOCKS = 3
"""The fewest equal blocks that become a loop: two are easier to read in sequence."""

MIN_SAVED = 12
"""The fewest ops that a loop must save, so that the lines of the loop itself are fewer than the
lines saved."""

PERIODS = 16
"""Bounds the distances between equal ops that are tried as the length of a block, most frequent
first."""

REPEATED = TensorOp | dist.CollectiveOp | dist.WaitOp | dist.RingProductOp
"""Kinds of ops that blocks contain."""

OWN = (*LOOP, TransferOp, EitherOp, nn.WhileOp)
"""Kinds of ops that no block contains: ops of loops, of steps in stages, whose functions have
blocks, and ops with regions, which are not compared."""

Place = tuple[int, int, int]
"""The source of an operand: number of blocks since its op, index in that block, index of the
result."""


class LoopMinimum(NamedTuple):
    """Lower bounds: on the number of equal blocks, on the ops that a loop saves, and on the ops of
    a block."""

    blocks: int
    saved: int
    ops: int = 2

    @property
    def extent(self) -> int:
        """The fewest ops that can contain a loop."""
        return max(self.blocks * self.ops, self.saved + self.ops)


class Blocks(NamedTuple):
    """Adjacent equal blocks of ops.

    Attributes:
        blocks: the ops of each block.
        places: by op of a block and by operand, its source; None if from before all blocks. An
            operand of the first block that corresponds to a result of the previous block comes from
            before all blocks too.
    """

    blocks: list[list[Operation]]
    places: list[list[Place | None]]


NUMBERS = re.compile(r"(\d+)")


def common_name(names: Sequence[str | None]) -> str | None:
    """Return the name that most of the names share, up to differing numbers, which are dropped."""
    known = [n for n in names if n is not None]
    if not known:
        return None
    similar = known
    if (numbers := _numbers_in(similar)) is None:
        forms = [tuple(NUMBERS.split(n)[::2]) for n in known]
        ((form, _),) = Counter(forms).most_common(1)
        similar = [n for n, parts in zip(known, forms, strict=True) if parts == form]
        numbers = _numbers_in(similar)
    assert numbers is not None
    parts = NUMBERS.split(similar[0])
    parts[1::2] = [part[0] if len({*part}) == 1 else "" for part in zip(*numbers, strict=True)]
    return re.sub(r"([._])[._]+", r"\1", "".join(parts)).strip("._") or known[0]


def _numbers_in(names: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return the numbers in each name if the names differ only in numbers; None otherwise."""
    parts = NUMBERS.split(names[0])
    parts = [NUMBERS.pattern if i % 2 else re.escape(part) for i, part in enumerate(parts)]
    found = [*map(re.compile("".join(parts)).fullmatch, names)]
    return None if None in found else [match.groups() for match in found if match is not None]


def equal_blocks(
    ops: Sequence[Operation],
    minimum: int = MIN_BLOCKS,
    saved: int = MIN_SAVED,
    equally_kept: bool = False,
) -> list[Blocks]:
    """Return the equal blocks among ops of a function, in order and without nesting. Values of ops
    outside `ops` count as from before all blocks.

    Args:
        minimum: the fewest equal blocks, 2 or more.
        saved: the fewest ops that a loop over them must save.
        equally_kept: whether the blocks must agree on the results that the backward part reads.
    """
    blocks: list[Blocks] = []
    minima = LoopMinimum(minimum, saved)
    if len(ops) < minima.extent:
        return blocks
    codes = _codes(ops, equally_kept)
    at = {op: i for i, op in enumerate(ops)}
    _find_blocks(ops, codes, at, minima, blocks)
    return sorted(blocks, key=lambda b: at[b.blocks[0][0]])


def _codes(ops: Sequence[Operation], equally_kept: bool) -> Array:
    """Return a number for each op; equal for ops that differ only in names and values."""
    numbers: dict[object, int] = {}
    signatures: dict[object, int] = {}
    memo = SignatureMemo()
    at = {op: i for i, op in enumerate(ops)} if equally_kept else {}
    starts = [i for i, op in enumerate(ops) if isinstance(op, BackwardOp)]
    codes = []
    for i, op in enumerate(ops):
        key: object = i
        if _may_repeat(type(op)):
            number = memo.of_op(
                op,
                lambda op=op: signatures.setdefault(_signature(op), len(signatures)),
                marks=True,
            )
            key = (number,)
            if equally_kept:
                start = starts[k] if (k := bisect_right(starts, i)) < len(starts) else len(ops)
                kept = (any(at.get(u.operation, 0) > start for u in v.uses) for v in op.results)
                key = (number, *kept)
        codes.append(numbers.setdefault(key, len(numbers)))
    return np.array(codes, np.int64)


@cache
def _may_repeat(kind: type[Operation]) -> bool:
    """Whether blocks may contain ops of a kind."""
    return issubclass(kind, REPEATED) and kind not in OWN


def _signature(op: Operation) -> object:
    """Return the kind, properties and types of an op, compared by value."""
    properties = {*op.properties.items(), *op.attributes.items()}
    if isinstance(op, nn.Drawn):
        properties.remove(("stream", op.stream))
    types = tuple(v.type for v in (*op.operands, *op.results))
    return type(op), frozenset(properties), len(op.operands), types


def _find_blocks(
    ops: Sequence[Operation],
    codes: Array,
    at: dict[Operation, int],
    minimum: LoopMinimum,
    found: list[Blocks],
) -> None:
    """Append blocks to `found`: blocks that save most first, then blocks around them."""
    ranges = [(0, len(ops))]
    while ranges:
        start, stop = ranges.pop()
        if stop - start < minimum.extent:
            continue
        for first, period, extent in _runs(codes[start:stop], minimum):
            if blocks := _longest_blocks(ops, at, start + first, period, extent, minimum):
                found.append(blocks)
                begin = at[blocks.blocks[0][0]]
                ranges += [(start, begin), (begin + period * len(blocks.blocks), stop)]
                break


def repeated_parts(codes: Array) -> Iterator[range]:
    """Yield the parts of a sequence that repeat at least MIN_BLOCKS times in a row, the largest
    savings first, without nesting."""
    ranges = [(0, len(codes))]
    while ranges:
        start, stop = ranges.pop()
        for first, period, extent in _runs(codes[start:stop], LoopMinimum(MIN_BLOCKS, 1, 1)):
            begin, end = start + first, start + first + extent // period * period
            yield from (range(i, i + period) for i in range(begin, end, period))
            ranges += [(start, begin), (end, stop)]
            break


def _runs(codes: Array, minimum: LoopMinimum) -> Iterator[tuple[int, int, int]]:
    """Yield runs (start, period, extent) in which each code equals the code one period later;
    largest savings first."""
    runs = []
    for period in _periods(codes, minimum):
        ends = np.flatnonzero(codes[:-period] != codes[period:])
        edges = np.concatenate(([-1], ends, [len(codes) - period]))
        for i in np.flatnonzero(np.diff(edges) > period):
            first, extent = int(edges[i]) + 1, int(edges[i + 1] - edges[i]) - 1 + period
            saved = (extent // period - 1) * period
            if extent >= minimum.blocks * period and saved >= minimum.saved:
                runs.append((-saved, period, first, extent))
    for _, period, first, extent in sorted(runs):
        yield first, period, extent


def _periods(codes: Array, minimum: LoopMinimum) -> list[int]:
    """Return the most frequent distances between equal sequences of 1, 4 and 16 codes."""
    periods: Counter[int] = Counter()
    grams, length = codes, 1
    while length <= 16 and len(grams) > 1:
        if length in (1, 4, 16):
            order = np.argsort(grams, kind="stable")
            gaps = np.diff(order)[np.diff(grams[order]) == 0]
            values, counts = np.unique(gaps, return_counts=True)
            frequent = np.argsort(-counts, kind="stable")[:PERIODS]
            periods.update(
                dict(zip(values[frequent].tolist(), counts[frequent].tolist(), strict=True))
            )
        pairs = grams[:-length] * (grams.max() + 1) + grams[length:]
        grams = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        length *= 2
    return [p for p in periods if minimum.ops <= p <= len(codes) // minimum.blocks]


def _longest_blocks(
    ops: Sequence[Operation],
    at: dict[Operation, int],
    first: int,
    period: int,
    extent: int,
    minimum: LoopMinimum,
) -> Blocks | None:
    """Return the longest series of equal blocks in a run of equal ops, cut where the fewest values
    cross."""
    first += _best_offset(ops, at, first, period, extent)
    count = extent // period
    blocks = [list(ops[first + k * period : first + (k + 1) * period]) for k in range(count)]
    places = [
        [_operand_places(op, at, first, period, k) for op in block]
        for k, block in enumerate(blocks)
    ]
    streams = [_streams(block) for block in blocks]
    begin, best = 0, (0, 0)
    for k in range(1, count):
        steady = k == begin + 1 or np.array_equal(
            streams[k] - streams[k - 1], streams[begin + 1] - streams[begin]
        )
        if not (steady and _continues(places, begin, k)):
            begin = k - 1 if _continues(places, k - 1, k) else k
        best = max(best, (begin, k + 1), key=lambda b: b[1] - b[0])
    begin, end = best
    if end - begin < minimum.blocks or (end - begin - 1) * period < minimum.saved:
        return None
    return Blocks(blocks[begin:end], _places_since(places, begin, begin + 1))


def _streams(block: Sequence[Operation]) -> Array:
    """Return the streams of the random numbers of a block."""
    return np.array([op.stream.value.data for op in block if isinstance(op, nn.Drawn)], np.int64)


def _best_offset(
    ops: Sequence[Operation], at: dict[Operation, int], first: int, period: int, extent: int
) -> int:
    """Return the offset of the first block at which the fewest values cross between blocks."""
    count = min(MIN_BLOCKS, extent // period)
    middle, stop = first + period, first + count * period
    last = {v: i for i in range(middle, stop) for v in ops[i].operands}
    crossing = np.zeros(stop - middle + 1, np.int64)
    for v, i in last.items():
        maker = at.get(v.owner, -1) if isinstance(v.owner, Operation) else -1
        if maker >= first:
            crossing[max(0, maker + 1 - middle)] += 1
            crossing[i + 1 - middle] -= 1
    crossed = np.cumsum(crossing)[(count - 2) * period : (count - 1) * period]
    return int(np.argmin(crossed[: extent % period + 1]))


def _operand_places(
    op: Operation, at: dict[Operation, int], first: int, period: int, block: int
) -> list[Place | None]:
    """Return the places from which the operands of an op of a block come."""
    places: list[Place | None] = []
    for v in operands_of(op):
        if not isinstance(v, OpResult) or (maker := at.get(v.op, -1)) < first:
            places.append(None)
            continue
        source, index = divmod(maker - first, period)
        places.append((block - source, index, v.index))
    return places


def _places_since(
    places: list[list[list[Place | None]]], begin: int, k: int
) -> list[list[Place | None]]:
    """Return the places of block k if block `begin` is the first."""
    reach = k - begin
    return [
        [p if p is not None and p[0] <= reach else None for p in places_of_op]
        for places_of_op in places[k]
    ]


def _continues(places: list[list[list[Place | None]]], begin: int, k: int) -> bool:
    """Whether blocks `begin` to k are equal, given that the blocks before k are."""
    own, second = _places_since(places, begin, k), _places_since(places, begin, begin + 1)
    if k > begin + 1:
        return own == second
    start = [
        [p if p is None or p[0] == 0 else None for p in places_of_op] for places_of_op in second
    ]
    return start == _places_since(places, begin, begin)
