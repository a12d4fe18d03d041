"""The independent answer: torch on one device, for each op beside its samples in op_cases."""

from collections.abc import Sequence
from typing import Any

import torch
from xdsl.dialects import builtin
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import unsharded_type
from shardir.testing.answers import Reference, results_of, to_torch, torch_answer
from shardir.testing.programs import shape_of

__all__ = [
    "Reference",
    "by_autograd",
    "dtype_of",
    "shape_of",
    "to_torch",
    "torch_forward",
    "torch_gradient",
]


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


def torch_forward(f: FuncOp, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a plain function, by torch, op by op in double precision."""
    from op_cases import REFERENCES  # which need what is above

    return results_of(f, arguments, REFERENCES)


def torch_gradient(
    module: ModuleOp, arguments: Sequence[Array], wrt: Sequence[int], cotangents: Sequence[Array]
) -> list[Array]:
    """Return torch's results of @f and its gradients with respect to `wrt`. `cotangents` are those
    of the float results, except of scalars, whose cotangent is 1."""
    from op_cases import REFERENCES

    return torch_answer(REFERENCES)(module, arguments, wrt, cotangents)
