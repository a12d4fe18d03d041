"""`--check-equivalence`: checks that a pass does not change the results of functions.

Each function of both modules runs on the same random inputs, before and after the pass. Gradients
that the pass has derived are compared with difference quotients of the source function.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from xdsl.dialects.builtin import IntegerType, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp

from shardir.diagnostics import ShardirError
from shardir.dialects import dist
from shardir.dialects.nn.base import Array
from shardir.dialects.train import (
    ForwardOp,
    GradientOp,
    InitAttr,
    Request,
    Role,
    StepOp,
    arguments,
    gradient_arguments,
    metric_names,
    updated_arguments,
    updated_keys,
)
from shardir.interpret.evaluator import global_type, is_local_function, run
from shardir.interpret.over_tokens import MicrobatchFunction
from shardir.interpret.values import (
    for_differences,
    numbered_run,
    round_to_element,
    value_of_first_run,
)

T = TypeVar("T")

TOLERANCE = {"f64": 1e-9, "f32": 1e-4, "f16": 1e-2, "bf16": 4e-2}
"""The maximum difference relative to the largest element of the result, by the narrowest float type
of the function: several ranks add in another order."""

MIN_SCALE = 1e-2
"""The minimum size to which differences are relative: a sum of values of about 1 that cancel has
their rounding errors."""


class NotEquivalentError(ShardirError):
    """A pass changed what a function computes."""


def random_arguments(f: FuncOp, module: ModuleOp, seed: int = 0) -> list[Array]:
    """Return random global values for a function's arguments: floats standard normal, integers
    within the range of `train.input`, else 0 or 1, and states positive, like means of squares."""
    rng = np.random.default_rng(seed)
    meshes = dist.meshes_of(module)
    out = []
    for t, argument in zip(f.function_type.inputs, arguments(f), strict=True):
        type = global_type(t, meshes)
        shape = type.get_shape()
        if isinstance(type.element_type, IntegerType):
            low, high = 0, 2
            init = argument.init
            if isinstance(init, InitAttr) and init.kind == "integers":
                low, high = init.values["low"], init.values["high"]
            value: Any = rng.integers(low, max(high, low + 1), shape)
        else:
            value = rng.standard_normal(shape)
        if argument.role is Role.STATE:
            value = np.abs(value)
        out.append(round_to_element(value, type.element_type))
    return out


def functions(module: ModuleOp) -> dict[str, FuncOp]:
    """Return the functions with bodies, by name."""
    return {
        op.sym_name.data: op for op in module.body.ops if isinstance(op, FuncOp) and op.body.blocks
    }


def signature(f: FuncOp, module: ModuleOp) -> list[TensorType]:
    """Return the global types of a function's arguments and results."""
    types = (*f.function_type.inputs, *f.function_type.outputs)
    return [global_type(t, dist.meshes_of(module)) for t in types]


def compare(name: str, i: int, before: Array, after: Array, element: str) -> None:
    """Raise NotEquivalentError where two results differ by more than the tolerance of `element`."""
    if before.shape != after.shape:
        raise NotEquivalentError(
            f"expected result {i} of @{name} of shape {list(before.shape)}, got {list(after.shape)}"
        )
    if before.dtype.kind == "f":
        scale = max(MIN_SCALE, float(np.max(np.abs(before), initial=0, where=np.isfinite(before))))
        limit = TOLERANCE.get(element, 1e-4) * scale
        close = np.isclose(before, after, rtol=0, atol=limit, equal_nan=True)
    else:
        close = before == after
    if not close.all():
        at = tuple(int(k) for k in np.argwhere(~close)[0])
        raise NotEquivalentError(
            f"expected {before[at]:.6g} in result {i} of @{name} at {list(at)}, got {after[at]:.6g}"
        )


def check_pass(before: ModuleOp, after: ModuleOp, name: str) -> None:
    """Check that functions have the same results after the pass `name`, and check the gradients
    that it has derived.

    Raises:
        NotEquivalentError: a result or a gradient differs.
    """
    old, new = functions(before), functions(after)
    try:
        for f in old:
            if f in new:
                _check_function(old[f], new[f], before, after)
        for op in before.body.ops:
            if isinstance(op, Request) and op.sym_name.data in new:
                _check_request(op, new[op.sym_name.data], before, after)
    except NotEquivalentError as e:
        raise NotEquivalentError(f"after {name}: {e}") from None


def _check_function(old: FuncOp, new: FuncOp, before: ModuleOp, after: ModuleOp) -> None:
    f = old.sym_name.data
    types = signature(old, before)
    if types != signature(new, after):
        raise NotEquivalentError(f"expected @{f} with its types, got another signature")
    arguments = random_arguments(old, before)
    a, b = run(before, f, arguments), run(after, f, arguments)
    outs = types[len(arguments) :]
    narrow = {*_narrow_elements(old), *_narrow_elements(new)}
    for i, (x, y, t) in enumerate(zip(a, b, outs, strict=True)):
        elements = {*narrow, str(t.element_type)}
        compare(f, i, x, y, next(e for e in reversed(TOLERANCE) if e in elements or e == "f64"))


def _narrow_elements(f: FuncOp) -> set[str]:
    """Return f16 and bf16 if a value of the function has them."""
    types = (v.type for op in f.body.block.ops for v in op.results)
    names = {str(t.element_type) for t in types if isinstance(t, TensorType)}
    return names & {"f16", "bf16"}


STEP = 1e-5
"""The step of difference quotients, in double precision."""

SLOPE_TOLERANCE = 1e-4
"""The maximum difference between a slope and its difference quotient, relative to the sum of the
absolute values of the slope's terms."""


def _check_request(request: Request, new: FuncOp, before: ModuleOp, after: ModuleOp) -> None:
    """Check that the derived function returns the results of its source. Where it has gradients,
    compare their slope in a random direction with central differences of the source."""
    name, derived = request.function.root_reference.data, new.sym_name.data
    if name not in functions(before):  # the pass has made the source too: it is a gradient
        before = after
    f = functions(before)[name]
    accumulate = None if isinstance(request, GradientOp) else request.accumulate
    if accumulate is not None and accumulate.kind == "tokens" and is_local_function(f):
        return  # shards of all microbatches are not evaluated together
    with for_differences():
        count = len(f.function_type.inputs)
        arguments = random_arguments(new, after)[:count]
        all_arguments = [*arguments, *random_arguments(new, after, seed=1)[count:]]
        expected = _run_source(request, f, before, arguments)
        results = run(after, derived, all_arguments)
        for i, (x, y) in enumerate(zip(expected, results, strict=False)):
            compare(derived, i, x, y, "f32")
        if isinstance(request, ForwardOp):
            return
        gradients = _gradients(request, f, new, all_arguments, results, len(expected))
        if gradients is None:
            return
        rng = np.random.default_rng(2)
        direction = {i: rng.standard_normal(g.shape) for i, g in gradients.items()}
        cotangents = _cotangents(request, f, expected, all_arguments[len(arguments) :])

        def value(step: float) -> float:
            moved = [
                a + step * direction[i] if i in direction else a for i, a in enumerate(arguments)
            ]
            pairs = zip(_run_source(request, f, before, moved), cotangents, strict=True)
            return sum(float(np.sum(y * c)) for y, c in pairs if c is not None)

        slope = (value(STEP) - value(-STEP)) / (2 * STEP)
    predicted = sum(float(np.sum(g * direction[i])) for i, g in gradients.items())
    size = sum(float(np.sum(np.abs(g * direction[i]))) for i, g in gradients.items())
    if not abs(predicted - slope) <= SLOPE_TOLERANCE * max(size, abs(slope), MIN_SCALE):
        raise NotEquivalentError(
            f"expected gradients of @{derived} with the slope {slope:.6g} of @{name} in a random "
            f"direction, got {predicted:.6g}"
        )


def _run_source(request: Request, f: FuncOp, module: ModuleOp, values: list[Array]) -> list[Array]:
    """Run the source function, and return its results except gradients.

    A step over several microbatches has the sum or the mean of their losses, the mean of their
    metrics, and the states after the last microbatch.
    """
    name = f.sym_name.data
    if isinstance(request, ForwardOp):
        return _run_forward(request, f, module, values)
    if not isinstance(request, StepOp):
        return run(module, name, values)
    if not request.is_loop:
        return _without_gradients(f, run(module, name, values))
    current, updated = list(values), _without_gradients(f, updated_arguments(f))
    roles = arguments(f)
    scalars: list[list[Array]] = [[] for _ in updated]
    microbatch = MicrobatchFunction(request, module)

    def inputs(k: int) -> list[Array]:
        return [x if a.is_retained else x[k] for x, a in zip(current, roles, strict=True)]

    microbatch.count(map(inputs, range(request.microbatches)))
    for k in range(request.microbatches):
        with numbered_run(k):
            results = _without_gradients(f, microbatch.run(inputs(k)))
        for i, y, terms in zip(updated, results, scalars, strict=True):
            if i is None:
                terms.append(y)
            else:  # no gradient goes through a state
                current[i] = value_of_first_run((k, i), y)
    is_mean = request.accumulate is not None and request.accumulate.averages
    metrics = _without_gradients(f, metric_names(f))
    totals = list[Array]()
    for i, terms, metric in zip(updated, scalars, metrics, strict=True):
        count = len(terms) if is_mean or metric is not None else 1
        totals.append(np.asarray(sum(terms) / count) if i is None else current[i])
    return totals


def _run_forward(
    request: ForwardOp, f: FuncOp, module: ModuleOp, values: list[Array]
) -> list[Array]:
    """Run all microbatches. Return the mean or the sum of float scalars, the last value of states,
    and all values of other results, stacked."""
    current, updated, roles = list(values), updated_arguments(f), arguments(f)
    results: list[list[Array]] = [[] for _ in updated]
    microbatch = MicrobatchFunction(request, module)

    def inputs(k: int) -> list[Array]:
        return [x if a.is_retained else x[k] for x, a in zip(current, roles, strict=True)]

    microbatch.count(map(inputs, range(request.microbatches)))
    for k in range(request.microbatches):
        for i, y, parts in zip(updated, microbatch.run(inputs(k)), results, strict=True):
            parts.append(y)
            if i is not None:
                current[i] = y
    out = list[Array]()
    for i, parts in zip(updated, results, strict=True):
        if i is not None:
            out.append(parts[-1])
        elif parts[0].shape or parts[0].dtype.kind != "f":
            out.append(np.stack(parts))
        else:
            total = np.asarray(sum(parts))
            out.append(total if request.sums else total / len(parts))
    return out


def _without_gradients(f: FuncOp, results: Sequence[T]) -> list[T]:
    """Return the entries of a list, one per result of `f`, for results other than gradients."""
    pairs = zip(results, gradient_arguments(f), strict=True)
    return [x for x, parameter in pairs if parameter is None]


def _cotangents(
    request: StepOp | GradientOp, f: FuncOp, results: list[Array], values: list[Array]
) -> list[Array | None]:
    """Return the cotangent of each result of `f`: 1 for a scalar, the next of `values` for a
    tensor, and None for a result without a cotangent: integers, metrics, and updates of a step."""
    cotangents = iter(values)
    out: list[Array | None] = []
    is_step = isinstance(request, StepOp)
    marks = list(zip(updated_keys(f), metric_names(f), strict=True))
    if is_step:
        marks = _without_gradients(f, marks)
    for y, (updated, metric) in zip(results, marks, strict=True):
        is_update = is_step and updated is not None
        if y.dtype.kind != "f" or is_update or metric is not None:
            out.append(None)
        else:
            out.append(np.ones(()) if y.ndim == 0 else next(cotangents))
    return out


FIRST_MOMENTS = {"momentum": "momentum", "nesterov": "momentum", "adam": "exp_avg",
                 "adamw": "exp_avg", "lamb": "exp_avg"}  # fmt: skip
"""The optimizer state that accumulates the gradient, by optimizer."""


def _gradients(
    request: StepOp | GradientOp, source: FuncOp, new: FuncOp, values: list[Array],
    results: list[Array], count: int,
) -> dict[int, Array] | None:  # fmt: skip
    """Return the gradients by argument index. The gradients of a step are computed from its new
    parameters and states; None where these do not determine them.

    Args:
        values, results: the arguments and the results of the derived function.
        count: the number of the source's results, which precede the gradients.
    """
    if isinstance(request, GradientOp):
        return dict(zip(request.wrt.data, results[count:], strict=True))
    args = arguments(new)
    updated = dict(zip(updated_keys(new), results, strict=True))
    kind, numbers = request.optimizer.kind, request.optimizer.values
    moment = FIRST_MOMENTS.get(kind)
    constant_rate = kind == "sgd" and isinstance(numbers["lr"], float)
    by_own = any(a.rule is not None or a.lr is not None for a in arguments(source))
    if (
        request.clip is not None
        or request.separate_update is not None
        or by_own
        or not (constant_rate or moment)
    ):
        return None
    out = {}
    for i, a in enumerate(args):
        if a.role is not Role.PARAMETER:
            continue
        w, state = values[i], request.keys.of_parameter(a.key or "", moment or "")
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
            factor = numbers["beta1"] if mean else numbers["momentum"]
            total = updated[state] - factor * values[[b.key for b in args].index(state)]
            total = total / (1 - factor) if mean else total
            out[i] = total - (0.0 if kind in ("adamw", "lamb") else decay) * w
    return out
