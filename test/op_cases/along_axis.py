import torch
from support.reference import Reference, shape_of
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, NUMBERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.text import word


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


def scattered(rows: Shape, axis: int, n: int, kind: str, index: str = "i64") -> Case:
    """The reductions of n elements along an axis, by their indices."""
    props: dict[str, Attribute] = {
        "axis": int_attr(axis), "kind": word(nn.ReductionKindAttr, kind)
    }  # fmt: skip
    ids = (*rows[:axis], n, *rows[axis + 1 :])
    name = f"{kind}-{'x'.join(map(str, rows))}-at-{axis}-{n}"
    kinds = (f"below:{rows[axis]}", "ties")
    return Case(
        name, nn.ScatterReduceOp, ((index, ids), ids), NUMBERS, props, result=rows, kinds=kinds
    )


CASES: list[Case] = [
    *(scattered((2, 4), 1, 6, kind) for kind in ("max", "min", "prod")),
    scattered((3, 7), 0, 5, "max", "i32"),
    *along((4, 8), 1, 3),
    *along((7, 3), 0, 9, "i32"),
    *along((2, 5, 4), -2, 2),
    *along((6,), 0, 0),
]


def _scatter_reduce(op: nn.ScatterReduceOp, ids: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    """torch leaves 0 where no element has the index."""
    kind, axis = op.kind.data, op.axis.value.data
    info = torch.finfo(src.dtype) if src.is_floating_point() else torch.iinfo(src.dtype)
    first = 1 if kind == "prod" else info.min if kind == "max" else info.max
    if kind != "prod" and src.is_floating_point():
        first = float("-inf") if kind == "max" else float("inf")
    how = {"max": "amax", "min": "amin"}.get(kind, kind)
    out = torch.full(shape_of(op.out), first, dtype=src.dtype)
    return out.scatter_reduce(axis, ids.long(), src, how)


REFERENCES: dict[type[Operation], Reference] = {
    nn.TakeAlongAxisOp: lambda op, x, ids: x.gather(op.axis.value.data, ids.long()),
    nn.ScatterAddOp: lambda op, ids, src: torch.zeros(
        shape_of(op.out), dtype=src.dtype
    ).scatter_add(op.axis.value.data, ids.long(), src),
    nn.ScatterReduceOp: _scatter_reduce,
}
