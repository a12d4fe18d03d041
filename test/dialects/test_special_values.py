"""NaN, infinities and zeros: forward and gradient are what torch gives, on one device and split."""

from collections.abc import Callable

import numpy as np
import pytest
from harness import (
    MESH,
    Arg,
    Problem,
    apply,
    compiled,
    elements_of,
    function,
    laid_out,
    layout,
    numbers,
    program,
    tensors,
    torch_gradient,
)
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr
from shardir.dialects.text import word

NAN, INF = np.nan, np.inf
X = np.array([
    [NAN, 1.0, -INF, 2.0],
    [INF, -INF, 0.0, INF],
    [-INF, -INF, -INF, -INF],
    [0.0, -0.0, 0.0, 3.0],
    [-2.5, 30.0, -30.0, 0.5],
    [INF, 1.0, NAN, NAN],
    [0.0, 2.0, -3.0, 1.0],
    [1.0, 1.0, 1.0, 1.0],
])  # fmt: skip

SIMPLE = (
    nn.AbsOp, nn.SignOp, nn.ReciprocalOp, nn.SquareOp, nn.SqrtOp, nn.RsqrtOp, nn.Exp2Op,
    nn.Expm1Op, nn.Log2Op, nn.Log1pOp, nn.SinOp, nn.CosOp, nn.AtanOp, nn.ErfOp, nn.FloorOp,
    nn.CeilOp, nn.RoundOp, nn.TruncOp, nn.IsnanOp, nn.IsinfOp, nn.IsfiniteOp, nn.SiluOp,
    nn.SoftplusOp, nn.ReluOp, nn.SigmoidOp, nn.MinOp, nn.MaxOp, nn.PowOp,
)  # fmt: skip
ROW: dict[str, Attribute] = {"axis": int_attr(1)}
DIMS: dict[str, Attribute] = {"dims": dims_attr(1)}
CORRECTION: dict[str, Attribute] = {**DIMS, "correction": int_attr(1)}
OTHERS: list[tuple[type[TensorOp], dict[str, Attribute]]] = [
    (nn.ClampOp, {"min": float_attr(-1.0), "max": float_attr(1.0)}),
    (nn.NanToNumOp, {n: float_attr(x) for n, x in {"nan": 7, "posinf": 8, "neginf": 9}.items()}),
    (nn.LeakyReluOp, {"slope": float_attr(0.5)}),
    (nn.EluOp, {"alpha": float_attr(0.5)}),
    (nn.HardtanhOp, {"min": float_attr(-1.0), "max": float_attr(1.0)}),
    (nn.TrilOp, {"diagonal": int_attr(0)}),
    *((nn.ReduceOp, {**DIMS, "kind": word(nn.ReductionKindAttr, k)}) for k in ("max", "min")),
    (nn.LogsumexpOp, DIMS),
    (nn.VarOp, CORRECTION),
    (nn.StdOp, CORRECTION),
    (nn.ArgmaxOp, ROW),
    (nn.ArgminOp, ROW),
    (nn.CumsumOp, ROW),
    (nn.SortOp, ROW),
    (nn.SortOp, {**ROW, "descending": nn.UNIT}),
    (nn.TopkOp, {**ROW, "k": int_attr(1)}),
    (nn.TopkOp, {**ROW, "k": int_attr(1), "smallest": nn.UNIT}),
]
OPS = [*((op, {}) for op in SIMPLE), *OTHERS]


def problem(body: Callable[..., list[SSAValue]], *operands: np.ndarray) -> Problem:
    module = program(
        [Arg("f64", x.shape) for x in operands], body, (wrt := (*range(len(operands)),))
    )
    outs = tensors(function(module, "f").function_type.outputs)
    elements = elements_of(outs)
    rng = np.random.default_rng(0)
    cotangents = [numbers(rng, "f64", t.get_shape()) for t in outs if str(t.element_type) == "f64"]
    wanted = torch_gradient(module, operands, wrt, cotangents)
    return Problem(module, wrt, [*operands, *cotangents], wanted, [*elements, *["f64"] * len(wrt)])


@pytest.mark.parametrize("op, props", OPS, ids=lambda v: getattr(v, "name", None))
def test_special_values(op: type[TensorOp], props: dict[str, Attribute]) -> None:
    def body(b: OpBuilder, *operands: SSAValue) -> list[SSAValue]:
        return list(b.op(op, *operands, props=props).results)

    two = len(op.get_irdl_definition().operands) == 2
    p = problem(body, *((X, np.flip(X, 1).copy()) if two else (X,)))
    assert not p.errors(apply(p.module.clone(), "distributed-autodiff"))
    for text in ("[{a}, {}]", "[{}, {a}]", "[{}, {b, a}]"):
        module = compiled(laid_out(p.module, MESH, [layout(text)] * (1 + two)))
        assert not p.errors(module), text


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("layouts", ["[{}, {}, {}]", "[{}, {}, {a}]", "[{a}, {}, {b}]"])
def test_special_values_stay_in_their_part(size: int, layouts: str) -> None:
    """Adaptive pooling: parts without NaN or infinities are finite."""
    x = np.stack([np.arange(8.0), X[0].repeat(2), X[5].repeat(2), -X[4].repeat(2)])[:, None]
    props = {"size": IntsPerDimAttr((size,))}
    p = problem(lambda b, x: list(b.op(nn.AdaptiveAvgPoolOp, x, props=props).results), x)
    assert not p.errors(compiled(laid_out(p.module, MESH, [layout(layouts)])))
