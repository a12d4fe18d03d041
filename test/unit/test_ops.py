"""The law of every op: on any layout of its operands, all ranks together calculate what one device
does, forward and gradient; and one device calculates what torch does.

A case is one op on some shapes. The first of its element types goes through every layout of the
operands over a 2x2 mesh (a sample of LIMIT where there are more than those of two matrices), the
others through a few.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from harness import (
    ELEMENTS,
    FLOATS,
    INTEGERS,
    MESH,
    TORCH,
    Arg,
    Problem,
    all_layouts,
    apply,
    collectives,
    compiled,
    function,
    laid_out,
    layout,
    layouts,
    names,
    ordered_subsets,
    parts,
    problem,
    program,
    shape_of,
)
from xdsl.dialects.builtin import DenseIntOrFPElementsAttr, StringAttr
from xdsl.ir import Attribute, SSAValue
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import Builder
from shardir.dialects.nn.base import TensorOp, dims_attr, float_attr, int_attr
from shardir.dialects.text import word

LIMIT, FEW = 121, 6
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
    props: dict[str, Attribute] = field(default_factory=dict)
    result: Shape | None = None
    result_element: str = ""
    kinds: tuple[str, ...] = ()
    gradient: bool = True

    def __str__(self) -> str:
        return f"{self.op.name.split('.')[1]}-{self.name}"

    def args(self, element: str) -> list[Arg]:
        return [
            Arg(*o) if o and isinstance(o[0], str) else Arg(element, o) for o in self.operands
        ]

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


def binary(op: type[TensorOp], elements: tuple[str, ...], kinds: tuple[str, ...] = ()) -> list[Case]:
    """An elementwise op of two operands, broadcasting included."""
    pairs = {
        "even": (EVEN, EVEN), "odd": (ODD, ODD), "row": (EVEN, ROW), "column": (COLUMN, EVEN),
        "outer": ((3, 1), (1, 7)), "scalar": (SCALAR, EVEN), "scalars": (SCALAR, SCALAR),
    }  # fmt: skip
    return [Case(n, op, shapes, elements, kinds=kinds) for n, shapes in pairs.items()]


def unary(op: type[TensorOp], elements: tuple[str, ...] = FLOATS, kind: str = "normal") -> list[Case]:
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
    props: dict[str, Attribute] = {"kind": word(nn.ReductionKindAttr, kind), "dims": dims_attr(*dims)}
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
            name, nn.GatherGradOp, ((index, ids), out), NUMBERS, props, result=table,
            kinds=(below,), gradient=False,
        ),
    ]  # fmt: skip


def pick(x: Shape, index: str = "i64") -> list[Case]:
    name, below, ids = f"{'x'.join(map(str, x))}-{index}", f"below:{x[-1]}", (index, x[:-1])
    return [
        Case(name, nn.PickOp, (x, ids), ALL, kinds=("normal", below)),
        Case(
            name, nn.PickGradOp, (ids, x[:-1]), NUMBERS, result=x, kinds=(below,), gradient=False
        ),
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
    name, props = f"{'x'.join(map(str, shape))}-{'x'.join(map(str, norm))}", {"eps": float_attr(1e-5)}
    return [
        Case(name, nn.LayerNormOp, (shape, norm, norm), props=props),
        Case(name, nn.LayerNormGradOp, (shape, norm, shape), props=props, gradient=False),
    ]


def constant(element: str, values: Any) -> Case:
    values = np.array(values)
    type = dist.tensor(ELEMENTS[element], values.shape)
    data = DenseIntOrFPElementsAttr.from_list(type, values.flatten().tolist())  # type: ignore[arg-type]
    return Case(
        f"{element}-{'x'.join(map(str, values.shape))}", nn.ConstantOp, (), (element,),
        {"value": data}, values.shape, gradient=False,
    )  # fmt: skip


def convert(source: str, target: str, shape: Shape) -> Case:
    floats = source in FLOATS and target in FLOATS
    return Case(
        f"{source}->{target}", nn.ConvertOp, ((source, shape),), (source,), result=shape,
        result_element=target, gradient=floats, kinds=("ties",) if target == "i1" else (),
    )  # fmt: skip


def select(name: str, *shapes: Shape) -> Case:
    condition, *others = shapes
    return Case(name, nn.SelectOp, (("i1", condition), *others), ALL)


def update(op: type[TensorOp], shape: Shape, **options: float) -> Case:
    operands = (shape,) * (3 if op is train.MomentumOp else 2)
    props: dict[str, Attribute] = {n: float_attr(x) for n, x in options.items()}
    return Case("x".join(map(str, shape)), op, operands, props=props, gradient=False)


CASES: list[Case] = [
    *binary(nn.AddOp, NUMBERS), *binary(nn.SubOp, NUMBERS), *binary(nn.MulOp, NUMBERS),
    *binary(nn.DivOp, FLOATS, ("normal", "positive")), *binary(nn.MaxOp, ALL, ("ties", "ties")),
    *unary(nn.NegOp, NUMBERS), *unary(nn.ExpOp), *unary(nn.LogOp, kind="positive"),
    *unary(nn.SqrtOp, kind="positive"), *unary(nn.ReluOp), *unary(nn.TanhOp),
    *unary(nn.SigmoidOp), *unary(nn.GeluOp), *unary(nn.StopGradientOp, ALL),
    *activation_grad(nn.ReluGradOp, "ties"), *activation_grad(nn.TanhGradOp),
    *activation_grad(nn.SigmoidGradOp), *activation_grad(nn.GeluGradOp),
    *(
        Case(f"{how}-{n}", nn.CompareOp, shapes, ALL, {"how": word(nn.ComparisonAttr, how)},
             kinds=("ties", "ties"), gradient=False)
        for how, n, shapes in (
            ("eq", "even", (EVEN, EVEN)), ("ne", "odd", (ODD, ODD)), ("lt", "row", (EVEN, ROW)),
            ("le", "column", (COLUMN, EVEN)), ("gt", "scalar", (EVEN, SCALAR)),
            ("ge", "outer", ((3, 1), (1, 7))),
        )
    ),
    select("even", EVEN, EVEN, EVEN), select("odd", ODD, ODD, ODD),
    select("broadcast", COLUMN, ROW, SCALAR), select("rows", (3,), ODD, (1, 3)),
    *(convert(s, t, EVEN) for s in ALL for t in ALL if s != t),
    convert("f64", "f32", ODD),
    Case("even", nn.MatmulOp, ((4, 8), (8, 4)), NUMBERS),
    Case("odd", nn.MatmulOp, ((3, 5), (5, 7)), NUMBERS),
    Case("vector", nn.MatmulOp, ((1, 4), (4, 1)), NUMBERS),
    Case("batched", nn.MatmulOp, ((4, 2, 4), (4, 4, 6)), NUMBERS),
    Case("shared", nn.MatmulOp, ((2, 3, 4), (4, 5)), NUMBERS),
    einsum("ik,jk->ij", (4, 6), (8, 6)), einsum("bhqd,bhkd->bhqk", (2, 4, 3, 4), (2, 4, 5, 4)),
    einsum("i,j->ij", (3,), (4,)), einsum("ij,ij->", (4, 3), (4, 3)), einsum("ij,j->i", ODD, (3,)),
    einsum("ij,ji->ji", (4, 3), (3, 4)),
    reduce("sum", EVEN, 1), reduce("sum", ODD, 0), reduce("sum", (3, 4, 5), 0, 2),
    reduce("sum", EVEN, 0, 1), reduce("sum", EVEN, -1, keep=True), reduce("sum", EVEN),
    reduce("mean", EVEN, 1), reduce("mean", ODD, 0), reduce("mean", ODD, 0, 1),
    reduce("mean", (3, 4, 5), 2, 0, keep=True),
    reduce("max", EVEN, 1), reduce("max", ODD, 0, 1), reduce("max", ODD, 1, keep=True),
    reduce("min", EVEN, 0), reduce("min", ODD, 0), reduce("min", (3, 4, 5), 1, keep=True),
    reshape((4, 8), (32,)), reshape((32,), (4, 8)), reshape((8, 6), (4, 12)),
    reshape((4, 6), (4, 2, 3)), reshape((4, 2, 3), (4, 6)), reshape((3, 5), (15,)),
    reshape((15,), (5, 3)), reshape((6, 4), (4, 6)), reshape((4, 1, 8), (4, 8)),
    reshape((2, 2, 8), (4, 8)), reshape((1,), ()), reshape((), (1, 1)), reshape((3, 4), (1, 3, 4, 1)),
    transpose(EVEN, 1, 0), transpose(ODD, 1, 0), transpose((2, 3, 4), 2, 0, 1), transpose(EVEN, -2, -1),
    broadcast((8,), EVEN, 1), broadcast((4,), EVEN, 0), broadcast((), ODD), broadcast((4, 1), EVEN, 0, 1),
    broadcast((3, 5), (5, 2, 3), 2, 0), broadcast((1, 7), (3, 5, 7), 1, 2),
    *gather((8, 4), (4,), 0), *gather((7, 3), (2, 4), 0, "i32"), *gather((4, 6, 2), (5,), 1),
    *gather((3, 5), (2, 2), -1), *gather((4, 8), (), 0),
    *pick((4, 8)), *pick((3, 5), "i32"), *pick((2, 4, 7)), *pick((6,)),
    *row((4, 8), -1), *row((5, 3), 0), *row((2, 4, 6), 1),
    *cross_entropy((8, 4)), *cross_entropy((3, 7), "i32"), *cross_entropy((2, 4, 6)), *cross_entropy((5,)),
    *layer_norm((4, 8), (8,)), *layer_norm((3, 5), (5,)), *layer_norm((2, 4, 6), (4, 6)),
    constant("f32", np.arange(32).reshape(4, 8) / 8), constant("f64", np.arange(15).reshape(5, 3)),
    constant("bf16", [1.0, 2.5, -3.0]), constant("f16", [[0.5, 1.5], [2.0, 3.0]]),
    *(
        Case(f"{'x'.join(map(str, s))}-{d}", nn.IotaOp, (), NUMBERS, {"dim": int_attr(d)}, s, gradient=False)
        for s, d in ((EVEN, 1), (ODD, 0), ((7,), -1))
    ),
    constant("i32", np.arange(12).reshape(3, 4)), constant("i64", 7), constant("i1", [True, False, True, True]),
    update(train.SgdOp, EVEN, lr=0.1, weight_decay=0.01), update(train.SgdOp, ODD, lr=0.1, weight_decay=0.0),
    update(train.MomentumOp, EVEN, lr=0.1, momentum=0.9, weight_decay=0.01),
    update(train.MomentumOp, ODD, lr=0.1, momentum=0.9, weight_decay=0.0),
]  # fmt: skip

OPS: list[type[TensorOp]] = [
    op for d in (nn.Nn, train.Train) for op in d.operations if issubclass(op, TensorOp)
]
RUNS = [(c, e) for c in CASES for e in c.elements]


def test_every_op_has_a_case_and_a_reference():
    assert {c.op for c in CASES} == set(OPS)
    assert set(TORCH) == set(OPS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_an_element_type_is_tested_or_refused(op: type[TensorOp]):
    """Types without a case of this op are an error that the user reads, not a surprise."""
    cases = [c for c in CASES if c.op is op]
    tested = {e for c in cases for e in c.elements}
    case = cases[0]
    for element in set(ELEMENTS) - tested:
        with pytest.raises((ShardirError, VerifyException)):
            program(case.args(element), case.body(element)).verify()


# ---- one device ----


@pytest.mark.parametrize("case, element", RUNS, ids=str)
def test_one_device_is_torch(case: Case, element: str):
    p = case.problem(element)
    module = p.module.clone()
    if p.wrt:
        apply(module, "distributed-autodiff")
    assert not p.errors(module)


# ---- all layouts ----


def choices(p: Problem, most: int, seed: str) -> list[tuple[Layout, ...]]:
    """Layouts of the operands and, for a third of them, of the results too; all or `most`."""
    block = function(p.module, "f").body.block
    assert block.last_op is not None
    draw = random.Random(seed)
    operands = all_layouts([shape_of(v) for v in block.args])
    if len(operands) > most:
        operands = [operands[0], *draw.sample(operands[1:], most - 1)]
    results = [layouts(len(shape_of(v))) for v in block.last_op.operands]
    if not block.args:
        return list(product(*results))
    return [
        (*o, *(draw.choice(r) for r in results)) if i % 3 == 2 else o
        for i, o in enumerate(operands)
    ]


def faults(p: Problem, given: Sequence[tuple[Layout, ...]]) -> list[str]:
    """What goes wrong with these layouts of the operands, and perhaps of the results. The verifier
    takes longer than a pass; it sees one module in four."""
    n = len(function(p.module, "f").body.block.args)
    found = []
    for i, some in enumerate(given):
        try:
            module = laid_out(p.module, MESH, some[:n], some[n:])
            message = p.errors(compiled(module, verify=i % 4 == 0))
        except Exception as e:
            message = f"raises {type(e).__name__}: {e}"
        if message:
            found.append(f"{', '.join(f'[{l}]' for l in some)}: {message}")
    return found


@pytest.mark.parametrize("case, element", RUNS, ids=str)
def test_all_ranks_are_one_device(case: Case, element: str):
    p = case.problem(element)
    most = LIMIT if element == case.elements[0] else FEW
    wrong = faults(p, choices(p, most, f"{case} {element}"))
    assert not wrong, f"{len(wrong)} layouts are wrong, such as\n" + "\n".join(wrong[:3])


def with_partial(l: Layout, draw: random.Random, reductions: Sequence[str]) -> Layout:
    """The layout with some of its free axes partial."""
    free = [a for a in MESH.names if a not in l.used]
    return l.with_partial(draw.choice(list(ordered_subsets(free))), draw.choice(reductions))


@pytest.mark.parametrize("case", [c for c in CASES if c.operands], ids=str)
def test_partial_operands(case: Case):
    """Contributions go through what is linear in them, and are reduced before what is not."""
    p = case.problem(case.elements[0])
    draw = random.Random(str(case))
    args = case.args(case.elements[0])
    given = []
    for _ in range(3 * FEW):
        operands = [draw.choice(layouts(len(a.shape))) for a in args]
        sums = [
            with_partial(o, draw, ("max", "min") if a.element == "i1" else ("sum", "sum", "max", "min"))
            for o, a in zip(operands, args, strict=True)
        ]
        given.append(tuple(sums))
        shared = layout(draw.choice(["[], partial sum {a}", "[], partial sum {b}"]))
        given.append(tuple(  # all partial over the same axis
            replace(shared, dims=without(o.dims, shared.partial)) for o in operands
        ))
    wrong = faults(p, given)
    assert not wrong, f"{len(wrong)} layouts are wrong, such as\n" + "\n".join(wrong[:3])


def without(dims: tuple[Axes, ...], axes: Axes) -> tuple[Axes, ...]:
    return tuple(tuple(a for a in d if a not in axes) for d in dims)


LINEAR = {
    "add": lambda b, x, y: b.add(x, y),
    "sub": lambda b, x, y: b.sub(x, y),
    "neg": lambda b, x, y: b.neg(x),
    "transpose": lambda b, x, y: b.transpose(x, [1, 0]),
    "reshape": lambda b, x, y: b.reshape(x, (32,)),
    "broadcast": lambda b, x, y: b.broadcast(x, [1, 2], (2, 4, 8)),
    "sum": lambda b, x, y: b.reduce(x, "sum", [1]),
    "mean": lambda b, x, y: b.reduce(x, "mean", [1]),
}


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_op_keeps_contributions(name: str):
    """Its result is reduced once, at the end: before it no data moves."""
    given = [layout("[{b}, {}], partial sum {a}")] * 2
    p = problem([Arg("f32", EVEN)] * 2, LINEAR[name], (0, 1))
    forward, _ = parts(module := compiled(laid_out(p.module, MESH, given)), "g")
    assert not p.errors(module)
    ours = next(i for i, op in enumerate(forward) if isinstance(op, TensorOp))
    assert not collectives(forward[:ours])
    assert collectives(forward) == {"all_reduce": 1}
    assert "all_gather" not in collectives(function(module, "g").body.block.ops)  # type: ignore[arg-type]


# ---- rows that are split ----

ROWS: dict[str, tuple[list[Arg], Any, str, dict[str, int]]] = {
    "softmax": (
        [Arg("f64", (4, 8))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(-1)}),
        "[{a}, {b}]", {"all_reduce": 2},  # greatest, sum of exponentials
    ),
    "softmax over both axes": (
        [Arg("f64", (4, 8))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(-1)}),
        "[{}, {b, a}]", {"all_reduce": 2},
    ),
    "uneven softmax": (
        [Arg("f64", (3, 7))],
        lambda b, x: b.value(nn.SoftmaxOp, x, props={"axis": int_attr(1)}),
        "[{a}, {b}]", {"all_reduce": 2},
    ),
    "log_softmax": (
        [Arg("f64", (8, 4))],
        lambda b, x: b.value(nn.LogSoftmaxOp, x, props={"axis": int_attr(0)}),
        "[{b}, {a}]", {"all_reduce": 2},
    ),
    "layer_norm": (
        [Arg("f64", (4, 8)), Arg("f64", (8,)), Arg("f64", (8,))],
        lambda b, x, w, c: b.value(nn.LayerNormOp, x, w, c, props={"eps": float_attr(1e-5)}),
        "[{a}, {b}]", {"all_reduce": 2},  # mean, variance
    ),
    "cross_entropy": (
        [Arg("f64", (4, 8)), Arg("i64", (4,))],
        lambda b, x, ids: b.value(nn.CrossEntropyOp, x, ids),
        "[{a}, {b}]", {"all_reduce": 3},  # greatest, sum of exponentials, the label's logit
    ),
    "uneven cross_entropy": (
        [Arg("f64", (3, 7)), Arg("i64", (3,))],
        lambda b, x, ids: b.value(nn.CrossEntropyOp, x, ids),
        "[{}, {a, b}]", {"all_reduce": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_split_row_is_calculated_in_parts(name: str):
    """Only maxima and sums move: the row itself is never gathered."""
    args, body, text, expected = ROWS[name]
    wrt = tuple(i for i, a in enumerate(args) if a.element in FLOATS)
    p = problem(args, body, wrt, ["below:7" if a.element == "i64" else "normal" for a in args])
    whole = function(p.module, "f").body.block.first_op
    assert whole is not None
    module = compiled(laid_out(p.module, MESH, [layout(text), *[None] * (len(args) - 1)]))
    assert not p.errors(module)
    forward, backward = parts(module, "g")
    assert whole.name not in names(forward)
    assert collectives(forward) == expected
    assert set(collectives(backward)) <= {"all_reduce"}
    for op in (*forward, *backward):
        if isinstance(op, dist.AllReduceOp):
            for v in op.values:
                assert shape_of(v) != shape_of(op.parent.args[0])  # type: ignore[union-attr]
