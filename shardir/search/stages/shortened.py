"""A model with fewer of its repeated blocks, and the costs of all from those of it.

    l0 l1 l2 l3 l4 l5 head   ->   l0 l1 l5 head, whose costs are those of l0 l1 l1 l1 l1 l5 head

The layouts of equal layers are equal, or nearly so, and their costs too: a search needs three of
them, of which the second one has neighbours as those between the ends have.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation

from shardir.analysis.repeats import equal_blocks
from shardir.dialects.blocks import ops_of
from shardir.dialects.train import arg_attrs, set_arg_attrs
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import erase
from shardir.rewriting.stages import ops_of_model
from shardir.search.stages.stage_costs import Held, UnitCosts

FIRST, SECOND, LAST = range(3)
"""The blocks that stay, of a sequence of equal ones."""


class _BlockPlace(NamedTuple):
    """Of an op that stays: the sequence of blocks, the block that it is in, and its index there."""

    blocks: int
    block: int
    index: int


@dataclass(frozen=True)
class Shortened:
    """The ops of a function, by their numbers in a shorter one.

    Attributes:
        numbers: of each op of the model the number of the op with its costs.
        places: of each op of the shorter one its place, if it is in a block.
        blocks: of each sequence of blocks the numbers of the ops of each, in the model.
    """

    numbers: Sequence[int]
    places: Sequence[_BlockPlace | None]
    blocks: Sequence[Sequence[Sequence[int]]]

    @staticmethod
    def shorten(f: FuncOp) -> "Shortened":
        """Remove blocks of a function, with the parameters that only they read."""
        ops = list(ops_of_model(f))
        at = {op: i for i, op in enumerate(ops)}
        sequences = [b.blocks for b in equal_blocks(ops) if len(b.blocks) > LAST + 1]
        same, gone = dict[Operation, Operation](), list[Operation]()
        places = dict[Operation, _BlockPlace]()
        for n, blocks in enumerate(sequences):
            for block, which in zip((*blocks[:2], blocks[-1]), (FIRST, SECOND, LAST), strict=True):
                places |= {op: _BlockPlace(n, which, i) for i, op in enumerate(block)}
            for block in blocks[2:-1]:
                same |= dict(zip(block, blocks[1], strict=True))
                gone += block
        kept = {op: i for i, op in enumerate(op for op in ops if op not in same)}
        found = Shortened(
            [kept[same.get(op, op)] for op in ops],
            [places.get(op) for op in kept],
            [[[at[op] for op in block] for block in blocks] for blocks in sequences],
        )
        for op in gone:
            for v, w in zip(op.results, same[op].results, strict=True):
                v.replace_all_uses_with(w)
        for op in reversed(gone):
            erase(op)
        _remove_unused(f)
        return found

    def costs(self, short: UnitCosts) -> UnitCosts:
        """Return the costs of all ops from those of the shorter function."""

        def of(each: Sequence[float]) -> list[float]:
            return [each[i] for i in self.numbers]

        extra, crossing = (
            [each[i] for i in self.numbers] for each in (short.extra, short.crossing)
        )
        return replace(
            short,
            seconds=of(short.seconds), forward=of(short.forward), weight=of(short.weight),
            once=of(short.once), extra=extra, crossing=[*crossing, short.crossing[-1]],
            fixed=[*self._held(short.fixed)], saved=[*self._held(short.saved)],
        )  # fmt: skip

    def _held(self, held: Iterable[Held]) -> Iterator[Held]:
        """Yield what all ops hold: what the second block holds is held by each one between the
        first and the last, and what all three read is read by all."""
        at = {i: n for n, i in reversed([*enumerate(self.numbers)])}
        for size, readers in held:
            places = [(place, r) for r in readers if (place := self.places[r]) is not None]
            outside = frozenset(at[r] for r in readers if self.places[r] is None)
            for shifts in self._shifts({(p.blocks, p.block) for p, _ in places}):
                inside = frozenset(
                    self.blocks[p.blocks][b][p.index]
                    for p, _ in places for b in shifts[p.blocks, p.block]
                )  # fmt: skip
                yield Held(size, outside | inside)

    def _shifts(self, kept: set[tuple[int, int]]) -> Iterator[Mapping[tuple[int, int], list[int]]]:
        """Yield the blocks of which the readers hold what those of the blocks `kept` do: for each
        time that it is held those that stand for each of them."""
        each = {}
        for n in {n for n, _ in kept}:
            last, which = len(self.blocks[n]) - 1, {b for m, b in kept if m == n}
            first = {FIRST: [0], SECOND: [1], LAST: [last]}
            if which in ({SECOND}, {SECOND, LAST}):
                each[n] = [{SECOND: [b], LAST: [b + 1]} for b in range(1, last)]
            elif which >= {FIRST, LAST}:
                each[n] = [first | {SECOND: [*range(1, last)]}]
            else:
                each[n] = [first]
        if len(each) == 1:
            ((n, found),) = each.items()
            yield from ({(n, b): at for b, at in shift.items()} for shift in found)
        else:
            yield {(n, b): at for n, found in each.items() for b, at in found[0].items()}


def _remove_unused(f: FuncOp) -> None:
    """Remove the ops of a function whose results nothing reads, and its unused arguments."""
    block = f.body.block
    for op in reversed(ops_of(block)):
        if not isinstance(op, ReturnOp) and all(v.first_use is None for v in op.results):
            erase(op)
    attributes = arg_attrs(f)
    for arg in reversed(block.args):
        if arg.first_use is None:
            del attributes[arg.index]
            block.erase_arg(arg)
    set_arg_attrs(f, attributes)
    update_signature(f)
