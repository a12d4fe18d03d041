"""Runs of docs/examples on real ranks, and their comparison with torch on one device.

Expected results, gradients and losses are computed by a few lines of torch for each example, in
double precision, from the same inputs and parameters: independently of our gradients and passes.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.random import fill

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
TYPES = {"f32": np.float32, "f64": np.float64, "i32": np.int32, "i64": np.int64}

Tensors = dict[str, Any]


@dataclass
class Ran:
    """An example after its run: its directory, its plan and the values that it dumped."""

    directory: Path
    plan: dict[str, Any]
    dump: dict[str, np.ndarray]

    def args(self, function: str) -> Tensors:
        """Return the initial arguments of a function by name, in double precision."""
        return {
            a["name"]: torch.tensor(self._filled(a)).double()
            if a["dtype"] in ("f32", "f64")
            else torch.tensor(self._filled(a)).long()
            for a in self.plan["functions"][function]["args"]
        }

    def _filled(self, arg: dict[str, Any]) -> np.ndarray:
        init, shape = arg["init"], tuple(arg["shape"])
        if init["kind"] == "file":
            return np.load(self.directory / init["file"])
        return fill(init["kind"], init, shape, None, f"0/{arg['key']}", TYPES[arg["dtype"]])

    def results(self, function: str) -> list[np.ndarray]:
        n = len(self.plan["functions"][function]["results"])
        return [self.dump[f"results/{function}/{i}"] for i in range(n)]


@dataclass(frozen=True)
class Job:
    """An example to run for a number of training steps: a file, or, with `options`, the program
    that `make_<example>.py` writes."""

    example: str
    steps: int = 3
    pipeline: str | None = None
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    def run(self, folder: Path) -> Ran:
        directory = self._compiled().save(folder / self.example)
        dump, plan = directory / "dump.npz", json.loads((directory / "plan.json").read_text())
        run(directory, Options(timeout=120, steps=self.steps, dump=dump))
        return Ran(directory, plan, dict(np.load(dump)))

    def _compiled(self) -> shardir.Compiled:
        if not self.options:
            path = EXAMPLES / f"{self.example}.ir"
            return shardir.compile_file(path, self.pipeline, mode=self.mode)
        make = import_module(f"make_{self.example}")
        return shardir.compile(getattr(make, self.example)(**dict(self.options)))


def equal(found: Any, wanted: Any, what: str = "") -> None:
    """Assert equality in single precision."""
    if isinstance(wanted, torch.Tensor):
        wanted = wanted.detach().numpy()
    scale = max(1.0, float(np.max(np.abs(wanted))))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5 * scale, err_msg=what)


def gradients(f: Callable[..., Any], args: list[Any], dy: Any) -> tuple[Any, ...]:
    """Return the result, and the gradients of the arguments."""
    leaves = [a.clone().requires_grad_() for a in args]
    y = f(*leaves)
    return (y, *torch.autograd.grad(y, leaves, dy))


def check_training(
    example: Ran, loss: Callable[[Tensors], Any], steps: int, lr: float = 0.1,
    momentum: float = 0.9, weight_decay: float = 0.0, step: str = "step",
) -> Tensors:  # fmt: skip
    """Assert that losses and final parameters of a step are those of torch's SGD; return torch's
    final values."""
    values = example.args(step)
    described = example.plan["functions"][step]["args"]
    names = {a["name"]: a["key"] for a in described if a["role"] == "parameter"}
    for name in names:
        values[name].requires_grad_()
    weights = [values[n] for n in names]
    optimizer = torch.optim.SGD(weights, lr=lr, momentum=momentum, weight_decay=weight_decay)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(values)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    equal(example.dump[f"losses/{step}"], np.array(losses), "losses")
    for name, key in names.items():
        equal(example.dump[f"states/{key}"], values[name], key)
    return values


# ---- layers of the examples, in torch ----


def attention(x: Any, memory: Any, q: Any, k: Any, v: Any, o: Any, **options: Any) -> Any:
    """Queries of x, keys and values of memory, all [batch, rows, columns]; weights by heads."""
    heads = (torch.einsum("bse,ehd->bhsd", t, w) for t, w in ((x, q), (memory, k), (memory, v)))
    queries, keys, values = heads
    context = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, **options)
    return torch.einsum("bhsd,hde->bse", context, o)


def norm(x: Any, weight: Any, bias: Any, eps: float = 1e-5) -> Any:
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def gelu(x: Any) -> Any:
    return torch.nn.functional.gelu(x, approximate="tanh")


def classified(logits: Any, labels: Any, **options: Any) -> Any:
    """The mean cross entropy; classes are the last dimension."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def sinusoids(rows: int, columns: int) -> Any:
    """Vaswani et al. (2017), 3.5."""
    angles = torch.arange(rows)[:, None] / 1e4 ** (torch.arange(0, columns, 2).double() / columns)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
