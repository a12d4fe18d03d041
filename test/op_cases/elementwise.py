from harness import FLOATS

from op_cases.case import ALL, COLUMN, EVEN, NUMBERS, ODD, ROW, SCALAR, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.text import word


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
]
