from xdsl.ir import Attribute

from op_cases.case import ALL, EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp, int_attr


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
