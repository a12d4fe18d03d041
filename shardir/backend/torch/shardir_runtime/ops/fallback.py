"""Ops of ATen that the compiler does not know: each device computes the whole op, and
torch.autograd its gradient."""

from typing import Any

import torch
from torch import Tensor

from ..compat import schema_of


def call(
    *operands: Tensor, op: str, tensors: tuple[str, ...], **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """Return the results of an op, `special_zeta.default`. `tensors` has the argument of each
    operand, by its name in the op's schema; of a list of tensors the name is repeated."""
    with torch.no_grad():
        return _call(operands, op, tensors, options)


def backward(
    *values: Tensor, op: str, tensors: tuple[str, ...], **options: Any
) -> Tensor | tuple[Tensor, ...]:
    """Return the cotangents of floating-point operands, from the operands, the results, and the
    cotangents of floating-point results."""
    operands = [x.detach().requires_grad_(x.is_floating_point()) for x in values[: len(tensors)]]
    with torch.enable_grad():
        found = _call(operands, op, tensors, options)
    results = [
        r for r in (found if isinstance(found, tuple) else (found,)) if r.is_floating_point()
    ]
    cotangents = values[len(values) - len(results) :]
    pairs = [(r, d) for r, d in zip(results, cotangents, strict=True) if r.requires_grad]
    inputs = [x for x in operands if x.requires_grad]
    if not pairs:
        return _unpack_single(tuple(torch.zeros_like(x) for x in inputs))
    outputs, given = zip(*pairs, strict=True)
    return _unpack_single(torch.autograd.grad(outputs, inputs, given, allow_unused=True,
                                    materialize_grads=True))  # fmt: skip


def _call(operands: Any, op: str, tensors: tuple[str, ...], options: dict[str, Any]) -> Any:
    packet, _, overload = op.partition(".")
    target = getattr(getattr(torch.ops.aten, packet), overload)
    arguments: dict[str, Any] = {}
    for argument in schema_of(target).arguments:
        name = argument.name
        given = [x for x, n in zip(operands, tensors, strict=True) if n == name]
        is_list = str(argument.type).startswith("List")
        if given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = [x.clone() for x in given]
            arguments[name] = given if is_list else given[0]
        elif name in options:
            value = options[name]
            if isinstance(value, str) and value.startswith("torch."):
                value = getattr(torch, value[6:])
            arguments[name] = list(value) if is_list else value
        elif not argument.has_default_value():
            arguments[name] = None
    found = target(**arguments)
    return _unpack_single(tuple(found)) if isinstance(found, tuple | list) else found


def _unpack_single(found: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    """Return a single result as such."""
    return found[0] if len(found) == 1 else found
