"""Ops that have neither an entry in the table nor a decomposition: by torch's own kernel.

    %y = nn.custom "aten.special_zeta.default"(%x, %s) with {op = "special_zeta.default", ...}

Each device computes all of such an op; torch.autograd has its gradient
(backend/torch/shardir_runtime/ops/fallback.py). Half precision is computed in f32.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shardir.backend.torch.emit.imports import MODULES
from shardir.backend.torch.shardir_runtime.ops import fallback
from shardir.build import Value
from shardir.build.attributes import properties
from shardir.compat.torch import OpOverload, schema_of
from shardir.diagnostics import ShardirError
from shardir.dialects import nn
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.custom import is_dotted_name, register_custom_op
from shardir.frontends.torch.dtypes import dtype_name
from shardir.frontends.torch.names import place_of
from shardir.frontends.torch.translation import Translation

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32,
          torch.bool)  # fmt: skip
HALF = ("bf16", "f16")

OF_MEMORY = ("as_strided", "as_strided_copy", "as_strided_scatter")
"""The ops of positions in memory, where a program has tensors in an order of its own."""

UNUSED = ("device", "layout", "pin_memory", "memory_format", "non_blocking")
"""Arguments that say where a tensor is, not its values."""


def call_torch_op(t: Translation, args: Any, kwargs: Any) -> Any:
    """Return the results of a node by torch's own op, with arguments `args` and `kwargs`;
    NotImplemented if results are random, dynamic or no tensors, or if a program cannot hold its
    arguments or dtypes.

    Raises:
        ShardirError: the op reads memory in an order that a program does not have.
    """
    target = t.node.target
    assert isinstance(target, OpOverload)
    if (name := schema_of(target).name.removeprefix("aten::")) in OF_MEMORY:
        raise ShardirError(
            f"expected {name} of a contiguous tensor, got one of the strides "
            f"{[*t.argument(0).stride()]}{place_of(t.node)}; use x.contiguous() first, and do not "
            "write to it through a transposed view"
        )
    example = t.node.meta.get("val")
    several = example if isinstance(example, tuple | list) else [example]
    results = [x for x in several if isinstance(x, torch.Tensor)]
    examples = [*results, *(n.meta.get("val") for n in t.node.all_input_nodes)]
    if (
        target.namespace != "aten"
        or torch.Tag.nondeterministic_seeded in target.tags
        or len(results) < len(several)
        or not all(isinstance(n, int) for x in results for n in x.shape)
        or any(isinstance(x, torch.Tensor) and x.dtype not in DTYPES for x in examples)
    ):
        return NotImplemented
    schema = [a.name for a in schema_of(target).arguments]
    arguments = dict(zip(schema, args, strict=False)) | kwargs
    operands: list[Value] = []
    tensors: list[str] = []
    options: dict[str, Any] = {}
    for name, value in arguments.items():
        parts = value if isinstance(value, tuple | list) else [value]
        if any(isinstance(x, Value) for x in parts):
            if not all(isinstance(x, Value) for x in parts):
                return NotImplemented
            operands += parts
            tensors += [name] * len(parts)
        elif value is not None and name not in UNUSED:
            if not is_dotted_name(name) or not all(map(_is_option, parts)):
                return NotImplemented
            options[name] = str(value) if isinstance(value, torch.dtype) else value
    op = str(target).partition(".")[2]
    options |= {"op": op, "tensors": tensors}
    _register(op)
    types = [(tuple(r.shape), dtype_name(r.dtype)) for r in results]
    custom_op = t.function.op(
        nn.CustomOp,
        [v.to("f32") if v.dtype in HALF else v for v in operands],
        properties(nn.CustomOp, {"callee": f"aten.{op}", "options": options}),
        results=[(shape, "f32" if dtype in HALF else dtype) for shape, dtype in types],
    )
    values = tuple(v.to(dtype) if dtype in HALF else v
                   for v, (_, dtype) in zip(custom_op, types, strict=True))  # fmt: skip
    return values if isinstance(example, tuple | list) else values[0]


def _is_option(x: Any) -> bool:
    return isinstance(x, int | float | str | torch.dtype)


def _register(op: str) -> None:
    """Register the custom ops of an op of ATen and of its gradient."""
    call, backward = f"aten.{op}", f"aten_backward.{op}"
    register_custom_op(call, torch=f"{MODULES['fallback']}:call", gradient=backward,
                       evaluate=_on_arrays(fallback.call))  # fmt: skip
    register_custom_op(backward, torch=f"{MODULES['fallback']}:backward",
                       evaluate=_on_arrays(fallback.backward))  # fmt: skip


def _on_arrays(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of tensors as one of arrays."""

    def evaluate(*arrays: Array, **options: Any) -> Any:
        results = function(*(torch.from_numpy(np.array(a)) for a in arrays), **options)
        return tuple(x.numpy() for x in (results if isinstance(results, tuple) else (results,)))

    return evaluate
