"""Custom ops with a rule and without, whose functions are in kernels.py."""

import torch
from support import kernels
from support.harness import FLOATS
from support.reference import Reference
from xdsl.dialects import builtin
from xdsl.dialects.builtin import DictionaryAttr, IntegerAttr, StringAttr, i64
from xdsl.ir import Operation

import shardir
from op_cases.case import ALL, EVEN, ODD, Case
from shardir.dialects import nn
from shardir.dialects.nn.base import Props

shardir.register_custom_op(
    "test.mirror", torch="support.kernels:mirror", evaluate=kernels.mirror_np,
    rule="(i, j) -> (i, j) replicate j", gradient="test.mirror_grad",
)  # fmt: skip


shardir.register_custom_op(
    "test.mirror_grad", torch="support.kernels:mirror_grad", evaluate=kernels.mirror_grad_np,
    rule="(i, j), (i, j), (i, j) -> (i, j) replicate j",
)  # fmt: skip


shardir.register_custom_op(
    "test.square", torch="support.kernels:square", evaluate=kernels.square,
    gradient="test.square_grad",
)  # fmt: skip


shardir.register_custom_op(
    "test.square_grad", torch="support.kernels:square_grad", evaluate=kernels.square_grad
)


def named(name: str, **options: int) -> Props:
    props: Props = {"callee": StringAttr(name)}
    if options:
        attrs = {k: IntegerAttr(n, i64) for k, n in options.items()}
        props = {**props, "options": DictionaryAttr(attrs)}
    return props


CASES: list[Case] = [
    Case("mirror", nn.CustomOp, (ODD,), ALL, named("test.mirror"), ODD),
    Case("by", nn.CustomOp, (EVEN,), ("f64",), named("test.mirror", by=3), EVEN),
    Case("replicated", nn.CustomOp, (EVEN,), FLOATS, named("test.square"), EVEN),
]


def _custom(op: nn.CustomOp, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
    """The registrations of op_cases/custom.py."""
    given = op.options.data["by"] if op.options is not None else None
    by = given.value.data if isinstance(given, builtin.IntegerAttr) else 1
    match op.callee.data:
        case "test.mirror":
            return x[:, torch.arange(x.shape[1] - 1, -1, -1)] * by
        case "test.mirror_grad":
            return more[1][:, torch.arange(x.shape[1] - 1, -1, -1)] * by
        case "test.square":
            return x**2
        case name:
            assert name == "test.square_grad"
            return more[1] * (x + x)


REFERENCES: dict[type[Operation], Reference] = {
    nn.CustomOp: _custom,
}
