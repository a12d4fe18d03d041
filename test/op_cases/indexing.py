from xdsl.ir import Attribute

from op_cases.case import ALL, NUMBERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import int_attr


def gather(table: Shape, ids: Shape, axis: int, index: str = "i64") -> list[Case]:
    """The gather and its gradient op."""
    name, n = f"{'x'.join(map(str, table))}-at-{axis}-{index}", len(table)
    props: dict[str, Attribute] = {"axis": int_attr(axis)}
    out = (*table[: axis % n], *ids, *table[axis % n + 1 :])
    below = f"below:{table[axis]}"
    return [
        Case(name, nn.GatherOp, (table, (index, ids)), ALL, props, kinds=("normal", below)),
        Case(
            name,
            nn.GatherGradOp,
            ((index, ids), out),
            NUMBERS,
            props,
            result=table,
            kinds=(below,),
            gradient=False,
        ),
    ]


def pick(x: Shape, index: str = "i64") -> list[Case]:
    name, below, ids = f"{'x'.join(map(str, x))}-{index}", f"below:{x[-1]}", (index, x[:-1])
    return [
        Case(name, nn.PickOp, (x, ids), ALL, kinds=("normal", below)),
        Case(name, nn.PickGradOp, (ids, x[:-1]), NUMBERS, result=x, kinds=(below,), gradient=False),
    ]


CASES: list[Case] = [
    *gather((8, 4), (4,), 0),
    *gather((7, 3), (2, 4), 0, "i32"),
    *gather((4, 6, 2), (5,), 1),
    *gather((3, 5), (2, 2), -1),
    *gather((4, 8), (), 0),
    *pick((4, 8)),
    *pick((3, 5), "i32"),
    *pick((2, 4, 7)),
    *pick((6,)),
]
