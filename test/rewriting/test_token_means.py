"""Steps over microbatches whose losses are means over tokens: those of the module itself, which
torch runs on all microbatches as one batch."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from support.harness import apply, collectives, differs, function
from torch import Tensor, nn
from torch.nn import functional as F

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.blocks import of_kind
from shardir.dialects.train import MicrobatchesOp, Role, arguments, updated_keys
from shardir.interpret.evaluator import run
from shardir.syntax.parser import parse

COUNT, ROWS, LENGTH, WIDTH, CLASSES = 3, 4, 6, 4, 5
Loss = Callable[["Model", Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Logits of tokens, and a loss of these."""

    def __init__(self, loss: Loss, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(WIDTH, CLASSES, dtype=dtype)
        self.register_buffer("weights", torch.rand(CLASSES, dtype=dtype) + 0.1)
        self.register_buffer("positions", torch.rand(LENGTH, dtype=dtype))
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self, self.linear(x), labels, mask)


def _each(y: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), labels.clamp(min=0), reduction="none")


def _shifted(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As in causal models: a token is the label of the one before it."""
    return F.cross_entropy(y[:, :-1].flatten(0, 1), labels[:, 1:].reshape(-1), ignore_index=-1)


def _weighted(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """As torch's class weights."""
    weights = torch.where(labels >= 0, m.weights[labels.clamp(min=0)], 0.0)
    return (_each(y, labels) * weights).sum() / weights.sum()


def _several(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Two means over different tokens, and one over all."""
    masked = (y.square().mean(-1) * mask).sum() / mask.sum().clamp(min=1)
    return F.cross_entropy(y.transpose(1, 2), labels, ignore_index=-1) + 0.3 * masked - y.mean()


LOSSES: dict[str, Loss] = {
    "cross_entropy": lambda m, y, t, mask: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), ignore_index=-1, label_smoothing=0.1),
    "nll": lambda m, y, t, mask: F.nll_loss(
        y.flatten(0, 1).log_softmax(-1), t.flatten(), ignore_index=-1),
    "shifted": _shifted,
    "weighted": _weighted,
    "several": _several,
    "mask": lambda m, y, t, mask: (_each(y, t) * mask).sum() / mask.sum(),
    "clamped": lambda m, y, t, mask: (_each(y, t) * mask).sum() / mask.sum(1).sum().clamp(min=30),
    "rows": lambda m, y, t, mask: (_each(y, t) * mask).sum(1).sum() / (mask.sum() + 1e-3),
    "means": lambda m, y, t, mask: 2 * (_each(y, t) * mask).mean() / mask.mean(),
    "where": lambda m, y, t, mask: torch.where(mask > 0, _each(y, t), 0.0).sum()
    / torch.where((n := (mask > 0).sum()) > 0, n, 1),
    "normalised": lambda m, y, t, mask: (_each(y, t) * (mask / mask.sum())).sum(),
    "class weights": lambda m, y, t, mask: F.cross_entropy(
        y.flatten(0, 1), t.flatten(), weight=m.weights, ignore_index=-1),
    "products": lambda m, y, t, mask: torch.einsum("ij,ij->", _each(y, t), mask)
    / (mask.flatten() @ (t >= 0).flatten().to(y.dtype) + mask.sum(0) @ m.positions),
    "reciprocal": lambda m, y, t, mask: (_each(y, t) * mask).sum() * mask.sum().reciprocal(),
    "selected": lambda m, y, t, mask: (_each(y, t)[:, :3] * mask[:, :3]).sum()
    / torch.cat([mask[:1, :3], mask[1:, :3]]).sum(),
}  # fmt: skip


ALONE: dict[str, Any] = {"mode": "stand_alone"}
SPLIT: dict[str, Any] = {"mesh": "d = 2, e = 2", "plan": 'values "linear" : [{d}, {e}, {}]'}


def data(empty: bool = False, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The inputs of all microbatches, with other numbers of labels and of weights in each."""
    random = torch.Generator().manual_seed(1)
    shape = COUNT * ROWS, LENGTH
    x = torch.randn(*shape, WIDTH, generator=random, dtype=torch.float64).to(dtype)
    labels = torch.randint(0, CLASSES, shape, generator=random)
    mask = (torch.rand(shape, generator=random) < 0.5).to(dtype)
    labels[:ROWS, 2:] = -1
    mask[:ROWS] = 1.0
    if empty:
        labels[ROWS : 2 * ROWS], mask[ROWS : 2 * ROWS] = -1, 0.0
    return [x, labels, mask]


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    return tuple(v[:ROWS] for v in data(dtype=dtype))


def ours(
    program: Any, inputs: Sequence[Tensor], name: str = "step"
) -> tuple[float, dict[str, Any]]:
    """The loss of a step, and its gradients: that of sgd with the rate 1."""
    f = function(program.module, name)
    parts = iter(v.reshape(COUNT, -1, *v.shape[1:]).numpy() for v in inputs)
    values = {k: v.numpy() for k, v in program.values.items()}
    given = [next(parts) if a.role is Role.INPUT else values[a.key] for a in arguments(f)]
    results = dict(zip(updated_keys(f), run(program.module, name, given), strict=True))
    loss = float(results.pop(None))
    return loss, {k: values[k] - v for k, v in results.items() if k is not None}


def theirs(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[float, dict[str, Any]]:
    loss = model(*inputs)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    return float(loss.detach()), {n: g.numpy() for n, g in found.items() if g is not None}


def compiled(model: nn.Module, how: str = "tokens", rows: int = ROWS, **options: Any) -> Any:
    inputs = tuple(v[:rows] for v in example())
    return shardir.compile(model, inputs, optimizer="sgd, lr = 1.0",
                           accumulate=f"{how}, microbatches = {COUNT}", **options)  # fmt: skip


def _all(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """The sum of all losses, each with a factor of its own."""
    found = enumerate(LOSSES.values(), start=1)
    return sum((k * loss(m, y, labels, mask) for k, loss in found), torch.zeros((), dtype=y.dtype))


@pytest.mark.parametrize("options", extent([SPLIT], [ALONE, SPLIT]), ids=str)
def test_a_mean_over_tokens_is_that_of_all_microbatches(options: dict[str, Any]) -> None:
    """Of rows that are split too, and of a microbatch without tokens, which adds 0."""
    program = compiled(Model(_all), **options)
    for empty in (False, True):
        loss, gradients = theirs(Model(_all), data(empty))
        found, grads = ours(program, data(empty))
        assert found == pytest.approx(loss, rel=1e-12)
        for key, gradient in gradients.items():
            message = differs(grads[key], gradient, "f64", 100)
            assert not message, f"{key}: {message}"


def test_a_forward_part_has_the_mean_over_tokens() -> None:
    loss = extent(_several, _all)
    model = Model(loss).eval()
    inputs = example()
    program = shardir.compile(model, inputs, train=False, **ALONE,
                              accumulate=f"tokens, microbatches = {COUNT}")  # fmt: skip
    wanted = float(Model(loss)(*data()).detach())
    assert ours(program, data(), "forward")[0] == pytest.approx(wanted, rel=1e-12)


def test_without_any_token_gradients_are_those_of_torch() -> None:
    """The loss is not a number, and the gradient of a cross entropy is 0."""
    loss = LOSSES["cross_entropy"]
    inputs = data()
    inputs[1].fill_(-1)
    wanted, gradients = theirs(Model(loss), inputs)
    found, grads = ours(compiled(Model(loss), **ALONE), inputs)
    assert np.isnan(wanted) and np.isnan(found)
    for key, gradient in gradients.items():
        assert (grads[key] == gradient).all()


@pytest.mark.parametrize("how", ["mean", "tokens"])
def test_means_over_the_tokens_of_each_row_are_means_over_rows(how: str) -> None:
    """Also where a microbatch is one row, and a row's number of tokens one element."""

    def loss(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return ((_each(y, labels) * mask).sum(1) / mask.sum(1)).mean()

    inputs = [v[: 2 * COUNT : 2] for v in data()]
    wanted, gradients = theirs(Model(loss), inputs)
    found, grads = ours(compiled(Model(loss), how, rows=1, **ALONE), inputs)
    assert found == pytest.approx(wanted, rel=1e-12)
    for key, gradient in gradients.items():
        assert not differs(grads[key], gradient, "f64", 100)


def test_sums_of_many_tokens_are_within_narrow_types() -> None:
    """Of bf16 and f16 the number of tokens is a sum in f32; the mean number fits."""
    random = np.random.default_rng(0)
    mask = random.uniform(size=(COUNT, 40_000)).astype(np.float16)
    x = random.normal(size=mask.shape).astype(np.float16)

    for element, tolerance in (("f16", 2e-3), ("bf16", 2e-2)):
        module = parse(MASKED.format(element=element))
        apply(module, "distributed-autodiff")
        y = x / 64
        loss, w = run(module, "step", [y, mask, np.ones(())])
        wide = y.astype(np.float64)
        wanted = (wide * mask).sum() / mask.astype(np.float64).sum()
        assert float(w) == pytest.approx(1 - wanted, abs=tolerance)
        assert float(loss) == pytest.approx(wanted, abs=tolerance)


MASKED = """
func.func private @loss(
    %x: tensor<40000x{element}> {{train.input = #train.init<normal>}},
    %mask: tensor<40000x{element}> {{train.input = #train.init<normal>}},
    %w: tensor<{element}> {{train.parameter = "w", train.init = #train.init<normal>}}
) -> tensor<{element}> {{
  %y = nn.mul %x, %w : (tensor<40000x{element}>, tensor<{element}>) -> tensor<40000x{element}>
  %z = nn.mul %y, %mask :
      (tensor<40000x{element}>, tensor<40000x{element}>) -> tensor<40000x{element}>
  %s = nn.reduce <sum> %z dims <0> : (tensor<40000x{element}>) -> tensor<{element}>
  %n = nn.reduce <sum> %mask dims <0> : (tensor<40000x{element}>) -> tensor<{element}>
  %loss = nn.div %s, %n : (tensor<{element}>, tensor<{element}>) -> tensor<{element}>
  func.return %loss : tensor<{element}>
}}
train.step @step of @loss <sgd, lr = 1.0> accumulate <tokens, microbatches = 3>
"""


def test_a_loop_over_tokens_communicates_as_one_over_rows() -> None:
    """Sums of losses, and numbers of labels, are reduced once, outside of the loop."""
    program = compiled(Model(LOSSES["cross_entropy"]), mesh="d = 2", mode="data")
    (loop,) = of_kind(function(program.module, "step").body.block.ops, MicrobatchesOp)
    assert not collectives(loop.body())


def test_a_mean_over_rows_is_one_over_tokens() -> None:
    """Both are one program where microbatches have as many; the mean of means is refused."""

    def loss(m: Model, y: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
        return (y * (y / y.detach().abs().amax())).tanh().mean() + _each(y, labels).mean()

    texts = [str(compiled(Model(loss), how, **ALONE).module) for how in ("mean", "tokens")]
    assert texts[0] == texts[1]
    with pytest.raises(ShardirError) as e:
        compiled(Model(extent(_several, _all)), "mean", **ALONE)
    refused = "[G17] expected accumulate <tokens>, got <mean>: "
    assert str(e.value).count(refused) == extent(2, 1 + len(LOSSES))  # of `several` two
