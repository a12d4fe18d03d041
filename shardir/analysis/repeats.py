"""Repeated blocks of ops, such as the layers of a transformer.

    %h1 = nn.matmul %x, %w1     \\ iteration 0
    %y1 = nn.relu %h1           /
    %h2 = nn.matmul %y1, %w2    \\ iteration 1      start 0, length 2, count 2
    %y2 = nn.relu %h2           /                  inputs (%x, %y1), (%w1, %w2); outputs (%y1, %y2)

1. Iterations follow one another, of equally many ops. Corresponding ops are equal in kind,
   properties, attributes and types.
2. An operand is made by the corresponding op of the same iteration, or it is an input: made before
   the first iteration, or by the corresponding op of the iteration before, in the first iteration
   by anything before it.
3. Repeats do not overlap; those that save most ops come first, the shortest period of each.
   Iterations begin at the position that the fewest values cross.

Ops are compared as numbers, one for each signature. A period p is looked for at every p-th op
only, by hashes of ranges, so all periods of n ops take O(n log n) comparisons (Main and Lorentz,
1984), and nothing depends on the number of elements.
"""

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from xdsl.ir import Attribute, Block, Operation, OpResult, SSAValue

MODULUS, BASE = (1 << 61) - 1, 911_382_323
"""The modulus and the base of the polynomial hashes of ranges."""

MAX_STARTS = 16
"""The maximum number of positions that are tried as the beginning of iterations."""

Columns = tuple[tuple[SSAValue, ...], ...]
"""Values of the interface; of each, the value in every iteration."""


@dataclass(frozen=True)
class Repeat:
    """`count` iterations of `length` ops, from the op of index `start` on."""

    start: int
    length: int
    count: int
    inputs: Columns
    outputs: Columns

    @property
    def end(self) -> int:
        return self.start + self.length * self.count

    @property
    def shared(self) -> Columns:
        """The inputs that are the same in every iteration."""
        return tuple(c for c in self.inputs if len(set(c)) == 1)


class _Repetition(NamedTuple):
    """A range of ops of equal signatures at the distance of a period."""

    start: int
    end: int
    period: int

    @property
    def count(self) -> int:
        return (self.end - self.start) // self.period


def repeats(block: Block) -> list[Repeat]:
    """The repeated ops of a block, in their order."""
    ops = list(block.ops)
    at = {op: i for i, op in enumerate(ops)}
    crossing = _crossing(ops, at)
    found: list[Repeat] = []
    taken = [False] * len(ops)
    for run in sorted(_runs(_signatures(ops)), key=lambda r: ((1 - r.count) * r.period, r)):
        if any(taken[run.start : run.end]):
            continue
        spare = run.end - run.start - run.count * run.period
        starts = sorted(range(run.start, run.start + spare + 1), key=crossing.__getitem__)
        tries = ((_iterations(ops, at, s, run), s) for s in starts[:MAX_STARTS])
        count, start = max(tries, key=lambda t: t[0])
        if count > 1:
            found.append(_repeat(ops, at, start, run.period, count))
            end = start + count * run.period
            taken[start:end] = [True] * (end - start)
    return sorted(found, key=lambda r: r.start)


# ---- signatures and periods ----


def _signatures(ops: Sequence[Operation]) -> list[int]:
    """A number for each op, equal where kind, properties, attributes and types are. Attributes are
    compared once for each object: most equal ones are the same object."""
    numbers: dict[Hashable, int] = {}
    by_id: dict[int, tuple[Attribute, int]] = {}

    def number(attribute: Attribute) -> int:
        if id(attribute) not in by_id:
            by_id[id(attribute)] = attribute, numbers.setdefault(attribute, len(numbers))
        return by_id[id(attribute)][1]

    def of(op: Operation) -> Hashable:
        if op.regions or op.successors:
            return op
        named = (*op.properties.items(), None, *op.attributes.items())
        given = tuple((x[0], number(x[1])) if x else None for x in named)
        types = [tuple(number(v.type) for v in vs) for vs in (op.operands, op.results)]
        return type(op), given, *types

    return [numbers.setdefault(of(op), len(numbers)) for op in ops]


def _runs(word: Sequence[int]) -> Iterator[_Repetition]:
    """The longest ranges of each period that are at least two periods long; those whose period is
    a multiple of another's are left out."""
    n = len(word)
    hashes = list(accumulate(word, lambda h, x: (h * BASE + x + 1) % MODULUS, initial=0))
    powers = list(accumulate(range(n), lambda p, _: p * BASE % MODULUS, initial=1))

    def part(start: int, end: int) -> int:
        return (hashes[end] - hashes[start] * powers[end - start]) % MODULUS

    def common(i: int, j: int, most: int, sign: int) -> int:
        """Return the count of equal numbers from i and j on, or (sign -1) before them."""

        def differs(k: int) -> bool:
            a, b = (i, j) if sign > 0 else (i - k, j - k)
            return part(a, a + k) != part(b, b + k)

        reach = 1
        while reach < most and not differs(reach):
            reach *= 2
        low = reach // 2
        return low + bisect_left(range(low + 1, min(reach, most) + 1), True, key=differs)

    covered: list[tuple[int, int, int]] = []  # the longest runs by their first period
    for p in range(1, n // 2 + 1):
        last = 0
        for i in range(0, n - p, p):
            if i + p <= last or word[i] != word[i + p]:
                continue
            start = i - common(i, i + p, i, -1)
            end = i + p + common(i, i + p, n - i - p, 1)
            last = end
            if end - start < 2 * p:
                continue
            if any(s <= start and end <= e and p % q == 0 for s, e, q in covered):
                continue
            covered.append((start, end, p))
            yield _Repetition(start, end, p)


# ---- isomorphism ----


def _crossing(ops: Sequence[Operation], at: dict[Operation, int]) -> list[int]:
    """Return for each op the number of values made before it and used by it or after it."""
    change = [0] * (len(ops) + 2)
    for i, op in enumerate(ops):
        for v in op.results:
            last = max((at.get(use.operation, i) for use in v.uses), default=i)
            change[i + 1] += 1
            change[last + 1] -= 1
    return list(accumulate(change))


def _origin(v: SSAValue, at: dict[Operation, int]) -> tuple[int, int]:
    """The op that makes a value, -1 for an argument, and which of its results it is."""
    return (at.get(v.op, -1), v.index) if isinstance(v, OpResult) else (-1, 0)


def _iterations(
    ops: Sequence[Operation], at: dict[Operation, int], start: int, run: _Repetition
) -> int:
    """Return the number of isomorphic iterations from `start` on."""
    p = run.period
    for k in range(1, (run.end - start) // p):
        first = start + k * p
        for i in range(first, first + p):
            for before, v in zip(ops[i - p].operands, ops[i].operands, strict=True):
                (a, ra), (b, rb) = _origin(before, at), _origin(v, at)
                same = (a + p, ra) == (b, rb) and b >= first - p
                outside = a < start and b < start
                begins = k == 1 and a < start <= b < first  # carried from here on
                if not (same or outside or begins):
                    return k
    return (run.end - start) // p


def _repeat(
    ops: Sequence[Operation], at: dict[Operation, int], start: int, length: int, count: int
) -> Repeat:
    inputs: dict[tuple[SSAValue, ...], None] = {}
    outputs: dict[tuple[SSAValue, ...], None] = {}
    for i in range(start, start + length):
        corresponding = [ops[i + k * length] for k in range(count)]
        for column in zip(*(op.operands for op in corresponding), strict=True):
            if _origin(column[-1], at)[0] < start + (count - 1) * length:
                inputs[column] = None
        for column in zip(*(op.results for op in corresponding), strict=True):
            ends = (start + (k + 1) * length for k in range(count))
            used = (
                any(not at.get(u.operation, -1) < end for u in v.uses)
                for v, end in zip(column, ends, strict=True)
            )
            if any(used):
                outputs[column] = None
    return Repeat(start, length, count, tuple(inputs), tuple(outputs))
