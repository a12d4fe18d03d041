"""Equal blocks of ops: parts of a sequence that repeat, by the kinds, properties and types of ops
and by where their operands come from, not by names.

An operand of an op in a block is the result of an op of the same block, or of the block before it,
at the same place in each; or it is from before all of them. The streams of random numbers are at
equal distances.
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
"""The fewest equal blocks that are a loop; two are easier to read one after the other."""

MIN_SAVED = 12
"""The fewest ops that a loop has to save."""

PERIODS = 16
"""The number of distances between equal ops that are tried as the length of a block."""

REPEATED = TensorOp | dist.CollectiveOp | dist.WaitOp | dist.RingProductOp
"""Ops that are in blocks."""

OWN = (*LOOP, TransferOp, EitherOp)
"""Ops that are in no block: of other loops, and of steps in stages, whose functions have blocks."""

Place = tuple[int, int, int]
"""Of an operand: the number of blocks since its op, its index in that block, and the result's."""


class LoopMinimum(NamedTuple):
    """The fewest equal blocks that are looked for, the fewest ops that a loop has to save, and the
    fewest of a block."""

    blocks: int
    saved: int
    ops: int = 2

    @property
    def extent(self) -> int:
        """The fewest ops in which there can be a loop."""
        return max(self.blocks * self.ops, self.saved + self.ops)


class Blocks(NamedTuple):
    """Equal blocks of ops, one after the other."""

    blocks: list[list[Operation]]
    places: list[list[Place | None]]
    """By op of a block and by operand: where it comes from; None if from before all blocks, as that
    of the first block does where the others have one of the block before."""


NUMBERS = re.compile(r"(\d+)")


def common_name(names: Sequence[str | None]) -> str | None:
    """The name that most of some names are, but for numbers in which they differ; without those."""
    given = [n for n in names if n is not None]
    if not given:
        return None
    same = given
    if (numbers := _numbers(same)) is None:
        forms = [tuple(NUMBERS.split(n)[::2]) for n in given]
        ((form, _),) = Counter(forms).most_common(1)
        same = [n for n, parts in zip(given, forms, strict=True) if parts == form]
        numbers = _numbers(same)
    assert numbers is not None
    parts = NUMBERS.split(same[0])
    parts[1::2] = [part[0] if len({*part}) == 1 else "" for part in zip(*numbers, strict=True)]
    return re.sub(r"([._])[._]+", r"\1", "".join(parts)).strip("._") or given[0]


def _numbers(names: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return the numbers in each of some names that differ in these alone; None if others do."""
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
    """Return the equal blocks among ops of a function, in order; none within others. Values of
    other ops are from before all blocks.

    Args:
        minimum: the fewest equal blocks, 2 or more.
        saved: the fewest ops that a loop over them has to save.
        equally_kept: whether the same results of all blocks are read in the backward part.
    """
    found: list[Blocks] = []
    fewest = LoopMinimum(minimum, saved)
    if len(ops) < fewest.extent:
        return found
    codes = _codes(ops, equally_kept)
    at = {op: i for i, op in enumerate(ops)}
    _search(ops, codes, at, fewest, found)
    return sorted(found, key=lambda b: at[b.blocks[0][0]])


def _codes(ops: Sequence[Operation], equally_kept: bool) -> Array:
    """A number for each op; equal ones for ops that differ in names and values only."""
    numbers: dict[object, int] = {}
    signatures: dict[object, int] = {}
    known = SignatureMemo()
    at = {op: i for i, op in enumerate(ops)} if equally_kept else {}
    starts = [i for i, op in enumerate(ops) if isinstance(op, BackwardOp)]
    codes = []
    for i, op in enumerate(ops):
        key: object = i
        if _may_repeat(type(op)):
            number = known.of_op(
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
    """Whether ops of a kind may be in a block."""
    return issubclass(kind, REPEATED) and kind not in OWN


def _signature(op: Operation) -> object:
    """Return what makes two ops equal: kind, properties and types, by value."""
    properties = {*op.properties.items(), *op.attributes.items()}
    if isinstance(op, nn.Drawn):
        properties.remove(("stream", op.stream))
    types = tuple(v.type for v in (*op.operands, *op.results))
    return type(op), frozenset(properties), len(op.operands), types


def _search(
    ops: Sequence[Operation],
    codes: Array,
    at: dict[Operation, int],
    minimum: LoopMinimum,
    found: list[Blocks],
) -> None:
    """Find blocks: those that save most first, then those around them."""
    parts = [(0, len(ops))]
    while parts:
        start, stop = parts.pop()
        if stop - start < minimum.extent:
            continue
        for first, period, extent in _runs(codes[start:stop], minimum):
            if blocks := _blocks(ops, at, start + first, period, extent, minimum):
                found.append(blocks)
                begin = at[blocks.blocks[0][0]]
                parts += [(start, begin), (begin + period * len(blocks.blocks), stop)]
                break


def repeated_parts(codes: Array) -> Iterator[range]:
    """Yield the parts of a sequence that are equal to the one before or after, in MIN_BLOCKS equal
    ones at least: those that repeat most first, none within others."""
    parts = [(0, len(codes))]
    while parts:
        start, stop = parts.pop()
        for first, period, extent in _runs(codes[start:stop], LoopMinimum(MIN_BLOCKS, 1, 1)):
            begin, end = start + first, start + first + extent // period * period
            yield from (range(i, i + period) for i in range(begin, end, period))
            parts += [(start, begin), (end, stop)]
            break


def _runs(codes: Array, minimum: LoopMinimum) -> Iterator[tuple[int, int, int]]:
    """Yield runs (start, period, extent) in which each code is that at a period's distance; those
    that save most first."""
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
    """The most frequent distances between equal sequences of 1, 4 and 16 codes."""
    found: Counter[int] = Counter()
    grams, length = codes, 1
    while length <= 16 and len(grams) > 1:
        if length in (1, 4, 16):
            order = np.argsort(grams, kind="stable")
            gaps = np.diff(order)[np.diff(grams[order]) == 0]
            values, counts = np.unique(gaps, return_counts=True)
            most = np.argsort(-counts, kind="stable")[:PERIODS]
            found.update(dict(zip(values[most].tolist(), counts[most].tolist(), strict=True)))
        pairs = grams[:-length] * (grams.max() + 1) + grams[length:]
        grams = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        length *= 2
    return [p for p in found if minimum.ops <= p <= len(codes) // minimum.blocks]


def _blocks(
    ops: Sequence[Operation],
    at: dict[Operation, int],
    first: int,
    period: int,
    extent: int,
    minimum: LoopMinimum,
) -> Blocks | None:
    """The most equal blocks in a run of equal ops, cut where the fewest values cross."""
    first += _cut(ops, at, first, period, extent)
    count = extent // period
    blocks = [list(ops[first + k * period : first + (k + 1) * period]) for k in range(count)]
    places = [[_places(op, at, first, period, k) for op in block] for k, block in enumerate(blocks)]
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
    return Blocks(blocks[begin:end], _since(places, begin, begin + 1))


def _streams(block: Sequence[Operation]) -> Array:
    """The streams of the random numbers of a block."""
    return np.array([op.stream.value.data for op in block if isinstance(op, nn.Drawn)], np.int64)


def _cut(
    ops: Sequence[Operation], at: dict[Operation, int], first: int, period: int, extent: int
) -> int:
    """The offset of the first block at which the fewest values cross from a block to the next."""
    count = min(MIN_BLOCKS, extent // period)
    middle, stop = first + period, first + count * period
    last = {v: i for i in range(middle, stop) for v in ops[i].operands}
    crossing = np.zeros(stop - middle + 1, np.int64)
    for v, i in last.items():
        made = at.get(v.owner, -1) if isinstance(v.owner, Operation) else -1
        if made >= first:
            crossing[max(0, made + 1 - middle)] += 1
            crossing[i + 1 - middle] -= 1
    crossed = np.cumsum(crossing)[(count - 2) * period : (count - 1) * period]
    return int(np.argmin(crossed[: extent % period + 1]))


def _places(
    op: Operation, at: dict[Operation, int], first: int, period: int, block: int
) -> list[Place | None]:
    """The places from which the operands of an op of a block come."""
    found: list[Place | None] = []
    for v in operands_of(op):
        if not isinstance(v, OpResult) or (made := at.get(v.op, -1)) < first:
            found.append(None)
            continue
        of, index = divmod(made - first, period)
        found.append((block - of, index, v.index))
    return found


def _since(places: list[list[list[Place | None]]], begin: int, k: int) -> list[list[Place | None]]:
    """The places of block k, if the first block is `begin`."""
    reach = k - begin
    return [[p if p is not None and p[0] <= reach else None for p in of] for of in places[k]]


def _continues(places: list[list[list[Place | None]]], begin: int, k: int) -> bool:
    """Whether blocks `begin` to k are equal, if those before k are."""
    mine, second = _since(places, begin, k), _since(places, begin, begin + 1)
    if k > begin + 1:
        return mine == second
    start = [[p if p is None or p[0] == 0 else None for p in of] for of in second]
    return start == _since(places, begin, begin)
