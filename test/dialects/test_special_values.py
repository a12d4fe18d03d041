"""NaN, infinities, zeros, extremes: forward and gradient are torch's, on one device and split."""

import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from op_cases import CASES, Case
from support.extent import extent, sampled
from support.harness import (
    MESH,
    Arg,
    Array,
    Problem,
    apply,
    compiled,
    elements_of,
    function,
    laid_out,
    layout,
    numbers,
    posed,
    problem_of,
    program,
    tensors,
    torch_gradient,
)
from support.special_values import (
    EXTREME,
    FINITE,
    LIMITS,
    SPECIAL,
    SUMS,
    UNDEFINED,
    WITHOUT_NAN,
    with_special,
)
from xdsl.dialects.builtin import FloatAttr
from xdsl.ir import Attribute, SSAValue

from shardir.dialects import nn
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.properties import dims_attr, float_attr, int_attr
from shardir.dialects.text import word
from shardir.interpret import run
from shardir.testing.random_layouts import random_layout

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


def first_cases() -> list[Case]:
    """A case of each op that has a gradient, other than the gradient ops themselves."""
    found: dict[type, Case] = {}
    for case in CASES:
        own = case.gradient and "f64" in case.elements and case.op.name.startswith("nn.")
        floats = any(a.element == "f64" for a in case.args("f64"))
        if own and floats and case.op not in UNDEFINED and not case.op.name.endswith("_grad"):
            found.setdefault(case.op, case)
    return [*found.values()]


@pytest.mark.parametrize("case", sampled(first_cases(), 25), ids=str)
def test_special_values_of_each_op(case: Case) -> None:
    """NaN, infinities and zeros among the elements of the operands, of one device and split."""
    rng = np.random.default_rng(len(str(case)))
    args, draw = case.args("f64"), random.Random(len(str(case)))
    kinds = [*case.kinds, *["normal"] * (len(args) - len(case.kinds))]
    values = [x for x in SPECIAL if not (case.op in WITHOUT_NAN and np.isnan(x))]
    for share in (0.05, 0.4):
        arrays = [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]
        arrays = [with_special(rng, x, share, values) for x in arrays]
        p = posed(program(args, case.body("f64"), case.wrt("f64")), case.wrt("f64"), arrays, rng)
        given = [random_layout(draw, MESH, len(a.shape)) for a in args]
        for module in (
            apply(p.module.clone(), "distributed-autodiff"),
            compiled(laid_out(p.module, MESH, given)),
        ):
            if case.op in FINITE:
                found = run(module, "g", p.arguments)
                for i, (x, y) in enumerate(zip(found, p.wanted, strict=True)):
                    assert (np.isfinite(x) == np.isfinite(y)).all(), f"result {i} of {given}"
                    p.wanted[i] = np.where(np.isfinite(y), y, x)
            assert not p.errors(module), given


POINTS = (0.0, 1.0, -1.0, 2.0, 0.5, -0.5, 3.0, -3.0)


@pytest.mark.parametrize("case", sampled(first_cases(), 25), ids=str)
def test_gradients_at_points_of_each_op(case: Case) -> None:
    """Zeros, ties, equal rows, and the numbers that are properties of the op, such as bounds:
    where a derivative has two sides the gradient is that which torch chooses, on one device and
    split."""
    bounds = [a.value.data for a in case.props.values() if isinstance(a, FloatAttr)]
    args, draw = case.args("f64"), random.Random(len(str(case)))
    kinds = [*case.kinds, *["normal"] * (len(args) - len(case.kinds))]
    rng = np.random.default_rng(len(str(case)))
    for points in ((*POINTS, *bounds), (0.0,), (1.0,), (0.0, *bounds)):
        arrays = [numbers(rng, a.element, a.shape, k) for a, k in zip(args, kinds, strict=True)]
        arrays = [
            with_special(rng, x, 1.0, [p for p in points if k != "positive" or p > 0] or [1.0])
            for x, k in zip(arrays, kinds, strict=True)
        ]
        p = posed(program(args, case.body("f64"), case.wrt("f64")), case.wrt("f64"), arrays, rng)
        given = [random_layout(draw, MESH, len(a.shape)) for a in args]
        for module in (
            apply(p.module.clone(), "distributed-autodiff"),
            compiled(laid_out(p.module, MESH, given)),
        ):
            assert not p.errors(module), f"{points} {given}"


def close(x: Array, y: Array) -> bool:
    """Whether each element of x is that of y, but for rounding: relative to itself."""
    if x.dtype.kind != "f":
        return np.array_equal(x, y)
    with np.errstate(over="ignore"):
        y = y.astype(x.dtype)
    return np.allclose(x, y, 1e-9, LIMITS.tiny / LIMITS.eps, equal_nan=True)


@pytest.mark.parametrize(
    "case", sampled((c for c in first_cases() if c.op not in SUMS + FINITE), 25), ids=str
)
def test_extreme_values_of_each_op(case: Case) -> None:
    """The largest and smallest numbers among the elements, of one device and split: results and
    gradients overflow, underflow and round as torch's."""
    for seed in range(extent(1, 20)):
        rng, draw = np.random.default_rng([seed, len(str(case))]), random.Random(seed)
        given = problem_of(case, "f64").arguments[: len(case.operands)]
        arrays = [with_special(rng, x, 0.3, EXTREME) for x in given]
        wrt = case.wrt("f64")
        p = posed(program(case.args("f64"), case.body("f64"), wrt), wrt, arrays, rng)
        layouts = [random_layout(draw, MESH, x.ndim) for x in given]
        for module in (
            apply(p.module.clone(), "distributed-autodiff"),
            compiled(laid_out(p.module, MESH, layouts)),
        ):
            found = run(module, "g", p.arguments)
            assert all(map(close, found, p.wanted)), f"seed {seed}, {layouts}"


@pytest.mark.parametrize("size", [1, 3, 4, 5])
@pytest.mark.parametrize("layouts", ["[{}, {}, {}]", "[{}, {}, {a}]", "[{a}, {}, {b}]"])
def test_special_values_stay_in_their_part(size: int, layouts: str) -> None:
    """Adaptive pooling: parts without NaN or infinities are finite."""
    x = np.stack([np.arange(8.0), X[0].repeat(2), X[5].repeat(2), -X[4].repeat(2)])[:, None]
    props = {"size": IntsPerDimAttr((size,))}
    p = problem(lambda b, x: list(b.op(nn.AdaptiveAvgPoolOp, x, props=props).results), x)
    assert not p.errors(compiled(laid_out(p.module, MESH, [layout(layouts)])))


def windows(**numbers: tuple[int, ...]) -> dict[str, Attribute]:
    return {n: IntsPerDimAttr(v) for n, v in numbers.items()}


SLIDING: list[tuple[type[TensorOp], dict[str, Attribute], tuple[int, ...], tuple[int, ...] | None]]
SLIDING = [
    (nn.ConvOp, windows(stride=(3,)), (1, 1, 10), (1, 1, 2)),
    (nn.ConvOp, windows(padding=(1, 1)), (2, 2, 9), (2, 2, 3)),
    (nn.ConvOp, windows(padding=(0, 2), dilation=(2,)), (1, 2, 7), (2, 1, 3)),
    (nn.ConvOp, windows(padding=(1, 1, 0, 1)), (1, 1, 5, 3), (1, 1, 3, 2)),
    (nn.MaxPoolOp, windows(window=(3,), stride=(1,), padding=(1, 1)), (2, 2, 4), None),
    (nn.MaxPoolOp, windows(window=(4,), stride=(2,), padding=(2, 0)), (2, 2, 9), None),
    (nn.MaxPoolOp, windows(window=(2, 3), stride=(1, 2), padding=(0, 1, 1, 1)), (2, 1, 3, 7), None),
    (nn.AvgPoolOp, windows(window=(2,), stride=(3,)), (2, 2, 7), None),
]


LAST_SPLIT = ("[{}, {}, {}]", "[{}, {}, {a}]", "[{}, {}, {b, a}]")


@pytest.mark.parametrize(("sliding", "layouts"), [*product(SLIDING, LAST_SPLIT)])
def test_special_values_stay_under_their_windows(
    sliding: tuple[type[TensorOp], dict[str, Attribute], tuple[int, ...], tuple[int, ...] | None],
    layouts: str,
) -> None:
    """Those of some elements, of all, and of those under no window. Also in the gradient of a
    maximum where all of a padded window is -inf. In that of a convolution's weight a channel's
    kernel is finite where torch's is; where torch has NaN in some of its elements, others may be
    NaN too: at the end of a split dimension they meet in a product with 0."""
    rng, (op, props, x, w) = np.random.default_rng(0), sliding

    def made(*operands: Array) -> Problem:
        return problem(lambda b, *v: list(b.op(op, *v, props=props).results), *operands)

    weight = [] if w is None else [rng.standard_normal(w)]
    reached = made(rng.standard_normal(x), *weight).wanted[1] != 0
    several = rng.choice([NAN, INF, -INF, -INF, -INF, 0.0], (3, *x))
    given = [(rng.random(x) < share, s) for share, s in zip((0.1, 0.5, 1.0), several, strict=True)]
    if op is not nn.MaxPoolOp and not reached.all():
        given.append((~reached, np.full(x, NAN)))
    split = layout(layouts if len(x) == 3 else layouts.replace("]", ", {}]"))
    for at, special in given:
        p = made(np.where(at, special, rng.standard_normal(x)), *weight)
        module = compiled(laid_out(p.module, MESH, [split]))
        if w is not None:
            found = run(module, "g", p.arguments)[-1]
            taps = (*range(2, found.ndim),)
            finite = np.isfinite(p.wanted[-1]).all(taps, keepdims=True)
            assert (np.isfinite(found).all(taps, keepdims=True) == finite).all(), at
            p.wanted[-1] = np.where(finite, p.wanted[-1], found)
        assert not p.errors(module), at
