"""Loops: of a number of runs that is an operand, with a swap and a sum in each."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from support.reference import Reference
from xdsl.dialects.builtin import i32
from xdsl.ir import Attribute, Block, Operation, Region, SSAValue

from op_cases.case import ALL, EVEN, FLOATS, ODD, ROW, SCALAR, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.dist import tensor
from shardir.dialects.nn.creation import dense_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import word
from shardir.rewriting.rewriter import Rewriter

RUNS = 5


def _number(b: Rewriter, n: int) -> SSAValue:
    t = tensor(i32, ())
    return b.op(nn.ConstantOp, props={"value": dense_attr(t, [n])}, result=t).results[0]


def _condition(types: Sequence[Attribute]) -> Region:
    """Of values whose last one counts the runs."""
    block = Block(arg_types=types)
    b = Rewriter(None, block)
    how = {"how": word(nn.ComparisonAttr, "lt")}
    b.create(nn.YieldOp, [b.value(nn.CompareOp, block.args[-1], _number(b, RUNS), props=how)], [])
    return Region(block)


def _loop(
    run: Callable[[Rewriter, SSAValue, SSAValue], Sequence[SSAValue]], *shapes: Shape
) -> Callable[[Attribute], Sequence[Region]]:
    """Return the regions of a loop of two values and the number of runs."""

    def regions(element: Attribute) -> Sequence[Region]:
        types = [*(tensor(element, shape) for shape in shapes), tensor(i32, ())]
        block = Block(arg_types=types)
        b, (x, y, k) = Rewriter(None, block), block.args
        b.create(nn.YieldOp, [*run(b, x, y), b.value(nn.AddOp, k, _number(b, 1))], [])
        return [_condition(types), Region(block)]

    return regions


def _sum(b: Rewriter, x: SSAValue, y: SSAValue) -> Sequence[SSAValue]:
    return [b.value(nn.TanhOp, b.value(nn.AddOp, x, y)), y]


def _nested(b: Rewriter, x: SSAValue, y: SSAValue) -> Sequence[SSAValue]:
    """A run of sums from its own number of runs on."""
    element = unsharded_type(x).element_type
    regions = _loop(_sum, ODD, ODD)(element)
    return b.op(nn.WhileOp, x, y, _number(b, RUNS - 2), regions=regions).results[1::-1]


COUNT = ("i32", ())
KINDS = ("normal", "normal", f"below:{RUNS + 1}")

CASES: list[Case] = [
    Case("swap", nn.WhileOp, (ODD, ODD, COUNT), ALL, kinds=KINDS, gradient=False,
         regions=_loop(lambda b, x, y: (y, x), ODD, ODD)),
    Case("sum", nn.WhileOp, (EVEN, ROW, COUNT), FLOATS, kinds=KINDS, gradient=False,
         regions=_loop(_sum, EVEN, ROW)),
    Case("scalar", nn.WhileOp, (SCALAR, SCALAR, COUNT), FLOATS, kinds=KINDS, gradient=False,
         regions=_loop(_sum, SCALAR, SCALAR)),
    Case("nested", nn.WhileOp, (ODD, ODD, COUNT), FLOATS, kinds=KINDS, gradient=False,
         regions=_loop(_nested, ODD, ODD)),
]  # fmt: skip


def _while(op: nn.WhileOp, x: torch.Tensor, y: torch.Tensor, k: torch.Tensor) -> Any:
    """The loops of op_cases/control.py, by the ops of their bodies."""
    names = {inner.name for inner in op.body.block.ops}
    while k < RUNS:
        if "nn.while" in names:
            x, y = y, torch.tanh(torch.tanh(x + y) + y)
        else:
            x, y = (torch.tanh(x + y), y) if "nn.tanh" in names else (y, x)
        k = k + 1
    return x, y, k


REFERENCES: dict[type[Operation], Reference] = {
    nn.WhileOp: _while,
}
