"""The cases of the laws of ops: each op of nn, and each update of train, on some shapes.

A case has the element types that it is for; a type that no case of an op has is refused by it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from harness import ELEMENTS, FLOATS, INTEGERS, Arg, Problem, problem
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, StringAttr
from xdsl.ir import Attribute, SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import Props, TensorOp, dims_attr, float_attr, int_attr
from shardir.dialects.text import word

ALL = (*FLOATS, *INTEGERS, "i1")
NUMBERS = (*FLOATS, *INTEGERS)


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
        def build(b: Builder, *operands: SSAValue) -> Sequence[SSAValue]:
            result = None
            if self.result is not None:
                result = dist.tensor(ELEMENTS[self.result_element or element], self.result)
            return list(b.op(self.op, *operands, props=dict(self.props), result=result).results)

        return build

    def problem(self, element: str) -> Problem:
        args = self.args(element)
        return problem(args, self.body(element), self.wrt(element), self.kinds, len(str(self)))


EVEN, ODD, ROW, COLUMN, SCALAR = (4, 8), (5, 3), (8,), (4, 1), ()


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
    op: type[TensorOp], elements: tuple[str, ...] = FLOATS, kind: str = "normal"
) -> list[Case]:
    shapes = {"even": EVEN, "odd": ODD, "cube": (2, 3, 4), "scalar": SCALAR}
    return [Case(n, op, (s,), elements, kinds=(kind,)) for n, s in shapes.items()]


def activation_grad(op: type[TensorOp], kind: str = "normal") -> list[Case]:
    return [
        Case(n, op, (s, s), kinds=(kind,), gradient=False)
        for n, s in {"even": EVEN, "odd": ODD}.items()
    ]


def einsum(equation: str, *shapes: Shape) -> Case:
    return Case(equation, nn.EinsumOp, shapes, NUMBERS, {"equation": StringAttr(equation)})


def reduce(kind: str, shape: Shape, *dims: int, keep: bool = False) -> Case:
    props: dict[str, Attribute] = {
        "kind": word(nn.ReductionKindAttr, kind),
        "dims": dims_attr(*dims),
    }
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    elements = {"sum": NUMBERS, "mean": FLOATS}.get(kind, ALL)
    return Case(name, nn.ReduceOp, (shape,), elements, props, kinds=("ties",))


def reshape(old: Shape, new: Shape) -> Case:
    name = "->".join("x".join(map(str, s)) for s in (old, new))
    return Case(name, nn.ReshapeOp, (old,), ALL, result=new)


def transpose(shape: Shape, *perm: int) -> Case:
    name = ",".join(map(str, perm))
    return Case(name, nn.TransposeOp, (shape,), ALL, {"perm": dims_attr(*perm)})


def broadcast(old: Shape, new: Shape, *dims: int) -> Case:
    name = f"{'x'.join(map(str, old))}->{'x'.join(map(str, new))}"
    return Case(name, nn.BroadcastOp, (old,), ALL, {"dims": dims_attr(*dims)}, result=new)


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


def row(shape: Shape, axis: int) -> list[Case]:
    """Softmax and log-softmax with their gradient ops."""
    name, props = f"{'x'.join(map(str, shape))}-{axis}", {"axis": int_attr(axis)}
    return [
        Case(name, nn.SoftmaxOp, (shape,), props=props),
        Case(name, nn.LogSoftmaxOp, (shape,), props=props),
        Case(name, nn.SoftmaxGradOp, (shape, shape), props=props, gradient=False),
        Case(name, nn.LogSoftmaxGradOp, (shape, shape), props=props, gradient=False),
    ]


def cross_entropy(shape: Shape, index: str = "i64") -> list[Case]:
    name, labels = f"{'x'.join(map(str, shape))}-{index}", (index, shape[:-1])
    kinds = ("normal", f"below:{shape[-1]}")
    return [
        Case(name, nn.CrossEntropyOp, (shape, labels), kinds=kinds),
        Case(name, nn.CrossEntropyGradOp, (shape, labels, shape[:-1]), kinds=kinds, gradient=False),
    ]


def layer_norm(shape: Shape, norm: Shape) -> list[Case]:
    name, props = (
        f"{'x'.join(map(str, shape))}-{'x'.join(map(str, norm))}",
        {"eps": float_attr(1e-5)},
    )
    return [
        Case(name, nn.LayerNormOp, (shape, norm, norm), props=props),
        Case(name, nn.LayerNormGradOp, (shape, norm, shape), props=props, gradient=False),
    ]


def constant(element: str, values: Any) -> Case:
    values = np.array(values)
    type = dist.tensor(ELEMENTS[element], values.shape)
    data = DenseIntOrFPElementsAttr.from_list(type, values.flatten().tolist())  # type: ignore[arg-type]
    return Case(
        f"{element}-{'x'.join(map(str, values.shape))}",
        nn.ConstantOp,
        (),
        (element,),
        {"value": data},
        values.shape,
        gradient=False,
    )


def convert(source: str, target: str, shape: Shape) -> Case:
    floats = source in FLOATS and target in FLOATS
    return Case(
        f"{source}->{target}",
        nn.ConvertOp,
        ((source, shape),),
        (source,),
        result=shape,
        result_element=target,
        gradient=floats,
        kinds=("ties",) if target == "i1" else (),
    )


def select(name: str, *shapes: Shape) -> Case:
    condition, *others = shapes
    return Case(name, nn.SelectOp, (("i1", condition), *others), ALL)


def update(op: type[TensorOp], shape: Shape, **options: float) -> Case:
    operands = (shape,) * (3 if op is train.MomentumOp else 2)
    props: dict[str, Attribute] = {n: float_attr(x) for n, x in options.items()}
    return Case("x".join(map(str, shape)), op, operands, props=props, gradient=False)


CASES: list[Case] = [
    *binary(nn.AddOp, NUMBERS),
    *binary(nn.SubOp, NUMBERS),
    *binary(nn.MulOp, NUMBERS),
    *binary(nn.DivOp, FLOATS, ("normal", "positive")),
    *binary(nn.MaxOp, ALL, ("ties", "ties")),
    *unary(nn.NegOp, NUMBERS),
    *unary(nn.ExpOp),
    *unary(nn.LogOp, kind="positive"),
    *unary(nn.SqrtOp, kind="positive"),
    *unary(nn.ReluOp),
    *unary(nn.TanhOp),
    *unary(nn.SigmoidOp),
    *unary(nn.GeluOp),
    *unary(nn.StopGradientOp, ALL),
    *activation_grad(nn.ReluGradOp, "ties"),
    *activation_grad(nn.TanhGradOp),
    *activation_grad(nn.SigmoidGradOp),
    *activation_grad(nn.GeluGradOp),
    *(
        Case(
            f"{how}-{n}",
            nn.CompareOp,
            shapes,
            ALL,
            {"how": word(nn.ComparisonAttr, how)},
            kinds=("ties", "ties"),
            gradient=False,
        )
        for how, n, shapes in (
            ("eq", "even", (EVEN, EVEN)),
            ("ne", "odd", (ODD, ODD)),
            ("lt", "row", (EVEN, ROW)),
            ("le", "column", (COLUMN, EVEN)),
            ("gt", "scalar", (EVEN, SCALAR)),
            ("ge", "outer", ((3, 1), (1, 7))),
        )
    ),
    select("even", EVEN, EVEN, EVEN),
    select("odd", ODD, ODD, ODD),
    select("broadcast", COLUMN, ROW, SCALAR),
    select("rows", (3,), ODD, (1, 3)),
    *(convert(s, t, EVEN) for s in ALL for t in ALL if s != t),
    convert("f64", "f32", ODD),
    Case("even", nn.MatmulOp, ((4, 8), (8, 4)), NUMBERS),
    Case("odd", nn.MatmulOp, ((3, 5), (5, 7)), NUMBERS),
    Case("vector", nn.MatmulOp, ((1, 4), (4, 1)), NUMBERS),
    Case("batched", nn.MatmulOp, ((4, 2, 4), (4, 4, 6)), NUMBERS),
    Case("shared", nn.MatmulOp, ((2, 3, 4), (4, 5)), NUMBERS),
    einsum("ik,jk->ij", (4, 6), (8, 6)),
    einsum("bhqd,bhkd->bhqk", (2, 4, 3, 4), (2, 4, 5, 4)),
    einsum("i,j->ij", (3,), (4,)),
    einsum("ij,ij->", (4, 3), (4, 3)),
    einsum("ij,j->i", ODD, (3,)),
    einsum("ij,ji->ji", (4, 3), (3, 4)),
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
    reduce("max", EVEN, 1),
    reduce("max", ODD, 0, 1),
    reduce("max", ODD, 1, keep=True),
    reduce("min", EVEN, 0),
    reduce("min", ODD, 0),
    reduce("min", (3, 4, 5), 1, keep=True),
    reshape((4, 8), (32,)),
    reshape((32,), (4, 8)),
    reshape((8, 6), (4, 12)),
    reshape((4, 6), (4, 2, 3)),
    reshape((4, 2, 3), (4, 6)),
    reshape((3, 5), (15,)),
    reshape((15,), (5, 3)),
    reshape((6, 4), (4, 6)),
    reshape((4, 1, 8), (4, 8)),
    reshape((2, 2, 8), (4, 8)),
    reshape((1,), ()),
    reshape((), (1, 1)),
    reshape((3, 4), (1, 3, 4, 1)),
    transpose(EVEN, 1, 0),
    transpose(ODD, 1, 0),
    transpose((2, 3, 4), 2, 0, 1),
    transpose(EVEN, -2, -1),
    broadcast((8,), EVEN, 1),
    broadcast((4,), EVEN, 0),
    broadcast((), ODD),
    broadcast((4, 1), EVEN, 0, 1),
    broadcast((3, 5), (5, 2, 3), 2, 0),
    broadcast((1, 7), (3, 5, 7), 1, 2),
    *gather((8, 4), (4,), 0),
    *gather((7, 3), (2, 4), 0, "i32"),
    *gather((4, 6, 2), (5,), 1),
    *gather((3, 5), (2, 2), -1),
    *gather((4, 8), (), 0),
    *pick((4, 8)),
    *pick((3, 5), "i32"),
    *pick((2, 4, 7)),
    *pick((6,)),
    *row((4, 8), -1),
    *row((5, 3), 0),
    *row((2, 4, 6), 1),
    *cross_entropy((8, 4)),
    *cross_entropy((3, 7), "i32"),
    *cross_entropy((2, 4, 6)),
    *cross_entropy((5,)),
    *layer_norm((4, 8), (8,)),
    *layer_norm((3, 5), (5,)),
    *layer_norm((2, 4, 6), (4, 6)),
    constant("f32", np.arange(32).reshape(4, 8) / 8),
    constant("f64", np.arange(15).reshape(5, 3)),
    constant("bf16", [1.0, 2.5, -3.0]),
    constant("f16", [[0.5, 1.5], [2.0, 3.0]]),
    *(
        Case(
            f"{'x'.join(map(str, s))}-{d}",
            nn.IotaOp,
            (),
            NUMBERS,
            {"dim": int_attr(d)},
            s,
            gradient=False,
        )
        for s, d in ((EVEN, 1), (ODD, 0), ((7,), -1))
    ),
    constant("i32", np.arange(12).reshape(3, 4)),
    constant("i64", 7),
    constant("i1", [True, False, True, True]),
    update(train.SgdOp, EVEN, lr=0.1, weight_decay=0.01),
    update(train.SgdOp, ODD, lr=0.1, weight_decay=0.0),
    update(train.MomentumOp, EVEN, lr=0.1, momentum=0.9, weight_decay=0.01),
    update(train.MomentumOp, ODD, lr=0.1, momentum=0.9, weight_decay=0.0),
]
