"""Optimizers and their schedules are torch's on one device (or, where torch has none, their
formula's)."""

import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.emitted import functions_of
from support.extent import extent, sampled
from support.harness import (
    MESH,
    Arg,
    Array,
    collectives,
    compiled,
    function,
    layout,
    parts,
)
from support.reference import to_torch
from support.regression_steps import (
    LAYOUTS,
    STATES,
    Ours,
    Tensors,
    by_torch,
    compare,
    module_of,
    start,
)

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime.runtime import Mesh
from shardir.dialects import dist, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.train.options import ScheduleAttr
from shardir.frontends.torch.optimizers import read
from shardir.interpret import run
from shardir.syntax.parser import parse

O = torch.optim


def nadam(parameters: Any, *numbers: Any, **more: Any) -> Any:
    """Return torch's NAdam with a product of momenta in double precision."""
    optimizer = O.NAdam(parameters, *numbers, **more)
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        mean, square = torch.zeros_like(p), torch.zeros_like(p)
        product = torch.ones((), dtype=torch.float64)
        optimizer.state[p] = {
            "step": torch.zeros(()), "mu_product": product, "exp_avg": mean, "exp_avg_sq": square,
        }  # fmt: skip
    return optimizer


TORCH: dict[str, Callable[[Any], Any]] = {
    "sgd, lr = 0.1": lambda p: O.SGD(p, 0.1),
    "sgd, lr = 0.1, weight_decay = 0.01": lambda p: O.SGD(p, 0.1, weight_decay=0.01),
    "momentum, lr = 0.1, momentum = 0.9, weight_decay = 0.01": lambda p: O.SGD(
        p, 0.1, 0.9, weight_decay=0.01
    ),
    "nesterov, lr = 0.1, momentum = 0.9, weight_decay = 0.01": lambda p: O.SGD(
        p, 0.1, 0.9, weight_decay=0.01, nesterov=True
    ),
    "adam, lr = 0.01, weight_decay = 0.1": lambda p: O.Adam(p, 0.01, weight_decay=0.1),
    "adam, lr = 0.01, beta1 = 0.8, beta2 = 0.9, eps = 0.01": lambda p: O.Adam(
        p, 0.01, (0.8, 0.9), 0.01
    ),
    "adamw, lr = 0.01": lambda p: O.AdamW(p, 0.01),
    "rmsprop, lr = 0.01": lambda p: O.RMSprop(p, 0.01),
    "rmsprop, lr = 0.01, alpha = 0.9, momentum = 0.8, centered = 1, weight_decay = 0.1": (
        lambda p: O.RMSprop(p, 0.01, 0.9, weight_decay=0.1, momentum=0.8, centered=True)
    ),
    "adagrad, lr = 0.1": lambda p: O.Adagrad(p, 0.1),
    "adagrad, lr = 0.1, lr_decay = 0.1, initial = 0.5, eps = 0.01, weight_decay = 0.1": (
        lambda p: O.Adagrad(p, 0.1, 0.1, 0.1, 0.5, 0.01)
    ),
    "adamax, lr = 0.01, beta1 = 0.8, eps = 0.01, weight_decay = 0.1": lambda p: O.Adamax(
        p, 0.01, (0.8, 0.999), 0.01, 0.1
    ),
    "nadam, lr = 0.01, weight_decay = 0.1": lambda p: nadam(p, 0.01, weight_decay=0.1),
    "nadam, lr = 0.01, beta1 = 0.8, momentum_decay = 0.1, weight_decay = 0.1, decoupled = 1": (
        lambda p: nadam(p, 0.01, (0.8, 0.999), 1e-8, 0.1, 0.1, True)
    ),
    "adafactor, lr = 0.3, weight_decay = 0.1": lambda p: O.Adafactor(
        p, 0.3, eps=(1e-7, 1e-3), weight_decay=0.1
    ),
}


def steps_of(texts: list[str | None]) -> int:
    """Twenty steps with one of the layouts; a wrong layout shows in the first ones."""
    return 20 if texts is LAYOUTS["both"] else extent(4, 20)


@pytest.mark.parametrize(("optimizer", "layouts"), sampled(product(TORCH, LAYOUTS), 18))
def test_steps_are_those_of_torch(optimizer: str, layouts: str):
    texts = LAYOUTS[layouts]
    values, parameters = start()
    check = texts is LAYOUTS["both"]
    ours = Ours(compiled(module_of(optimizer, texts), check=check), values)
    compare(ours, parameters, by_torch(TORCH[optimizer](parameters), parameters), steps_of(texts))


class Lamb:
    """Row 36: lambda .01, b1 .9, b2 .999, eps 1e-6; You et al., 2020, algorithm 2."""

    def __init__(self, parameters: Tensors, lr: float):
        self.parameters, self.lr, self.t = parameters, lr, 0
        self.m = [np.zeros(p.shape) for p in parameters]
        self.v = [np.zeros(p.shape) for p in parameters]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        self.t += 1
        for i, p in enumerate(self.parameters):
            assert p.grad is not None
            w, g = p.detach().numpy(), p.grad.numpy()
            self.m[i] = 0.9 * self.m[i] + 0.1 * g
            self.v[i] = 0.999 * self.v[i] + 0.001 * g * g
            m, v = self.m[i] / (1 - 0.9**self.t), self.v[i] / (1 - 0.999**self.t)
            r = m / (np.sqrt(v) + 1e-6) + 0.01 * w
            ratio = np.linalg.norm(w.ravel()) / np.linalg.norm(r.ravel())
            p.data = to_torch(w - self.lr * ratio * r)


class Lars(Lamb):
    """You, Gitman and Ginsburg, 2017, algorithm 1: eta .001, momentum .9, beta .1."""

    def step(self) -> None:
        for i, p in enumerate(self.parameters):
            assert p.grad is not None
            w, g = p.detach().numpy(), p.grad.numpy()
            norm = np.linalg.norm(w.ravel())
            local = 0.001 * norm / (np.linalg.norm(g.ravel()) + 0.1 * norm)
            self.m[i] = 0.9 * self.m[i] + self.lr * local * (g + 0.1 * w)
            p.data = to_torch(w - self.m[i])


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("optimizer", "reference"),
    [("lamb, lr = 0.1", Lamb), ("lars, lr = 10.0, weight_decay = 0.1", Lars)],
    ids=["lamb", "lars"],
)
def test_layerwise_rates_are_their_formulas(
    optimizer: str, reference: type[Lamb], texts: list[str | None]
):
    values, parameters = start()
    lr = 0.1 if reference is Lamb else 10.0
    ours = Ours(compiled(module_of(optimizer, texts), check=texts[0] is not None), values)
    compare(ours, parameters, by_torch(reference(parameters, lr), parameters), steps_of(texts))


TRUST = """func.func @f(%w: tensor<f64>, %u: tensor<f64>) -> tensor<f64> {{
  %r = train.trust_ratio %w, %u coefficient 0.5 weight_decay {decay} : (tensor<f64>, tensor<f64>) -> tensor<f64>
  func.return %r : tensor<f64>
}}"""  # noqa: E501 - the text of a program


@pytest.mark.parametrize("decay", [0.0, 0.25])
@pytest.mark.parametrize("w", [0.0, 9.0])
@pytest.mark.parametrize("u", [0.0, 4.0])
def test_a_trust_ratio_is_one_if_a_norm_is_zero(w: float, u: float, decay: float):
    """As in the authors' implementation of LAMB: a parameter that is zero gets its first step. The
    op has the squares of the norms."""
    module = parse(TRUST.format(decay=decay), verify=True)
    squares = [np.array(w), np.array(u)]
    (computed,) = run(module, "f", squares)
    emitted = functions_of(program_text(module))["f"](Mesh((), 0), *map(to_torch, squares))
    expected = 0.5 * 3.0 / (2.0 + decay * 3.0) if w and u else 1.0
    assert float(computed) == float(emitted) == pytest.approx(expected)


class PublishedAdafactor:
    """Shazeer and Stern, 2018, algorithms 4 and 5, with beta2 = 1 - t^-0.8, d = 1, eps2 = 1e-3.

    `eps` is that of the paper, which adds it to squares of gradients.
    """

    def __init__(self, lr: float, eps: float):
        self.lr, self.eps, self.t = lr, eps, 0
        self.moments: dict[str, tuple[Any, ...]] = {}

    def step(self, name: str, x: Array, g: Array) -> Array:
        beta = 1 - self.t**-0.8
        squares = g * g + self.eps
        sums = (squares.sum(-1), squares.sum(-2)) if x.ndim > 1 else (squares,)
        old = self.moments.get(name, (0.0,) * len(sums))
        new = [beta * a + (1 - beta) * b for a, b in zip(old, sums, strict=True)]
        self.moments[name] = tuple(new)
        v = np.outer(*new) / new[0].sum() if x.ndim > 1 else new[0]
        u = g / np.sqrt(v)
        u /= max(1.0, np.sqrt(np.mean(u * u)))
        rate = min(self.lr, self.t**-0.5)
        return x - max(1e-3, np.sqrt(np.mean(x * x))) * rate * u


@pytest.mark.parametrize(
    "texts", [[None] * 4, [None, None, "[{a}, {b}]", "[{b}]"]], ids=["replicated", "split"]
)
def test_small_gradients_are_those_of_the_published_adafactor(texts: list[str | None]):
    """eps1^2 is a lower bound of second moments, as in torch; the paper adds eps to the squares of
    gradients. With eps = eps1^2 both agree where the squares are far below it."""

    def body(b: OpBuilder, x: Any, y: Any, w: Any, c: Any) -> Any:
        return b.add(b.reduce(b.mul(x, w), "sum", [0, 1]), b.reduce(b.mul(y, c), "sum", [0]))

    args = [Arg("f64", (4, 6)), Arg("f64", (6,)), Arg("f64", (4, 6), "w"), Arg("f64", (6,), "c")]
    reference = PublishedAdafactor(lr=0.3, eps=1e-3**2)
    wanted = {"w": np.zeros((4, 6)), "c": np.zeros(6)}
    module = module_of("adafactor, lr = 0.3, eps1 = 1e-3", texts, args=args, body=body)
    ours = Ours(compiled(module), dict(wanted))
    rng = np.random.default_rng(0)
    for _ in range(4):
        gradients = [1e-10 * rng.standard_normal(a.shape) for a in args[:2]]
        ours.step(gradients)
        reference.t += 1
        for (name, x), g in zip(wanted.items(), gradients, strict=True):
            wanted[name] = reference.step(name, x, g)
            np.testing.assert_allclose(ours.values[name], wanted[name], rtol=1e-9)


@pytest.mark.parametrize("texts", ["split weights", "both"])
@pytest.mark.parametrize("optimizer", ["adamw, lr = 0.1", "lamb, lr = 0.1", "adafactor, lr = 0.1"])
def test_states_have_the_layouts_of_their_parameters_or_annotated_ones(optimizer: str, texts: str):
    module = compiled(module_of(optimizer, LAYOUTS[texts]))
    f = function(module, "step")
    placed = {
        a.key: (dist.layout_of(v), dist.global_shape(v.type, MESH))
        for v, a in zip(f.body.block.args, train.arguments(f), strict=True)
    }  # fmt: skip
    for name in ("w", "c", "u", "s"):
        at, shape = placed[name]
        if texts == "both" and name in STATES:
            at = layout(STATES[name])
        rest = {k: v for k, v in placed.items() if k and k.startswith(f"{name}.")}
        for key, (there, size) in rest.items():
            gone = {"row_var": len(shape) - 1, "col_var": len(shape) - 2}.get(key.split(".")[1])
            kept = [d for d in range(len(shape)) if d != gone]
            assert size == tuple(shape[d] for d in kept)
            assert at is not None and there is not None
            assert there.dims == tuple(at.dims[d] for d in kept)
        assert rest


def test_global_norms_take_one_reduction():
    """LAMB over split weights: the norms of all parameters and directions travel together."""
    texts = ["[{}, {}]", "[{}, {}]", "[{}, {b}]", "[{b}]", None, None]
    plain, lamb = (
        collectives(parts(compiled(module_of(o, texts)), "step")[1])
        for o in ("sgd, lr = 0.1", "lamb, lr = 0.1")
    )
    assert lamb["all_reduce"] == plain.get("all_reduce", 0) + 1


# ---- numbers of a parameter's own ----


def test_parameters_may_have_numbers_of_their_own():
    values, parameters = start()
    own = {"c": {"weight_decay": 0.0}, "u": {"lr_scale": 0.5}, "s": {"lr_scale": 0.0}}
    ours = Ours(compiled(module_of("adamw, lr = 0.01", LAYOUTS["both"], own), check=True), values)
    w, c, u, s = parameters
    groups = [{"params": [w]}, {"params": [c], "weight_decay": 0.0}, {"params": [u], "lr": 0.005},
              {"params": [s], "lr": 0.0}]  # fmt: skip
    compare(ours, parameters, by_torch(O.AdamW(groups, 0.01), parameters))


INSTANCES: dict[str, Callable[[Any], Any]] = {
    "RMSprop": lambda p: O.RMSprop(
        p, 0.01, alpha=0.8, eps=0.01, weight_decay=0.1, momentum=0.5, centered=True
    ),
    "Adagrad": lambda p: O.Adagrad(
        p, 0.1, lr_decay=0.2, weight_decay=0.1, initial_accumulator_value=0.3, eps=0.01
    ),
    "Adamax": lambda p: O.Adamax(p, 0.01, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1),
    "NAdam": lambda p: nadam(
        p, 0.01, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1, momentum_decay=0.1,
        decoupled_weight_decay=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("optimizer", INSTANCES)
def test_an_optimizer_of_torch_has_all_its_settings(optimizer: str):
    """And two groups of parameters; its text is that of what it computes."""
    values, parameters = start()
    w, c, u, s = parameters
    groups = [{"params": [w, s]}, {"params": [c, u], "lr": 0.02, "weight_decay": 0.0}]
    theirs = INSTANCES[optimizer](groups)
    found = read(theirs, {id(p): n for n, p in zip("wcus", parameters, strict=True)})
    own = {
        name: {"lr_scale": scale, "weight_decay": found.weight_decays[name]}
        for name, scale in found.lr_scales.items()
    }
    ours = Ours(compiled(module_of(found.text, LAYOUTS["both"], own)), values)
    compare(ours, parameters, by_torch(theirs, parameters))


# ---- schedules ----

S = torch.optim.lr_scheduler
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine<rate = 0.1, steps = 15, end = 0.01>": lambda o: S.SequentialLR(
        o, [S.CosineAnnealingLR(o, 15, 0.01), S.ConstantLR(o, 0.1, 99)], [15]
    ),
    "polynomial<rate = 0.1, steps = 12, power = 2.0>": lambda o: S.PolynomialLR(o, 12, 2.0),
    "step<rate = 0.1, every = 4, factor = 0.5>": lambda o: S.StepLR(o, 4, 0.5),
    "constant<rate = 0.1, warmup = 5>": lambda o: S.LinearLR(o, 0.2, 1.0, 4),
    "cosine<rate = 0.1, steps = 20, warmup = 4>": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.25, 1.0, 3), S.CosineAnnealingLR(o, 16)], [4]
    ),
    "inverse_sqrt<rate = 0.1, warmup = 4>": lambda o: S.LambdaLR(
        o, lambda t: min((t + 1) / 4, (4 / (t + 1)) ** 0.5)
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_are_those_of_torch(schedule: str):
    values, parameters = start()
    ours = Ours(compiled(module_of(f"sgd, lr = {schedule}", LAYOUTS["both"])), values)
    optimizer = O.SGD(parameters, 0.1)
    compare(ours, parameters, by_torch(optimizer, parameters, SCHEDULES[schedule](optimizer)))
    assert ours.values["step.count"] == 20


FORMULAS = re.findall(
    r"^\| `((?:constant|cosine|polynomial|step|inverse_sqrt)<[^`]*)>` \| (.*) \|$",
    (Path(__file__).parents[2] / "docs/reference/language.md").read_text(),
    re.M,
)
"""The schedules of docs/reference/language.md: text, formula."""


NO_DEVICE: Any = None
"""The device of ops whose value does not depend on it."""


@pytest.mark.parametrize("warmup", [0, 1, 4])
@pytest.mark.parametrize(("text", "formula"), FORMULAS)
def test_schedules_are_those_of_the_documentation(text: str, formula: str, warmup: int) -> None:
    """Python evaluates the formulas of the page, whose text multiplies by the warm-up."""
    text = text.replace("steps = 1000", "steps = 90")
    names = {name: float(x) for name, x in re.findall(r"(\w+) = ([\d.]+)", text)}
    schedule = ScheduleAttr.read(f"{text.replace('<', ', ', 1)}, warmup = {warmup}")
    op = train.LearningRateOp.create(properties={"schedule": schedule})
    for t in range(120):
        p = min(1.0, max(0.0, t - warmup) / (90 - warmup))
        scope = {**vars(math), **names, "warmup": warmup, "t": t, "p": p}
        expected = eval(formula.replace("^", "**"), scope) * min(1, (t + 1) / max(1, warmup))
        assert float(op.evaluate(NO_DEVICE, np.array(t))) == pytest.approx(expected, rel=1e-12)
