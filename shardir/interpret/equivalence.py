"""`--check-equivalence`: a function means the same before and after a pass.

Each function that both modules have, with the same global types, is run on the same random inputs
by the interpreters of both views, and the results are compared.
"""

from typing import Any

import numpy as np
from xdsl.dialects.builtin import IntegerType, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp

from shardir.algebra.errors import ShardirError
from shardir.dialects import dist
from shardir.interpret.evaluator import global_type, run
from shardir.interpret.values import Array, rounded

TOLERANCE = {"f64": 1e-9, "f32": 1e-4, "bf16": 4e-2, "f16": 1e-2}
"""Relative to the largest element of the result; sums are taken in another order on more ranks."""

LEAST = 1e-2
"""What counts as the largest element where all are smaller: sums of numbers of about 1 that cancel
have no better precision than those."""


class NotEquivalentError(ShardirError):
    """A pass changed what a function computes."""


def random_arguments(f: FuncOp, module: ModuleOp, seed: int = 0) -> list[Array]:
    """Random values for a function's arguments: standard normal; integers within what
    `train.input` says, else 0 or 1."""
    from shardir.dialects.train import InitAttr, arg_attrs

    rng = np.random.default_rng(seed)
    meshes = dist.meshes_of(module)
    out = []
    for t, attrs in zip(f.function_type.inputs, arg_attrs(f), strict=True):
        whole = global_type(t, meshes)
        shape = whole.get_shape()
        if isinstance(whole.element_type, IntegerType):
            low, high = 0, 2
            init = attrs.get("train.input")
            if isinstance(init, InitAttr) and init.kind == "integers":
                low, high = init.values["low"], init.values["high"]
            value: Any = rng.integers(low, max(high, low + 1), shape)
        else:
            value = rng.standard_normal(shape)
        out.append(rounded(value, whole.element_type))
    return out


def functions(module: ModuleOp) -> dict[str, FuncOp]:
    """The functions with a body, by name."""
    return {
        op.sym_name.data: op for op in module.body.ops if isinstance(op, FuncOp) and op.body.blocks
    }


def signature(f: FuncOp, module: ModuleOp) -> list[TensorType]:
    """The global types of a function's arguments and results."""
    types = (*f.function_type.inputs, *f.function_type.outputs)
    return [global_type(t, dist.meshes_of(module)) for t in types]


def compare(name: str, i: int, before: Array, after: Array, element: str) -> None:
    """Raises NotEquivalentError when two results differ by more than their type's precision."""
    if before.shape != after.shape:
        raise NotEquivalentError(
            f"result {i} of @{name} has shape {list(after.shape)}, before {list(before.shape)}"
        )
    if before.dtype.kind != "f":
        if not np.array_equal(before, after):
            raise NotEquivalentError(f"result {i} of @{name} differs")
        return
    scale = max(LEAST, float(np.max(np.abs(before), initial=0, where=np.isfinite(before))))
    close = np.isclose(
        before, after, rtol=0, atol=TOLERANCE.get(element, 1e-4) * scale, equal_nan=True
    )
    if not close.all():
        at = tuple(int(k) for k in np.argwhere(~close)[0])
        raise NotEquivalentError(
            f"result {i} of @{name} differs at {list(at)}: "
            f"{before[at]:.6g} before, {after[at]:.6g} after"
        )


def check_pass(before: ModuleOp, after: ModuleOp, name: str) -> None:
    """Raises NotEquivalentError when the pass `name` changed what a function computes."""
    old, new = functions(before), functions(after)
    for f in old:
        if f not in new:
            continue
        signatures = [signature(old[f], before), signature(new[f], after)]
        if signatures[0] != signatures[1]:
            raise NotEquivalentError(f"{name}: @{f} has another signature afterwards")
        arguments = random_arguments(old[f], before)
        a, b = run(before, f, arguments), run(after, f, arguments)
        outs = signatures[0][len(arguments) :]
        for i, (x, y, t) in enumerate(zip(a, b, outs, strict=True)):
            try:
                compare(f, i, x, y, str(t.element_type))
            except NotEquivalentError as e:
                raise NotEquivalentError(f"after {name}: {e}") from None
