"""Training steps: optimizers, schedules, clipping, loss scaling and microbatches are torch's on one
device (or, where torch has none, their formula's), and communicate what follows from layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from emitted import functions_of
from extent import extent
from harness import (
    MESH,
    Arg,
    Array,
    add_step,
    collectives,
    compiled,
    differs,
    function,
    laid_out,
    layout,
    numbers,
    parts,
    program,
)
from reference import to_torch, torch_forward
from xdsl.dialects.builtin import FloatAttr, ModuleOp, f64
from xdsl.ir import Attribute

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.runtime.runtime import Mesh
from shardir.cost import report
from shardir.dialects import dist, nn, train
from shardir.dialects.builder import OpBuilder
from shardir.dialects.nn.types import size_of
from shardir.interpret import run
from shardir.syntax.parser import parse

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
        found = ours.step(inputs)
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


# ---- optimizers ----

O = torch.optim
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
    "adafactor, lr = 0.3, weight_decay = 0.1": lambda p: O.Adafactor(
        p, 0.3, eps=(1e-7, 1e-3), weight_decay=0.1
    ),
}


def steps_of(texts: list[str | None]) -> int:
    """Twenty steps with one of the layouts; a wrong layout shows in the first ones."""
    return 20 if texts is LAYOUTS["both"] else extent(4, 20)


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("optimizer", TORCH)
def test_steps_are_those_of_torch(optimizer: str, texts: list[str | None]):
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


# ---- clipping ----


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("most", [0.3, 100.0])
def test_gradients_are_clipped_by_their_global_norm(most: float, texts: list[str | None]):
    values, parameters = start()
    clip = train.ClipAttr.read(f"norm, max = {most}")
    ours = Ours(compiled(module_of("sgd, lr = 0.1", texts, clip=clip), check=True), values)
    optimizer = O.SGD(parameters, 0.1)

    def clipped(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, most)

    optimizer.register_step_pre_hook(clipped)
    compare(ours, parameters, by_torch(optimizer, parameters))


def test_gradients_are_clipped_by_value():
    values, parameters = start()
    clip = train.ClipAttr.read("value, max = 0.05")
    ours = Ours(compiled(module_of("sgd, lr = 0.1", LAYOUTS["both"], clip=clip)), values)
    optimizer = O.SGD(parameters, 0.1)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(parameters, 0.05))
    compare(ours, parameters, by_torch(optimizer, parameters))


@pytest.mark.parametrize("name", ["both", "split weights", "uneven"])
def test_the_global_norm_takes_one_reduction(name: str):
    """Though parameters are split over different axes."""
    clip = train.ClipAttr.read("norm, max = 1.0")
    plain, clipped = (
        collectives(parts(compiled(made), "step")[1])
        for made in (
            module_of("sgd, lr = 0.1", LAYOUTS[name]),
            module_of("sgd, lr = 0.1", LAYOUTS[name], clip=clip),
        )
    )
    assert clipped["all_reduce"] == plain.get("all_reduce", 0) + 1


# ---- loss scaling ----


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("optimizer", ["sgd, lr = 0.1", "adamw, lr = 0.01"])
def test_a_dynamic_loss_scale_is_torchs(optimizer: str, texts: list[str | None]):
    """Steps whose gradients are not finite change nothing, and the scale as GradScaler does."""
    values, parameters = start()
    scale = train.LossScaleAttr.read("dynamic, initial = 1024.0, interval = 3")
    module = module_of(optimizer, texts, loss_scale=scale)
    ours = Ours(compiled(module, check=texts[0] is not None), values)
    theirs = TORCH[optimizer](parameters)
    scaler = torch.amp.GradScaler("cpu", 1024.0, growth_interval=3)

    def step(inputs: list[Array]) -> torch.Tensor:
        theirs.zero_grad()
        loss = loss_of(inputs, parameters)
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        return loss.detach()

    compare(ours, parameters, step, spoil=(4, 5, 11))
    assert ours.values["step.loss_scale"] == scaler.get_scale() != 1024.0
    if optimizer.startswith("adamw"):
        assert ours.values["step.count"] == 17


NEXT_SCALE = """func.func @f(%scale: tensor<f32>, %good: tensor<i64>, %finite: tensor<i1>) -> (tensor<f32>, tensor<i64>) {
  %s, %g = train.next_loss_scale %scale, %good, %finite growth 2.0 backoff 0.5 interval 3 : (tensor<f32>, tensor<i64>, tensor<i1>) -> (tensor<f32>, tensor<i64>)
  func.return %s, %g : tensor<f32>, tensor<i64>
}"""  # noqa: E501 - the text of a program


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("good", [0, 1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.0**126, 2.0**127])
def test_the_next_loss_scale_is_torchs(scale: float, good: int, finite: bool):
    """That of the op that GradScaler calls; it does not grow to infinity."""
    module = parse(NEXT_SCALE, verify=True)
    given = [np.array(scale, np.float32), np.array(good), np.array(finite)]
    tensors = [torch.tensor(scale), torch.tensor(good, dtype=torch.int32)]
    amp: Any = torch
    amp._amp_update_scale_(*tensors, torch.tensor(float(not finite)), 2.0, 0.5, 3)
    expected = [float(t) for t in tensors]
    emitted = functions_of(program_text(module))["f"](Mesh((), 0), *map(torch.from_numpy, given))
    assert [float(x) for x in run(module, "f", given)] == expected
    assert [float(x) for x in emitted] == expected
    assert np.isfinite(expected[0])


def test_a_static_loss_scale_changes_nothing_else():
    values, parameters = start()
    scale = train.LossScaleAttr.read("static, factor = 512.0")
    clip = train.ClipAttr.read("norm, max = 0.3")
    module = module_of("sgd, lr = 0.1", LAYOUTS["uneven"], loss_scale=scale, clip=clip)
    optimizer = O.SGD(parameters, 0.1)
    inner = optimizer.step

    def clipped() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.3)
        if all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None):
            inner()

    optimizer.step = clipped  # type: ignore[method-assign] - wrapped
    compare(Ours(compiled(module, check=True), values), parameters,
            by_torch(optimizer, parameters), spoil=(3,))  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_whether_all_are_finite_takes_one_reduction(name: str):
    """And the global norm travels with it."""
    options = {"loss_scale": train.LossScaleAttr.read("dynamic"),
               "clip": train.ClipAttr.read("norm, max = 1.0")}  # fmt: skip
    plain, scaled = (
        collectives(parts(compiled(module_of("sgd, lr = 0.1", LAYOUTS[name], **o)), "step")[1])
        for o in ({}, options)
    )
    extra = scaled["all_reduce"] - plain.get("all_reduce", 0)
    assert extra == (name != "data parallel")


# ---- microbatches ----


def accumulated(how: str, count: int) -> train.AccumulateAttr:
    return train.AccumulateAttr.read(f"{how}, microbatches = {count}")


@pytest.mark.parametrize("texts", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("how", ["mean", "sum"])
def test_gradients_of_microbatches_are_accumulated(how: str, texts: list[str | None]):
    values, parameters = start()
    module = module_of("adamw, lr = 0.01", texts, accumulate=accumulated(how, 3))
    ours = Ours(compiled(module, check=True), values)
    optimizer = O.AdamW(parameters, 0.01)

    def step(inputs: list[Array]) -> float:
        optimizer.zero_grad()
        total = 0.0
        for k in range(3):
            # our inputs: those of the first microbatch, then those of the next
            loss = loss_of(inputs[2 * k : 2 * k + 2], parameters) / (3 if how == "mean" else 1)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    compare(ours, parameters, step, steps=6, microbatches=3)


@pytest.mark.parametrize("name", ["data parallel", "both"])
def test_reductions_over_the_batch_do_not_grow_with_the_microbatches(name: str):
    def reductions(count: int) -> int:
        module = module_of("sgd, lr = 0.1", LAYOUTS[name], accumulate=accumulated("mean", count))
        ops = function(compiled(module), "step").body.block.ops
        axis = next(iter(MESH.names))
        return sum(
            isinstance(op, dist.AllReduceOp) and any(a.name == axis.name for a in op.axes.data)
            for op in ops
        )

    assert reductions(1) == reductions(2) == reductions(5) > 0


@pytest.mark.parametrize("name", ["data parallel", "both"])
def test_the_memory_of_microbatches_is_that_of_their_inputs(name: str):
    """Gradients are added up after each microbatch; only its inputs and loss are live longer."""

    def memory(count: int) -> tuple[int, int]:
        module = compiled(
            module_of("sgd, lr = 0.1", LAYOUTS[name], accumulate=accumulated("mean", count))
        )
        (cost,) = (f for f in report(module) if f.name == "step")
        arguments = function(module, "step").body.block.args
        return cost.memory.peak, sum(map(size_of, arguments))

    (peak, arguments), (more, more_arguments) = memory(3), memory(5)
    assert more - peak <= more_arguments - arguments + 2 * 8


def test_ops_of_parameters_alone_are_computed_once():
    """The weight is gathered, and its gradient scattered, once for all microbatches."""

    def body(b: OpBuilder, x: Any, w: Any) -> Any:
        h = b.value(nn.TanhOp, b.value(nn.MatmulOp, x, b.value(nn.ExpOp, w)))
        return b.reduce(b.mul(h, h), "mean", [0, 1])

    args = [Arg("f64", (8, 4)), Arg("f64", (4, 6), "w")]
    texts = ["[{a, b}, {}]", "[{a, b}, {}]"]
    module = module_of(
        "sgd, lr = 0.1", texts, args=args, body=body, accumulate=accumulated("mean", 4)
    )
    ops = list(function(compiled(module), "step").body.block.ops)
    found = collectives(ops)
    assert sum(isinstance(op, nn.ExpOp) for op in ops) == 1
    assert found["all_gather"] == found["reduce_scatter"] == 1
