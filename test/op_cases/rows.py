from support.reference import Reference
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr


def index_copy(x: Shape, rows: int, axis: int, index: str = "i64") -> Case:
    name, at = f"{'x'.join(map(str, x))}-at-{axis}-{index}", axis % len(x)
    props: dict[str, Attribute] = {"axis": int_attr(axis)}
    new = (*x[:at], rows, *x[at + 1 :])
    kinds = ("normal", f"below:{x[at]}", "normal")
    return Case(name, nn.IndexCopyOp, (x, (index, (rows,)), new), ALL, props, kinds=kinds)


CASES: list[Case] = [
    index_copy((8, 4), 1, 0),
    index_copy((4, 6, 2), 1, 1, "i32"),
    index_copy((3, 5), 2, -1),
    index_copy((4,), 1, 0),
]

REFERENCES: dict[type[Operation], Reference] = {
    nn.IndexCopyOp: lambda op, x, ids, rows: x.index_copy(
        op.axis.value.data % x.ndim, ids.long(), rows
    ),
}
