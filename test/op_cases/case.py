"""A case of the laws of ops: one op on operands of some shapes. Helpers make elementwise ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.harness import ELEMENTS, FLOATS, INTEGERS, Arg, Problem, problem
from xdsl.ir import Attribute, SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects import dist, nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.base import Props, TensorOp
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr

ALL = (*FLOATS, *INTEGERS, "i1")
NUMBERS = (*FLOATS, *INTEGERS)
EVEN, ODD, ROW, COLUMN, SCALAR = (4, 8), (5, 3), (8,), (4, 1), ()


@dataclass(frozen=True)
class Case:
    """One op on operands of these shapes. An operand is a shape, or (element type, shape) where
    the type is not the case's own; `kinds` are those of `harness.numbers`."""

    name: str
    op: type[TensorOp]
    operands: tuple[Any, ...]
    elements: tuple[str, ...] = FLOATS
    props: Props = field(default_factory=dict)
    result: Shape | None = None
    result_element: str = ""
    kinds: tuple[str, ...] = ()
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.op.name.split('.')[1]}-{self.name}"

    def args(self, element: str) -> list[Arg]:
        return [Arg(*o) if o and isinstance(o[0], str) else Arg(element, o) for o in self.operands]

    def wrt(self, element: str) -> tuple[int, ...]:
        if not self.gradient or element not in FLOATS:
            return ()
        return tuple(i for i, a in enumerate(self.args(element)) if a.element in FLOATS)

    def body(self, element: str) -> Callable[..., Sequence[SSAValue]]:
        def build(b: OpBuilder, *operands: SSAValue) -> Sequence[SSAValue]:
            result = None
            if self.result is not None:
                result = dist.tensor(ELEMENTS[self.result_element or element], self.result)
            return list(b.op(self.op, *operands, props=dict(self.props), result=result).results)

        return build

    def problem(self, element: str) -> Problem:
        args = self.args(element)
        return problem(args, self.body(element), self.wrt(element), self.kinds, len(str(self)))


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
