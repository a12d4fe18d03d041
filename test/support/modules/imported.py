"""The loss and the gradients of an imported module, in numpy and in torch."""

from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import torch
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.build import Module
from shardir.dialects.dist import meshes_of
from shardir.dialects.train import Role, arguments, updated_keys
from shardir.frontends.torch.capture import Capture, capture
from shardir.frontends.torch.importer import FUNCTION, KEY, Imported, import_model
from shardir.frontends.torch.weights import array_of
from shardir.interpret.evaluator import function, global_type, run


class Values(NamedTuple):
    """The loss, and the gradient of each parameter, by its name."""

    loss: Any
    gradients: dict[str, Any]


def imported(
    model: torch.nn.Module, inputs: Any, labels: Any = None, loss: Any = None,
    keywords: Mapping[str, Any] | None = None, mesh: str | None = None,
    derived: Collection[str] = (), cluster: str | None = None,
) -> Imported:  # fmt: skip
    """The module, with the request of its gradients by all parameters."""
    captured = capture(model, inputs, labels, loss, keywords=keywords, derived=derived)
    return with_gradients(captured, mesh, cluster)


def with_gradients(captured: Capture, mesh: str | None, cluster: str | None = None) -> Imported:
    """A captured module, with the request of its gradients by all parameters."""
    found = import_model(captured, Module(mesh, cluster))
    found.module.gradient("gradient", FUNCTION, trained(found))
    return found


def trained(found: Imported) -> list[int]:
    """The indices of the arguments that are parameters."""
    roles = arguments(found.function.func)
    return [i for i, a in enumerate(roles) if a.role is Role.PARAMETER]


def in_numpy(found: Imported, pipeline: str = "single-device", plan: str | None = None) -> Values:
    """The values that the compiled program computes, in the interpreter."""
    return values_of(found, shardir.compile(found.module, pipeline, plan=plan).module)


def values_of(found: Imported, module: ModuleOp) -> Values:
    """The values that a compiled program of the module computes, in the interpreter."""
    f, meshes = function(module, "gradient"), meshes_of(module)
    # the arguments of the function in their order, and then the cotangents of new states
    inputs = iter(found.inputs)
    tensors = [
        np.array(7) if a.key == KEY
        else array_of(found.values[a.key] if a.key else next(inputs)[1])
        for a in arguments(found.function.func)
    ]  # fmt: skip
    rest = f.body.block.args[len(tensors) :]
    given = [*tensors, *(np.zeros(global_type(a.type, meshes).get_shape()) for a in rest)]
    results = run(module, "gradient", given)
    roles = arguments(found.function.func)
    names = [roles[i].key or "" for i in trained(found)]
    return Values(results[0], dict(zip(names, results[len(results) - len(names) :], strict=True)))


def traced(
    model: torch.nn.Module, inputs: Any, labels: Any = None, loss: Any = None,
    keywords: Mapping[str, Any] | None = None, mesh: str | None = None,
) -> Imported:  # fmt: skip
    """The traced module, with a step whose momentum is the gradient."""
    captured = capture(model, inputs, labels, loss, keywords=keywords, trace=True)
    found = import_model(captured, Module(mesh))
    found.module.step("step", FUNCTION, "momentum, lr = 0.1, momentum = 0.9")
    return found


def traced_in_numpy(
    found: Imported, pipeline: str = "single-device", plan: str | None = None
) -> Values:
    """The values that a step computes, in the interpreter."""
    module = shardir.compile(found.module, pipeline, plan=plan).module
    f, meshes, inputs = function(module, "step"), meshes_of(module), iter(found.inputs)
    given: list[Any] = []
    for argument, t in zip(arguments(f), f.function_type.inputs, strict=True):
        if argument.key is None:
            given.append(array_of(next(inputs)[1]))
        elif argument.key in found.values:
            given.append(array_of(found.values[argument.key]))
        else:
            given.append(np.full(global_type(t, meshes).get_shape(), 7 * (argument.key == KEY)))
    results = dict(zip(updated_keys(f), run(module, "step", given), strict=True))
    names = [key for key in results if key is not None and key.endswith(".momentum")]
    return Values(results[None], {name.removesuffix(".momentum"): results[name] for name in names})


def in_torch(model: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> Values:
    """The values that torch computes on one device."""
    model = deepcopy(model)
    found = loss(model)
    found.backward()
    gradients = {
        name: array_of(torch.zeros_like(p) if p.grad is None else p.grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
    return Values(array_of(found), gradients)


def differences(found: Values, wanted: Values) -> dict[str, float]:
    """The difference of the loss, relative to it, and that of each gradient by its name, relative
    to its largest element; of one that is below a thousandth of the largest gradient, to that."""
    largest = max(np.abs(g).max(initial=0) for g in wanted.gradients.values())
    out = {"": float(abs(found.loss - wanted.loss) / abs(wanted.loss))}
    for name, gradient in found.gradients.items():
        want = wanted.gradients[name]
        scale = max(np.abs(want).max(initial=0), largest / 1000)
        out[name] = float(np.abs(gradient - want).max(initial=0) / scale)
    return out


def assert_equal(found: Values, wanted: Values, tolerance: float) -> None:
    """The loss and each gradient differ by at most `tolerance`."""
    for name, difference in differences(found, wanted).items():
        assert difference <= tolerance, name or "the loss"
