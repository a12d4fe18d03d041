"""Steps of a small regression, compiled and by torch on one device, for the tests of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import FloatAttr, ModuleOp, f64
from xdsl.ir import Attribute

from shardir.dialects import dist, nn, train
from shardir.dialects.builder import OpBuilder
from shardir.interpret import run
from support.harness import (
    MESH,
    Arg,
    Array,
    add_step,
    differs,
    function,
    laid_out,
    layout,
    numbers,
    program,
)
from support.reference import to_torch, torch_forward

Tensors = list[torch.Tensor]


def regression(b: OpBuilder, x: Any, y: Any, w: Any, c: Any, u: Any, s: Any) -> Any:
    """A matrix, a vector, three dimensions, and a scalar are trained."""
    h = b.value(nn.TanhOp, b.add(b.value(nn.MatmulOp, x, w), c))
    e = b.sub(b.mul(b.value(nn.MatmulOp, h, b.reshape(u, (6, 2))), s), y)
    return b.reduce(b.mul(e, e), "mean", [0, 1])


ARGS = [
    Arg("f64", (8, 4)), Arg("f64", (8, 2)), Arg("f64", (4, 6), "w"), Arg("f64", (6,), "c"),
    Arg("f64", (2, 3, 2), "u"), Arg("f64", (), "s"),
]  # fmt: skip
NAMES = [a.parameter for a in ARGS[2:]]
LAYOUTS: dict[str, list[str | None]] = {
    "data parallel": [None] * 6,
    "both": ["[{a}, {}]", None, "[{}, {b}]", None, None, None],
    "split weights": [None, None, "[{a, b}, {}]", "[{b}]", "[{}, {a}, {b}]", None],
    "uneven": [None, None, "[{}, {b, a}]", "[{a, b}]", "[{b}, {a}, {}]", None],
}
STATES = {"c": "[{a}]", "u": "[{b}, {}, {a}]"}
"""The annotated layouts of states, with the layouts "both"."""


def module_of(
    optimizer: str, texts: Sequence[str | None], own: dict[str, dict[str, float]] | None = None,
    args: Sequence[Arg] = ARGS, body: Any = regression, **options: Attribute,
) -> ModuleOp:  # fmt: skip
    """The step before the passes; `own` numbers of parameters, `options` of the step."""
    module = laid_out(program(args, body), MESH, [layout(t) if t else None for t in texts])
    f = function(module, "f")
    attrs = train.arg_attrs(f)
    for a in attrs:
        for name, x in (own or {}).get(train.Argument.of(a).key or "", {}).items():
            a[f"train.{name}"] = FloatAttr(x, f64)
        if texts is LAYOUTS["both"] and (key := train.Argument.of(a).key) in STATES:
            a["train.state_layout"] = dist.LayoutAttr(layout(STATES[key]))
    train.set_arg_attrs(f, attrs)
    module = add_step(module, optimizer)
    request = module.body.block.last_op
    assert isinstance(request, train.StepOp)
    request.properties.update(options)
    module.verify()
    return module


@dataclass
class Ours:
    """A compiled step with its parameters and states, by name."""

    module: ModuleOp
    values: dict[str, Array]

    def __post_init__(self) -> None:
        f = function(self.module, "step")
        self.keys = [a.key for a in train.arguments(f)]
        self.updates = train.updated_keys(f)
        for v, a in zip(f.body.block.args, train.arguments(f), strict=True):
            if a.role is train.Role.STATE:
                assert a.key is not None and isinstance(a.init, train.InitAttr)
                shape = dist.global_shape(v.type, MESH)
                self.values[a.key] = np.full(shape, a.init.values["value"])

    def step(self, inputs: Sequence[Array]) -> Array:
        """The loss; `inputs` in the order of the function's arguments."""
        left = iter(inputs)
        given = [next(left) if k is None else self.values[k] for k in self.keys]
        loss, *new = run(self.module, "step", given)
        for name, v in zip(self.updates[1:], new, strict=True):
            assert name is not None
            self.values[name] = v
        return loss


def loss_of(inputs: Sequence[Array], parameters: Tensors) -> torch.Tensor:
    (loss,) = torch_forward(
        function(program(ARGS, regression), "f"), [*map(to_torch, inputs), *parameters]
    )
    return loss


def compare(
    ours: Ours,
    parameters: Tensors,
    step: Callable[[list[Array]], torch.Tensor | float],
    steps: int = 20,
    microbatches: int = 1,
    spoil: Sequence[int] = (),
    factor: float = 100.0,
) -> None:
    """Steps of both, on the same inputs; those of the steps `spoil` are not finite."""
    rng = np.random.default_rng(0)
    for k in range(steps):
        inputs = [numbers(rng, a.element, a.shape) for _ in range(microbatches) for a in ARGS[:2]]
        if k in spoil:
            inputs[0][0, 0] = np.inf
        wanted = step(inputs)
        batches = [np.stack(inputs[i::2]) for i in range(2)]
        found = ours.step(inputs if microbatches == 1 else batches)
        if k not in spoil:
            assert not differs(found, np.asarray(float(wanted)), "f64", factor), f"loss of {k}"
        for name, p in zip(NAMES, parameters, strict=True):
            message = differs(ours.values[name], p.detach().numpy(), "f64", factor)
            assert not message, f"step {k}, {name}: {message}"


def start() -> tuple[dict[str, Array], Tensors]:
    """The parameters at first, for both."""
    rng = np.random.default_rng(1)
    values = {a.parameter: numbers(rng, a.element, a.shape) for a in ARGS[2:]}
    return values, [torch.nn.Parameter(to_torch(v)) for v in values.values()]


def by_torch(optimizer: Any, parameters: Tensors, schedule: Any = None) -> Any:
    def step(inputs: list[Array]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(inputs, parameters)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
        return loss.detach()

    return step
