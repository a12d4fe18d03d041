"""Cases of the laws of ops (`shardir.testing.Case`), in families."""

from collections.abc import Sequence

from xdsl.ir import Attribute

from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr
from shardir.testing.cases import Case
from shardir.testing.programs import FLOATS, INTEGERS

ALL = (*FLOATS, *INTEGERS, "i1")
NUMBERS = (*FLOATS, *INTEGERS)
EVEN, ODD, ROW, COLUMN, SCALAR = (4, 8), (5, 3), (8,), (4, 1), ()


# ---- elementwise ops ----


def binary(
    op: type[TensorOp], elements: tuple[str, ...], kinds: tuple[str, ...] = ()
) -> list[Case]:
    """An elementwise op of two operands, broadcasting included."""
    pairs = {
        "even": (EVEN, EVEN),
        "odd": (ODD, ODD),
        "row": (EVEN, ROW),
        "column": (COLUMN, EVEN),
        "outer": ((3, 1), (1, 7)),
        "scalar": (SCALAR, EVEN),
        "scalars": (SCALAR, SCALAR),
    }
    return [Case(n, op, shapes, elements, kinds=kinds) for n, shapes in pairs.items()]


def unary(
    op: type[TensorOp],
    elements: tuple[str, ...] = FLOATS,
    kind: str = "normal",
    name: str = "",
    shapes: Sequence[str] = ("even", "odd", "cube", "scalar"),
    gradient: bool = True,
    **numbers: float,
) -> list[Case]:
    """An elementwise op of one operand; `numbers` are its properties."""
    known = {"even": EVEN, "odd": ODD, "cube": (2, 3, 4), "scalar": SCALAR}
    props = {n: float_attr(x) for n, x in numbers.items()}
    return [
        Case(f"{name}{n}", op, (known[n],), elements, props, kinds=(kind,), gradient=gradient)
        for n in shapes
    ]


def few(op: type[TensorOp], kind: str = "normal", name: str = "", **numbers: float) -> list[Case]:
    """An op of floats whose base others test on all shapes."""
    return unary(op, FLOATS, kind, name, ("odd",), gradient=True, **numbers)


# ---- statistics of dimensions ----


def statistic(
    op: type[TensorOp], shape: Shape, *dims: int, keep: bool = False, kind: str = "normal",
    **numbers: int,
) -> Case:  # fmt: skip
    """An op that needs its dimensions unsharded."""
    props: dict[str, Attribute] = {n: int_attr(x) for n, x in numbers.items()}
    if dims:
        props["dims"] = dims_attr(*dims)
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    arg = "axis" in numbers
    elements = NUMBERS if arg else FLOATS
    return Case(name, op, (shape,), elements, props, kinds=(kind,), gradient=not arg)
