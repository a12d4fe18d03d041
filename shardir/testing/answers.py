"""The independent answer to what a program computes: references of its ops, in numpy or torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.dialects.nn.base import Array
from shardir.testing.programs import function

Reference = Callable[..., Any]
"""What an op computes: a function of the op and its operands that returns its result, or a tuple of
several. It gets arrays of numpy, floats in double precision; `by_torch` marks one of tensors."""

Answer = Callable[[ModuleOp, Sequence[Array], Sequence[int], Sequence[Array]], list[Array]]
"""A function of a program, its arguments, the arguments to differentiate by, and the cotangents of
float results other than scalars, whose cotangent is 1. It returns the results of @f, and the
gradients."""

STEP = 1e-5
"""The step of difference quotients, relative to 1."""

QUOTIENT_ERROR = 1e-6
"""The error of a difference quotient, relative to the largest element of a gradient, or to 1."""


@dataclass(frozen=True)
class by_torch:  # noqa: N801 - used as a decorator
    """Marks a reference that takes and returns tensors of torch, in double precision. The expected
    gradients are those of torch, else difference quotients, of which 6 digits are compared."""

    reference: Reference

    def __call__(self, op: Operation, *operands: Any) -> Any:
        return self.reference(op, *operands)


def results_of(
    f: FuncOp, arguments: Sequence[Any], references: Mapping[type[Operation], Reference]
) -> list[Any]:
    """Return the results of a plain function, op by op."""
    env: dict[SSAValue, Any] = dict(zip(f.body.block.args, arguments, strict=True))
    for op in f.body.block.ops:
        operands = [env[v] for v in op.operands]
        if isinstance(op, ReturnOp):
            return operands
        out = references[type(op)](op, *operands)
        env.update(zip(op.results, out if isinstance(out, tuple | list) else (out,), strict=True))
    raise AssertionError("a function returns")


def wide(array: Array) -> Array:
    """Return an array with its floats in double precision."""
    return array.astype(np.float64) if array.dtype.kind == "f" else array


# ---- numpy ----


def numpy_answer(references: Mapping[type[Operation], Reference]) -> Answer:
    """Return the answer of references in numpy. Gradients are central difference quotients."""

    def answer(
        module: ModuleOp, arguments: Sequence[Array], wrt: Sequence[int],
        cotangents: Sequence[Array],
    ) -> list[Array]:  # fmt: skip
        f, values = function(module, "f"), [wide(a) for a in arguments]

        def results() -> list[Array]:
            return [np.asarray(y) for y in results_of(f, values, references)]

        def total() -> float:
            given = iter(cotangents)
            floats = (y for y in results() if y.dtype.kind == "f")
            return sum(float((y * wide(next(given))).sum() if y.ndim else y) for y in floats)

        out = results()
        for i in wrt:
            x, gradient = values[i], np.zeros(values[i].shape)
            values[i] = moved = x.copy()
            for at in np.ndindex(x.shape):
                moved[at] = x[at] + STEP
                above = total()
                moved[at] = x[at] - STEP
                gradient[at] = (above - total()) / (2 * STEP)
                moved[at] = x[at]
            out.append(gradient)
        return out

    return answer


# ---- torch ----


def to_torch(array: Array) -> Any:
    """Return the array as a tensor in double precision."""
    import torch

    return torch.tensor(wide(array))


def torch_answer(references: Mapping[type[Operation], Reference]) -> Answer:
    """Return the answer of references in torch. Gradients are those of its autograd."""
    import torch

    def answer(
        module: ModuleOp, arguments: Sequence[Array], wrt: Sequence[int],
        cotangents: Sequence[Array],
    ) -> list[Array]:  # fmt: skip
        leaves = [to_torch(a) for a in arguments]
        for i in wrt:
            leaves[i].requires_grad_()
        results = results_of(function(module, "f"), leaves, references)
        given = iter(cotangents)
        total = torch.zeros((), dtype=torch.float64)
        for y in results if wrt else ():
            if y.dtype.is_floating_point:
                dy = to_torch(next(given)) if y.ndim else torch.ones((), dtype=torch.float64)
                total = total + (y * dy).sum()
        if total.requires_grad:
            found = torch.autograd.grad(total, [leaves[i] for i in wrt], allow_unused=True)
        else:
            found = [None] * len(wrt)
        gradients = [
            torch.zeros_like(leaves[i]) if d is None else d for i, d in zip(wrt, found, strict=True)
        ]
        return [t.detach().numpy() for t in (*results, *gradients)]

    return answer
