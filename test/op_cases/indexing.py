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
        ),
    ]


def embedding(table: Shape, ids: Shape, axis: int, padding: int) -> Case:
    """A gather of which one row gets no gradient."""
    name = f"{'x'.join(map(str, table))}-at-{axis}-but-{padding}"
    props: dict[str, Attribute] = {"axis": int_attr(axis), "padding": int_attr(padding)}
    kinds = ("normal", f"below:{table[axis]}")
    return Case(name, nn.GatherOp, (table, ("i64", ids)), ALL, props, kinds=kinds)


def pick(x: Shape, index: str = "i64") -> list[Case]:
    name, below, ids = f"{'x'.join(map(str, x))}-{index}", f"below:{x[-1]}", (index, x[:-1])
    return [
        Case(name, nn.PickOp, (x, ids), ALL, kinds=("normal", below)),
        Case(name, nn.PickGradOp, (ids, x[:-1]), NUMBERS, result=x, kinds=(below,)),
    ]


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


def one_hot(ids: Shape, classes: int, index: str = "i64") -> Case:
    name, below = f"{'x'.join(map(str, ids))}-of-{classes}-{index}", f"below:{classes}"
    result = (*ids, classes)
    return Case(name, nn.OneHotOp, ((index, ids),), ALL, result=result, kinds=(below,))


CASES: list[Case] = [
    *gather((8, 4), (4,), 0),
    *gather((7, 3), (2, 4), 0, "i32"),
    *gather((4, 6, 2), (5,), 1),
    *gather((3, 5), (2, 2), -1),
    *gather((4, 8), (), 0),
    embedding((3, 4), (2, 5), 0, 1),
    embedding((5, 3), (6,), 1, 2),
    *pick((4, 8)),
    *pick((3, 5), "i32"),
    *pick((2, 4, 7)),
    *pick((6,)),
    *along((4, 8), 1, 3),
    *along((7, 3), 0, 9, "i32"),
    *along((2, 5, 4), -2, 2),
    *along((6,), 0, 0),
    one_hot((4,), 8),
    one_hot((3, 5), 7, "i32"),
    one_hot((), 3),
]
