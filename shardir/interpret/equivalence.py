"""`--check-equivalence`: a function means the same before and after a pass.

Each function that both modules have, with the same global types, is run on the same random inputs
by the interpreters of both views, and the results are compared. A function that the pass made by
differentiation is held against difference quotients of the one that it was made of.
"""

from typing import Any

import numpy as np
from xdsl.dialects.builtin import IntegerType, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp

from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.train import GradientOp, InitAttr, Role, StepOp, arguments, updated_keys
from shardir.interpret.evaluator import global_type, run
from shardir.interpret.values import Array, for_differences, rounded

TOLERANCE = {"f64": 1e-9, "f32": 1e-4, "f16": 1e-2, "bf16": 4e-2}
"""By the coarsest float type on the way, relative to the largest element of the result; sums are
taken in another order on more ranks."""

LEAST = 1e-2
"""What counts as the largest element where all are smaller: sums of numbers of about 1 that cancel
have no better precision than those."""


class NotEquivalentError(ShardirError):
    """A pass changed what a function computes."""


def random_arguments(f: FuncOp, module: ModuleOp, seed: int = 0) -> list[Array]:
    """Random values for a function's arguments: standard normal; integers within what
    `train.input` says, else 0 or 1; states positive, as means of squares are."""
    rng = np.random.default_rng(seed)
    meshes = dist.meshes_of(module)
    out = []
    for t, argument in zip(f.function_type.inputs, arguments(f), strict=True):
        whole = global_type(t, meshes)
        shape = whole.get_shape()
        if isinstance(whole.element_type, IntegerType):
            low, high = 0, 2
            init = argument.init
            if isinstance(init, InitAttr) and init.kind == "integers":
                low, high = init.values["low"], init.values["high"]
            value: Any = rng.integers(low, max(high, low + 1), shape)
        else:
            value = rng.standard_normal(shape)
        if argument.role is Role.STATE:
            value = np.abs(value)
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
    """Checks that the pass `name` kept what each function computes, and that the gradients that it
    made are gradients.

    Raises:
        NotEquivalentError: it did not.
    """
    old, new = functions(before), functions(after)
    try:
        for f in old:
            if f in new:
                _check_function(old[f], new[f], before, after)
        for op in before.body.ops:
            if isinstance(op, StepOp | GradientOp) and op.sym_name.data in new:
                _check_gradient(op, new[op.sym_name.data], before, after)
    except NotEquivalentError as e:
        raise NotEquivalentError(f"after {name}: {e}") from None


def _check_function(old: FuncOp, new: FuncOp, before: ModuleOp, after: ModuleOp) -> None:
    f = old.sym_name.data
    types = signature(old, before)
    if types != signature(new, after):
        raise NotEquivalentError(f"@{f} has another signature afterwards")
    arguments = random_arguments(old, before)
    a, b = run(before, f, arguments), run(after, f, arguments)
    outs = types[len(arguments) :]
    within = {*_elements(old), *_elements(new)}
    for i, (x, y, t) in enumerate(zip(a, b, outs, strict=True)):
        on_the_way = {*within, str(t.element_type)}
        compare(f, i, x, y, next(e for e in reversed(TOLERANCE) if e in on_the_way or e == "f64"))


def _elements(f: FuncOp) -> set[str]:
    """The element types of a function's values that are narrower than f32."""
    types = (v.type for op in f.body.block.ops for v in op.results)
    names = {str(t.element_type) for t in types if isinstance(t, TensorType)}
    return names & {"f16", "bf16"}


STEP, AGREEMENT = 1e-5, 1e-4
"""Of difference quotients in double precision; relative to the sizes of what is added up."""


def _check_gradient(
    request: StepOp | GradientOp, new: FuncOp, before: ModuleOp, after: ModuleOp
) -> None:
    """What was made of a function returns its results; and its slope in a random direction, by
    central differences, is what the gradients say."""
    if isinstance(request, StepOp) and request.microbatches > 1:
        return  # it runs the function several times, on inputs that the function does not have
    name, made = request.function.root_reference.data, new.sym_name.data
    if name not in functions(before):  # itself a gradient, which the pass made too
        before = after
    f = functions(before)[name]
    with for_differences():
        arguments = random_arguments(f, before)
        everything = [*arguments, *random_arguments(new, after, seed=1)[len(arguments) :]]
        expected, found = run(before, name, arguments), run(after, made, everything)
        for i, (x, y) in enumerate(zip(expected, found, strict=False)):
            compare(made, i, x, y, "f32")
        gradients = _gradients(request, new, everything, found, len(expected))
        if gradients is None:
            return
        rng = np.random.default_rng(2)
        direction = {i: rng.standard_normal(g.shape) for i, g in gradients.items()}
        cotangents = _cotangents(request, f, expected, everything[len(arguments) :])

        def value(step: float) -> float:
            moved = [
                a + step * direction[i] if i in direction else a for i, a in enumerate(arguments)
            ]
            pairs = zip(run(before, name, moved), cotangents, strict=True)
            return sum(float(np.sum(y * c)) for y, c in pairs if c is not None)

        slope = (value(STEP) - value(-STEP)) / (2 * STEP)
    said = sum(float(np.sum(g * direction[i])) for i, g in gradients.items())
    size = sum(float(np.sum(np.abs(g * direction[i]))) for i, g in gradients.items())
    if not abs(said - slope) <= AGREEMENT * max(size, abs(slope), LEAST):
        raise NotEquivalentError(
            f"the gradients of @{made} say that @{name} changes by {said:.6g} in a random "
            f"direction; it changes by {slope:.6g}"
        )


def _cotangents(
    request: StepOp | GradientOp, f: FuncOp, results: list[Array], given: list[Array]
) -> list[Array | None]:
    """What each result of `f` is weighted with: 1 where it is a scalar, what is given otherwise.
    What a step updates is no part of its loss."""
    rest = iter(given)
    out: list[Array | None] = []
    for y, updated in zip(results, updated_keys(f), strict=True):
        is_update = isinstance(request, StepOp) and updated is not None
        if y.dtype.kind != "f" or is_update:
            out.append(None)
        else:
            out.append(np.ones(()) if y.ndim == 0 else next(rest))
    return out


FIRST_MOMENTS = {"momentum": "momentum", "nesterov": "momentum", "adam": "exp_avg",
                 "adamw": "exp_avg", "lamb": "exp_avg"}  # fmt: skip
"""The state of an optimizer that a gradient is added to."""


def _gradients(
    request: StepOp | GradientOp, new: FuncOp, given: list[Array], found: list[Array], results: int
) -> dict[int, Array] | None:
    """The gradient of each argument, by its number; a step's from what it made of parameters and
    states. None where they do not say."""
    if isinstance(request, GradientOp):
        return dict(zip(request.wrt.data, found[results:], strict=True))
    args = arguments(new)
    updated = dict(zip(updated_keys(new), found, strict=True))
    kind, numbers = request.optimizer.kind, request.optimizer.values
    moment = FIRST_MOMENTS.get(kind)
    unsharded_type = kind == "sgd" and isinstance(numbers["lr"], float)
    if request.clip is not None or not (unsharded_type or moment):
        return None
    out = {}
    for i, a in enumerate(args):
        if a.role is not Role.PARAMETER:
            continue
        w, state = given[i], f"{a.key}.{moment}"
        decay = a.weight_decay(numbers["weight_decay"])
        if moment is None:
            rate = numbers["lr"] * a.lr_scale
            if rate == 0:
                return None
            unused = np.array_equal(updated[a.key], w)
            out[i] = np.zeros_like(w) if unused else (w - updated[a.key]) / rate - decay * w
        elif state not in updated:  # nothing depends on the parameter
            out[i] = np.zeros_like(w)
        else:
            mean = "beta1" in numbers
            kept = numbers["beta1"] if mean else numbers["momentum"]
            total = updated[state] - kept * given[[b.key for b in args].index(state)]
            total = total / (1 - kept) if mean else total
            out[i] = total - (0.0 if kind in ("adamw", "lamb") else decay) * w
    return out
