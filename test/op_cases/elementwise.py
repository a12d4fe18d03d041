from collections.abc import Sequence

from harness import FLOATS, INTEGERS

from op_cases.case import ALL, COLUMN, EVEN, NUMBERS, ODD, ROW, SCALAR, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import TensorOp, float_attr, int_attr
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


def triangle(op: type[TensorOp], shape: Shape, diagonal: int) -> Case:
    name = f"{'x'.join(map(str, shape))}-{diagonal}"
    return Case(name, op, (shape,), ALL, {"diagonal": int_attr(diagonal)})


def convert(source: str, target: str, shape: Shape) -> Case:
    floats = source in FLOATS and target in FLOATS
    return Case(
        f"{source}->{target}-{'x'.join(map(str, shape))}",
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
    *binary(nn.RemainderOp, NUMBERS, ("normal", "positive"))[:3],
    Case("negative", nn.RemainderOp, (("f64", EVEN), ("f64", EVEN)), ("f64",)),
    *binary(nn.PowOp, FLOATS, ("positive", "normal"))[:5],
    Case("ties", nn.PowOp, (EVEN, EVEN), kinds=("ties", "ties")),
    *(
        Case(n, nn.LerpOp, shapes)
        for n, shapes in (
            ("even", (EVEN, EVEN, EVEN)),
            ("odd", (ODD, ODD, SCALAR)),
            ("broadcast", (COLUMN, ROW, EVEN)),
        )
    ),
    *binary(nn.MaxOp, ALL, ("ties", "ties")),
    *binary(nn.MinOp, ALL, ("ties", "ties"))[:4],
    *unary(nn.NegOp, NUMBERS),
    *unary(nn.AbsOp, NUMBERS, "ties", shapes=("odd",)),
    *unary(nn.SignOp, NUMBERS, "ties", shapes=("odd",)),
    *few(nn.ReciprocalOp, "positive"),
    *unary(nn.SquareOp, NUMBERS, shapes=("odd",)),
    *unary(nn.SqrtOp, kind="positive"),
    *few(nn.RsqrtOp, "positive"),
    *unary(nn.ExpOp),
    *few(nn.Exp2Op),
    *few(nn.Expm1Op),
    *unary(nn.LogOp, kind="positive"),
    *few(nn.Log2Op, "positive"),
    *few(nn.Log1pOp, "positive"),
    *few(nn.SinOp),
    *few(nn.CosOp),
    *few(nn.TanOp, "positive"),
    *few(nn.AtanOp),
    *few(nn.ErfOp),
    *(
        case
        for op in (nn.FloorOp, nn.CeilOp, nn.RoundOp, nn.TruncOp)
        for case in (*few(op), *few(op, "halves", "halves-"))
    ),
    *few(nn.ClampOp, "ties", "both-", min=-0.5, max=1.0),
    *few(nn.ClampOp, "ties", "min-", min=0.0),
    *few(nn.ClampOp, "normal", "max-", max=0.5),
    *few(nn.NanToNumOp, nan=0.5, posinf=100.0, neginf=-100.0),
    triangle(nn.TrilOp, EVEN, 0),
    triangle(nn.TrilOp, ODD, -1),
    triangle(nn.TriuOp, ODD, 1),
    triangle(nn.TriuOp, (2, 3, 4), 0),
    *(case for op in (nn.AndOp, nn.OrOp, nn.XorOp) for case in binary(op, ("i1", *INTEGERS))[1:3]),
    *unary(nn.NotOp, ("i1", *INTEGERS), shapes=("odd",)),
    *(
        case
        for op in (nn.IsnanOp, nn.IsinfOp, nn.IsfiniteOp)
        for case in unary(op, shapes=("odd",), gradient=False)
    ),
    *unary(nn.StopGradientOp, ALL),
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
