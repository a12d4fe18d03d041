import torch
from support.reference import Reference
from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation

from op_cases.case import NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn


def einsum(equation: str, *shapes: Shape) -> Case:
    return Case(equation, nn.EinsumOp, shapes, NUMBERS, {"equation": StringAttr(equation)})


CASES: list[Case] = [
    Case("even", nn.MatmulOp, ((4, 8), (8, 4)), NUMBERS),
    Case("odd", nn.MatmulOp, ((3, 5), (5, 7)), NUMBERS),
    Case("vector", nn.MatmulOp, ((1, 4), (4, 1)), NUMBERS),
    Case("batched", nn.MatmulOp, ((4, 2, 4), (4, 4, 6)), NUMBERS),
    Case("shared", nn.MatmulOp, ((2, 3, 4), (4, 5)), NUMBERS),
    einsum("ik,jk->ij", (4, 6), (8, 6)),
    einsum("bhqd,bhkd->bhqk", (2, 4, 3, 4), (2, 4, 5, 4)),
    einsum("i,j->ij", (3,), (4,)),
    einsum("ij,ij->", (4, 3), (4, 3)),
    einsum("ij,j->i", ODD, (3,)),
    einsum("ij,ji->ji", (4, 3), (3, 4)),
]


REFERENCES: dict[type[Operation], Reference] = {
    nn.EinsumOp: lambda op, x, y: torch.einsum(op.equation.data, x, y),
    nn.MatmulOp: lambda op, x, y: x @ y,
}
