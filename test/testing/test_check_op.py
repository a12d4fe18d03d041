"""check_op finds what is wrong in an op: each op here has one error, the first one none."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from xdsl.dialects.builtin import FloatAttr, TensorType, f64
from xdsl.ir import Dialect, Operation, SSAValue
from xdsl.irdl import operand_def, prop_def, result_def

from shardir.dialects import nn
from shardir.dialects.installed import REGISTRY
from shardir.dialects.nn.types import float_element, unsharded_type
from shardir.extend import (
    STRATEGY,
    Array,
    Device,
    Extension,
    Factors,
    FloatUnary,
    OpBuilder,
    Props,
    TensorOp,
    Types,
    float_attr,
    op_definition,
    register,
)
from shardir.testing import Case, by_torch, check_op
from shardir.testing.op_laws import OpLaws

TEXT = "torch.sinh({scale} * {x})"


class Sinh(FloatUnary):
    """sinh(scale x)"""

    scale = prop_def(FloatAttr.constr(type=f64))
    assembly_format = f"$x `scale` $scale {STRATEGY}"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.sinh(self.scale.value.data * arrays[0])

    def partials(self, b: OpBuilder, dy: SSAValue) -> Sequence[SSAValue | None]:
        scale = self.scale.value.data
        e = b.value(nn.ExpOp, b.scale(self.x, scale))
        f = b.value(nn.ExpOp, b.scale(self.x, -scale))
        return (b.mul(dy, b.scale(b.add(e, f), scale / 2)),)


@op_definition
class RightOp(Sinh):
    name = "wrong.nothing"


@op_definition
class ValueOp(Sinh):
    name = "wrong.value"

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.sinh(arrays[0])


@op_definition
class GradientOp(Sinh):
    name = "wrong.gradient"

    def partials(self, b: OpBuilder, dy: SSAValue) -> Sequence[SSAValue | None]:
        (right,) = super().partials(b, dy)
        assert right is not None
        return (b.scale(right, 1.001),)


@op_definition
class LinearOp(Sinh):
    """Its rule lets partial sums pass."""

    name = "wrong.linear"
    LINEAR: ClassVar[str] = "sum"


class Total(TensorOp):
    """The sum of squares over the last dimension."""

    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        (x,) = operands
        return [TensorType(float_element(cls.name, operands), x.get_shape()[:-1])]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return Factors.of(
            [["i", "j"]], [["i"]], [(*operands, *results)[k].get_shape() for k in (0, 1)]
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return np.square(arrays[0]).sum(-1)

    def pullback(self, b: OpBuilder, dy: SSAValue) -> Sequence[SSAValue | None]:
        shape = unsharded_type(self.x).get_shape()
        return (b.scale(b.mul(b.broadcast(dy, range(len(shape) - 1), shape), self.x), 2.0),)


@op_definition
class TotalOp(Total):
    name = "wrong.total"


@op_definition
class ReductionOp(Total):
    """Its rule has another reduction of partial results."""

    name = "wrong.reduction"

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return replace(super().rule(operands, results, props), reduction="max")


@op_definition
class PartialOp(Total):
    """Its rule says that ranks with parts of a row compute the whole result."""

    name = "wrong.partial"

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        return replace(super().rule(operands, results, props), repeated=frozenset("j"))


SHAPES = {"even": (4, 8), "odd": (5, 3), "cube": (2, 3, 4)}


def sinh(op: Any, x: Array) -> Array:
    y = op.scale.value.data * x
    return (np.exp(y) - np.exp(-y)) / 2


@by_torch
def total(op: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1) ** 2


def cases_of(op: type[TensorOp]) -> list[Case]:
    if issubclass(op, Sinh):
        numbers = zip(SHAPES.items(), (0.5, 1.0, -1.5), strict=True)
        return [Case(n, op, (s,), props={"scale": float_attr(x)}) for (n, s), x in numbers]
    return [Case(n, op, (s,)) for n, s in SHAPES.items() if n != "cube"]


@pytest.fixture(autouse=True)
def texts(registry: None) -> dict[type[Operation], Any]:
    """The texts in torch of the ops here, which are registered."""
    table: dict[type[Operation], Any] = {}
    ops: list[type[Operation]] = [RightOp, TotalOp, *WRONG]
    register(
        Extension(
            name="wrong", dialects={"wrong": lambda: Dialect("wrong", ops)}, torch=lambda: table
        )
    )
    return table


def errors_of(op: type[TensorOp], **options: Any) -> str:
    """Return what check_op finds."""
    reference = sinh if issubclass(op, Sinh) else total
    try:
        check_op(op, options.pop("cases", cases_of(op)), reference, **options)
    except AssertionError as e:
        return str(e)
    return ""


def laws_in(errors: str) -> list[str]:
    """Return the laws that a report names."""
    return [line.split(":")[0] for line in errors.splitlines()[1:] if not line.startswith(" ")]


def test_a_right_op_breaks_no_law(texts: Any) -> None:
    texts |= {RightOp: TEXT, TotalOp: "{x}.square().sum(-1)"}
    for op in (RightOp, TotalOp):
        assert errors_of(op) == ""


WRONG: dict[type[TensorOp], tuple[str, str]] = {
    ValueOp: ("one device and all ranks", "value-even in f64, one device: result 0 at [0, 0]"),
    GradientOp: ("one device and all ranks", "one device: the gradient of operand 0 at [0, 0]"),
    LinearOp: ("partial operands", "linear-even on @m"),
    ReductionOp: ("one device and all ranks", "reduction-even in f64 on @m"),
    PartialOp: ("one device and all ranks", "partial-even in f64 on @m"),
}


@pytest.mark.parametrize("op", WRONG, ids=lambda op: op.name)
def test_a_wrong_op_breaks_its_law(op: type[TensorOp]) -> None:
    law, words = WRONG[op]
    errors = errors_of(op, emitted=False)
    assert law in laws_in(errors), errors
    assert words in errors


def test_a_wrong_text_in_torch_is_found(texts: Any) -> None:
    for text in (
        "torch.sinh({x})",
        "{x}.mul_({scale}).sinh()",
        "torch.sinh({scale} * {x}).float()",
    ):
        texts[RightOp] = text
        REGISTRY.version += 1
        errors = errors_of(RightOp)
        assert "emitted text" in laws_in(errors), errors
    texts.clear()
    errors = errors_of(RightOp)
    assert "nothing covers the law that emitted text is the interpreter: give its text" in errors


def test_what_cases_do_not_vary_is_named() -> None:
    one = Case("one", RightOp, ((4, 6),), ("f64",), {"scale": float_attr(1.0)})
    laws = OpLaws([one], lambda *_: [])
    assert laws.not_varied(RightOp) == [
        "wrong.nothing: the operand x has the shape [4, 6] in every case; add one with another "
        "shape",
        "wrong.nothing: every case has the attribute scale = 1.000000e+00 : f64; add one with "
        "another value",
    ]
    flat = OpLaws([Case("flat", TotalOp, ((4, 1),), ("f64",))], lambda *_: [])
    assert flat.not_varied(TotalOp)[-1] == (
        "wrong.total: the factor j has the size 1 in every case; add a larger one"
    )
    full = OpLaws([Case("full", TotalOp, ((12, 12),), ("f64",))], lambda *_: [])
    assert [m.partition(":")[2][:46] for m in full.missing([TotalOp], emitted=False)] == [
        " nothing covers the law that uneven shards: ad",
        " nothing covers the law that empty shards: add",
    ]


def test_arguments_of_another_kind_are_named() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ("nn.relu", [], "expected a class of ops, got 'nn.relu'"),
        (nn.ReluOp, [3], "expected cases of nn.relu, got 3"),
        (nn.ReluOp, [], "expected cases of nn.relu, got none"),
    ]
    for op, cases, message in wrong:
        with pytest.raises(AssertionError, match=re.escape(message)):
            check_op(op, cases, lambda op, x: x)


def test_an_element_type_without_a_case_is_found() -> None:
    narrow = [replace(case, elements=("f32",)) for case in cases_of(RightOp)]
    errors = errors_of(RightOp, cases=narrow, emitted=False)
    assert "element types" in laws_in(errors), errors
    assert "expected an error, as no case has this type, got none" in errors
