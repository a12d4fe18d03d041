"""mixed-precision: every op has operands of the type that it needs."""

from collections.abc import Sequence

import pytest
from op_cases import CASES, Case
from support.each import check_each
from support.harness import function, program
from xdsl.context import Context
from xdsl.dialects.builtin import TensorType, bf16, f32
from xdsl.ir import SSAValue

import shardir
from shardir.dialects.builder import OpBuilder
from shardir.interpret.equivalence import check_pass
from shardir.passes.mixed_precision import MixedPrecision

FIRST = {c.op: c for c in reversed(CASES) if "f32" in c.elements and c.op.name.startswith("nn.")}


def test_every_op_has_operands_of_its_precision() -> None:
    """Its operands are results of products, which are narrow; the program stays equivalent."""
    check_each(check_precision, FIRST.values())


def check_precision(case: Case) -> None:
    args = case.args("f32")

    def body(b: OpBuilder, *operands: SSAValue) -> Sequence[SSAValue]:
        products = []
        for v, a in zip(operands, args, strict=True):
            letters = "abcdefg"[: len(a.shape)]
            square = f"{letters},{letters}->{letters}"
            products.append(b.einsum(square, v, v) if a.element == "f32" else v)
        return case.body("f32")(b, *products)

    before = program(args, body)
    after = before.clone()
    MixedPrecision().apply(Context(), after)
    after.verify()
    *_, found = (op for op in function(after, "f").walk() if isinstance(op, case.op))
    statistics = [getattr(found, name) for name in case.op.STATISTICS]
    assert {v.type.element_type for v in statistics if v is not None} <= {f32}
    given = [v for v in found.operands if v not in statistics]
    types = {v.type.element_type for v in given if isinstance(v.type, TensorType)}
    if floats := types & {f32, bf16}:
        assert floats == {f32 if case.op.PRECISION == "wide" else bf16}
    read = [v for v in statistics if v in found.operands]  # random ones do not fit the others
    if case.op.PRECISION == "narrow" and not read:
        check_pass(before, after, "mixed-precision")


@pytest.mark.parametrize("pipeline", ["train", "single-device"])
def test_a_redistribution_of_the_source_may_be_narrow(pipeline: str) -> None:
    """It stayed f32 after a product in bf16."""
    text = """
        dist.mesh @m <a = 2>
        func.func @f(%x: tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>) -> tensor<4x4xf32> {
          %y = nn.matmul %x, %x : (tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>,
            tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>)
            -> tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>
          %z = dist.redistribute %y : (tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>)
            -> tensor<4x4xf32, #dist.layout<@m, [{}, {}]>>
          %r = nn.relu %z : (tensor<4x4xf32, #dist.layout<@m, [{}, {}]>>) -> tensor<4x4xf32>
          func.return %r : tensor<4x4xf32>
        }"""
    after = shardir.compile(text, f"mixed-precision,{pipeline}").text
    assert "nn.convert %x" in after
    assert "nn.convert %r" in after
    assert after.count("nn.convert") == 2
