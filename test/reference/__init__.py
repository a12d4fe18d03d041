"""The independent answer: torch on one device, op by op, in double precision."""

from collections.abc import Sequence

import torch
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from reference import arrays, layers, updates
from reference.common import Reference, shape_of, to_torch

__all__ = ["TORCH", "shape_of", "to_torch", "torch_forward"]

TORCH: dict[type[Operation], Reference] = {**arrays.TORCH, **layers.TORCH, **updates.TORCH}


def torch_forward(f: FuncOp, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The results of a plain function, by torch."""
    env: dict[SSAValue, torch.Tensor] = dict(zip(f.body.block.args, arguments, strict=True))
    for op in f.body.block.ops:
        inputs = [env[v] for v in op.operands]
        if isinstance(op, ReturnOp):
            return inputs
        out = TORCH[type(op)](op, *inputs)
        env.update(zip(op.results, out if isinstance(out, tuple) else (out,), strict=True))
    raise AssertionError("a function returns")
