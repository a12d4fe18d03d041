from harness import FLOATS
from xdsl.ir import Attribute

from op_cases.case import ALL, EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp, dims_attr, int_attr
from shardir.dialects.text import word


def reduce(kind: str, shape: Shape, *dims: int, keep: bool = False) -> Case:
    props: dict[str, Attribute] = {
        "kind": word(nn.ReductionKindAttr, kind),
        "dims": dims_attr(*dims),
    }
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    elements = {
        "sum": NUMBERS, "prod": NUMBERS, "mean": FLOATS, "any": ("i1",), "all": ("i1",)
    }.get(kind, ALL)  # fmt: skip
    return Case(name, nn.ReduceOp, (shape,), elements, props, kinds=("ties",))


def statistic(
    op: type[TensorOp], shape: Shape, *dims: int, keep: bool = False, kind: str = "normal",
    **numbers: int,
) -> Case:  # fmt: skip
    """An op that wants its dimensions whole."""
    props: dict[str, Attribute] = {n: int_attr(x) for n, x in numbers.items()}
    if dims:
        props["dims"] = dims_attr(*dims)
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    arg = "axis" in numbers
    elements = NUMBERS if arg else FLOATS
    return Case(name, op, (shape,), elements, props, kinds=(kind,), gradient=not arg)


CASES: list[Case] = [
    reduce("sum", EVEN, 1),
    reduce("sum", ODD, 0),
    reduce("sum", (3, 4, 5), 0, 2),
    reduce("sum", EVEN, 0, 1),
    reduce("sum", EVEN, -1, keep=True),
    reduce("sum", EVEN),
    reduce("mean", EVEN, 1),
    reduce("mean", ODD, 0),
    reduce("mean", ODD, 0, 1),
    reduce("mean", (3, 4, 5), 2, 0, keep=True),
    reduce("prod", EVEN, 1),
    reduce("prod", ODD, 0),
    reduce("prod", (3, 4, 5), 0, 2),
    reduce("prod", EVEN, 0, 1, keep=True),
    reduce("any", EVEN, 1),
    reduce("any", ODD, 0, 1, keep=True),
    reduce("all", ODD, 0),
    reduce("all", EVEN, 0, 1),
    statistic(nn.LogsumexpOp, EVEN, 1),
    statistic(nn.LogsumexpOp, ODD, 0, keep=True),
    statistic(nn.LogsumexpOp, (3, 4, 5), -1, 0),
    statistic(nn.VarOp, EVEN, 1, correction=1),
    statistic(nn.VarOp, (3, 4, 5), 0, 2, correction=0, keep=True),
    statistic(nn.StdOp, EVEN, 0, 1, correction=1),
    statistic(nn.StdOp, ODD, 0, correction=0, keep=True),
    statistic(nn.StdOp, (4, 2), 1, correction=0, kind="ties"),
    statistic(nn.ArgmaxOp, EVEN, axis=1, kind="ties"),
    statistic(nn.ArgmaxOp, (3, 4, 5), axis=0, keep=True),
    statistic(nn.ArgmaxOp, (5,), axis=-1, kind="ties"),
    statistic(nn.ArgminOp, ODD, axis=0, kind="ties"),
    statistic(nn.ArgminOp, (2, 6), axis=1, keep=True, kind="ties"),
    reduce("max", EVEN, 1),
    reduce("max", ODD, 0, 1),
    reduce("max", ODD, 1, keep=True),
    reduce("min", EVEN, 0),
    reduce("min", ODD, 0),
    reduce("min", (3, 4, 5), 1, keep=True),
]
