import torch
from support.reference import Reference, dtype_of, shape_of
from torch.nn import functional
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, NUMBERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr


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


def fields(table: Shape, ids: Shape, axis: int, field: int, slices: Shape) -> list[Case]:
    """A gather whose indices are those of fields, each in its slice, and its gradient op."""
    name = f"{'x'.join(map(str, table))}-at-{axis}-field-{field}"
    props: dict[str, Attribute] = {
        "axis": int_attr(axis),
        "field": int_attr(field),
        "slices": nn.IntsPerDimAttr(slices),
    }
    out = (*table[:axis], *ids, *table[axis + 1 :])
    within = f"slices:{field}:{','.join(map(str, slices))}"
    of_table, of_ids = table, ("i64", ids)
    return [
        Case(name, nn.GatherOp, (of_table, of_ids), ALL, props, kinds=("normal", within)),
        Case(name, nn.GatherGradOp, (of_ids, out), NUMBERS, props, result=table, kinds=(within,)),
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
    *fields((8, 4), (4, 4), 0, 1, (3, 1, 2, 2)),
    *fields((3, 9), (4,), 1, 0, (4, 5)),
    embedding((3, 4), (2, 5), 0, 1),
    embedding((5, 3), (6,), 1, 2),
    *pick((4, 8)),
    *pick((3, 5), "i32"),
    *pick((2, 4, 7)),
    *pick((6,)),
    one_hot((4,), 8),
    one_hot((3, 5), 7, "i32"),
    one_hot((), 3),
]


def _gather(op: nn.GatherOp, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    axis = op.axis.value.data % table.ndim
    rows = table.index_select(axis, ids.flatten().long())
    if op.padding is not None:
        held = (ids.flatten() == op.padding.value.data).reshape(-1, *[1] * (table.ndim - axis - 1))
        rows = torch.where(held, rows.detach(), rows)
    return rows.reshape(*table.shape[:axis], *ids.shape, *table.shape[axis + 1 :])


def _gather_grad(op: nn.GatherGradOp, ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    shape = shape_of(op.out)
    axis = op.axis.value.data % len(shape)
    rows = dy.reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return torch.zeros(shape, dtype=dy.dtype).index_add(axis, ids.flatten().long(), rows)


def _one_hot(op: nn.OneHotOp, ids: torch.Tensor) -> torch.Tensor:
    hot = functional.one_hot(ids.long(), shape_of(op.out)[-1])
    return hot.to(dtype_of(op.out))


REFERENCES: dict[type[Operation], Reference] = {
    nn.GatherOp: _gather,
    nn.GatherGradOp: _gather_grad,
    nn.PickOp: lambda op, x, ids: x.gather(-1, ids.long()[..., None])[..., 0],
    nn.PickGradOp: lambda op, ids, dy: torch.zeros(shape_of(op.out), dtype=dy.dtype).scatter(
        -1, ids.long()[..., None], dy[..., None]
    ),
    nn.OneHotOp: _one_hot,
}
