from typing import Any

import torch
from support.reference import Reference
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import int_attr


def along(
    op: type[TensorOp],
    shape: Shape,
    axis: int,
    *words: str,
    kind: str = "ties",
    k: int | None = None,
) -> Case:
    props: dict[str, Attribute] = {"axis": int_attr(axis), **{w: nn.UNIT for w in words}}
    if k is not None:
        props["k"] = int_attr(k)
    name = "-".join([kind, "x".join(map(str, shape)), str(axis), *words, *([f"k{k}"] if k else [])])
    elements = NUMBERS if op is nn.CumsumOp else ALL
    return Case(name, op, (shape,), elements, props, kinds=(kind,), gradient=op is not nn.ArgsortOp)


CASES: list[Case] = [
    along(nn.CumsumOp, EVEN, 1, kind="normal"),
    along(nn.CumsumOp, EVEN, 0, "reverse", kind="normal"),
    along(nn.CumsumOp, (2, 4, 3), -2, kind="normal"),
    along(nn.CumsumOp, ODD, 0, "reverse", kind="normal"),
    along(nn.CumsumOp, (8,), 0),
    along(nn.SortOp, EVEN, 1),
    along(nn.SortOp, ODD, 0, "descending"),
    along(nn.SortOp, (2, 4, 3), -1, "descending", kind="normal"),
    along(nn.ArgsortOp, EVEN, 0),
    along(nn.ArgsortOp, ODD, -1, "descending"),
    along(nn.TopkOp, EVEN, 1, k=1),
    along(nn.TopkOp, EVEN, 1, k=3, kind="normal"),
    along(nn.TopkOp, (8, 3), 0, "smallest", k=3),
    along(nn.TopkOp, (16,), 0, k=3),
    along(nn.TopkOp, ODD, -2, k=5),
    along(nn.TopkOp, (2, 8, 3), 1, "smallest", k=2),
]


def _cumsum(op: nn.CumsumOp, x: torch.Tensor) -> torch.Tensor:
    axis = op.axis.value.data
    if op.reverse is None:
        return x.cumsum(axis, dtype=x.dtype)
    return x.flip(axis).cumsum(axis, dtype=x.dtype).flip(axis)


def _sort(op: Any, x: torch.Tensor, descending: bool) -> tuple[torch.Tensor, torch.Tensor]:
    values, indices = x.sort(dim=op.axis.value.data, descending=descending, stable=True)
    return values, indices


REFERENCES: dict[type[Operation], Reference] = {
    nn.CumsumOp: _cumsum,
    nn.SortOp: lambda op, x: _sort(op, x, op.descending is not None),
    nn.ArgsortOp: lambda op, x: _sort(op, x, op.descending is not None)[1],
    nn.TopkOp: lambda op, x: tuple(
        v.narrow(op.axis.value.data, 0, op.k.value.data) for v in _sort(op, x, op.smallest is None)
    ),
}
