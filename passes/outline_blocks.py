"""outline-blocks: equal blocks of ops, such as the layers of a model, become a loop.

%y0 = nn.matmul %x, %w0               %h = train.carried %x
%y1 = nn.matmul %y0, %w1      ->      train.repeat 3
%y2 = nn.matmul %y1, %w2              %w = train.item %w0, %w1, %w2
                                      %y = nn.matmul %h, %w
                                      %y2 = train.carry %y, %h
                                      train.end_repeat

Blocks are equal by structure, not by name. The pass runs last; a loop changes neither the order of
ops nor their results. First, equal scalar constants become one. A module without equal blocks is
not changed. The torch backend runs this pass on the module that it emits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import IntegerAttr, i64
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.analysis.repeats import Blocks, common_name, equal_blocks
from shardir.compat.xdsl import operands_of
from shardir.dialects import nn, train
from shardir.dialects.blocks import of_kind, ops_from, ops_of
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class OutlineBlocks(FunctionPass):
    """Writes equal blocks of ops once, as a loop."""

    name = "outline-blocks"

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        repeats_of_functions = [_Repeats(f.op) for f in functions]
        if not any(repeats.blocks for repeats in repeats_of_functions):
            return
        for repeats in repeats_of_functions:
            repeats.numbers.merge()
            for blocks in repeats.blocks:
                _Outline(blocks).write()


def has_equal_blocks(f: FuncOp) -> bool:
    """Whether a function has equal blocks."""
    return bool(_Repeats(f).blocks)


class _Repeats:
    """The equal blocks of a function."""

    def __init__(self, f: FuncOp):
        self.numbers = _EqualNumbers(f.body.block)
        self.blocks: list[Blocks] = []
        if any(of_kind(ops_of(f.body.block), train.RepeatOp)):
            return  # a body may have equal blocks too, but loops do not nest
        # A loop keeps the results of all its runs, so blocks that keep different results differ.
        self.blocks = equal_blocks(self.numbers.ops, equally_kept=RECOMPUTE in f.attributes)


class _EqualNumbers:
    """The equal scalar constants of a block, which become one, so that equal blocks share them."""

    def __init__(self, block: Block):
        self.block = block
        self.first: dict[nn.ConstantOp, nn.ConstantOp] = {}
        """For each repeated constant, the first equal one."""
        constants: dict[object, nn.ConstantOp] = {}
        ops = ops_of(block)
        for op in of_kind(ops, nn.ConstantOp):
            if not unsharded_type(op.out).get_shape():
                key = (op.value, op.out.type, frozenset(op.attributes.items()))
                if (first := constants.setdefault(key, op)) is not op:
                    self.first[op] = first
        firsts = dict.fromkeys(self.first.values())
        self.ops = [*firsts, *(op for op in ops if op not in firsts and op not in self.first)]
        """The ops of the block after merging."""

    def merge(self) -> None:
        """Replace equal constants by the first one, and move it to the start of the block."""
        start = self.block.first_op
        for op, first in self.first.items():
            op.out.replace_all_uses_with(first.out)
            erase(op)
        for op in dict.fromkeys(self.first.values()):
            if start is not None and op is not start:
                op.detach()
                self.block.insert_op_before(op, start)


class _Outline:
    """The loop over some equal blocks; the ops of the first become its body."""

    def __init__(self, equal: Blocks):
        self.blocks, self.places = equal
        self.body = self.blocks[0]
        first = self.body[0]
        self.before, self.inside, self.after = (Rewriter().before(first) for _ in range(3))
        self.after.next = self.body[-1].next_op
        self.carried: dict[tuple[SSAValue, SSAValue], SSAValue] = {}
        """Values that a block gets from its predecessor, by the predecessor's result and the first
        block's operand."""
        self.last: dict[SSAValue, SSAValue] = {}
        """For each result of the body, the corresponding result of the last block."""
        self.later = ops_from(self.blocks[-1][-1].next_op)
        """The ops after the loop."""
        self.left = {v for op in self.later for v in operands_of(op)}
        """The values that these ops use."""
        self.after_loop: dict[SSAValue, SSAValue] = {}
        """The values that replace results of blocks after the loop."""
        self.items: dict[tuple[SSAValue, ...], SSAValue] = {}

    def write(self) -> None:
        count = {"count": IntegerAttr(len(self.blocks), i64)}
        self.before.next = self.before.create(train.RepeatOp, [], [], count)
        for i, op in enumerate(self.body):
            op.operands = [self._operand(i, j, v) for j, v in enumerate(operands_of(op))]
            if isinstance(op, nn.Drawn) and isinstance(second := self.blocks[1][i], nn.Drawn):
                stride = second.stream.value.data - op.stream.value.data
                op.stride = IntegerAttr(stride, i64) if stride else None
        self._end()
        for ops in reversed(self.blocks[1:]):
            for op in reversed(ops):
                erase(op)

    def _operand(self, i: int, j: int, v: SSAValue) -> SSAValue:
        """Return operand j of op i of the body."""
        place = self.places[i][j]
        if place is None:
            return self._item(tuple([operands_of(ops[i])[j] for ops in self.blocks]))
        since, index, number = place
        result = self.body[index].results[number]
        if since == 0:
            return result
        if (result, v) not in self.carried:
            new = self.before.create(train.CarriedOp, [v], [v.type], names=[v])
            self.carried[result, v] = new.out
        return self.carried[result, v]

    def _item(self, values: tuple[SSAValue, ...]) -> SSAValue:
        """Return the value of each block, given values from before the loop."""
        if len(set(values)) == 1:
            return values[0]
        if values not in self.items:
            new = self.inside.create(train.ItemOp, values, [values[0].type])
            new.out.name_hint = common_name([v.name_hint for v in values])
            self.items[values] = new.out
        return self.items[values]

    def _end(self) -> None:
        """Write the values that leave the loop, and its end."""
        for same in zip(*self.blocks, strict=True):
            for values in zip(*(op.results for op in same), strict=True):
                self._leave(values)
        for (made, _), variable in self.carried.items():
            variable.name_hint = made.name_hint
            new = self.after.create(train.CarryOp, [made, variable], [made.type])
            new.out.name_hint = self.last[made].name_hint
            if self.after_loop.get(self.last[made]) is made:
                self.after_loop[self.last[made]] = new.out
        self.after.create(train.EndRepeatOp, [], [])
        for op in self.later:
            if not self.after_loop.keys().isdisjoint(operands_of(op)):
                # all operands of an op at once, since a return has many
                op.operands = [self.after_loop.get(v, v) for v in operands_of(op)]

    def _leave(self, values: Sequence[SSAValue]) -> None:
        """Hand a result of each block to the ops after the loop that use it."""
        made, last = values[0], values[-1]
        name = common_name([v.name_hint for v in values])
        if not self.left.isdisjoint(values[:-1]):
            types = [v.type for v in values]
            new = self.after.create(train.ItemsOp, [made], types, names=values)
            self.after_loop.update(zip(values, new.outs, strict=True))
        elif last in self.left:
            self.after_loop[last] = made
        self.last[made], made.name_hint = last, name
