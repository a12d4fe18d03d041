"""The independent answer: torch on one device, for each op beside its samples in op_cases."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from xdsl.dialects import builtin
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import unsharded_type

Reference = Callable[..., Any]


def to_torch(array: Array) -> torch.Tensor:
    """The array in double precision."""
    return torch.tensor(array.astype(np.float64) if array.dtype.kind == "f" else array)


def by_autograd(f: Reference, inputs: Sequence[torch.Tensor], dy: torch.Tensor) -> Any:
    """The cotangents of the inputs."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(f(*leaves), leaves, dy)


def dtype_of(v: SSAValue) -> torch.dtype:
    """The type in which torch computes: an integer type, or double precision."""
    element = unsharded_type(v).element_type
    if isinstance(element, builtin.IntegerType):
        return {1: torch.bool, 32: torch.int32, 64: torch.int64}[element.width.data]
    return torch.float64


def shape_of(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()


def torch_forward(f: FuncOp, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a plain function, by torch, op by op in double precision."""
    from op_cases import REFERENCES  # which need what is above

    env: dict[SSAValue, torch.Tensor] = dict(zip(f.body.block.args, arguments, strict=True))
    for op in f.body.block.ops:
        inputs = [env[v] for v in op.operands]
        if isinstance(op, ReturnOp):
            return inputs
        out = REFERENCES[type(op)](op, *inputs)
        env.update(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
    raise AssertionError("a function returns")
