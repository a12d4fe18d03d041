import torch
from support.reference import Reference, shape_of
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, NUMBERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr


def along(rows: Shape, axis: int, n: int, index: str = "i64") -> list[Case]:
    """Taking n elements along an axis, and adding as many at their indices."""
    name, at = f"{'x'.join(map(str, rows))}-at-{axis}-{n}-{index}", axis % len(rows)
    props: dict[str, Attribute] = {"axis": int_attr(axis)}
    below, ids = f"below:{rows[axis]}", (*rows[:at], n, *rows[at + 1 :])
    return [
        Case(name, nn.TakeAlongAxisOp, (rows, (index, ids)), ALL, props, kinds=("normal", below)),
        Case(
            name, nn.ScatterAddOp, ((index, ids), ids), NUMBERS, props, result=rows, kinds=(below,)
        ),
    ]


CASES: list[Case] = [
    *along((4, 8), 1, 3),
    *along((7, 3), 0, 9, "i32"),
    *along((2, 5, 4), -2, 2),
    *along((6,), 0, 0),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.TakeAlongAxisOp: lambda op, x, ids: x.gather(op.axis.value.data, ids.long()),
    nn.ScatterAddOp: lambda op, ids, src: torch.zeros(
        shape_of(op.out), dtype=src.dtype
    ).scatter_add(op.axis.value.data, ids.long(), src),
}
