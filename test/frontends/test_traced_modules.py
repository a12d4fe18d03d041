"""Modules that are traced: gradients that are written by hand are those of autograd, and those of
the zoo are those of torch, as they are where modules are exported and differentiated."""

from itertools import product
from typing import Any

import pytest
import torch
from architectures import ZOO
from support.extent import extent, sampled
from support.modules.imported import Values, assert_equal, in_torch, traced, traced_in_numpy
from support.modules.zoo import IMPORTED, PLANS, in_torch_alone
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu

import shardir
from shardir.diagnostics import ShardirError

NOT_TRACED = {
    "BEiT": "retains what it computes, which is without values",
    "DLRM, bags": "what torch saves of a bag on a CPU has another shape than it says",
    "GPT-OSS": "torch traces grouped products in bf16 only",
    "Mixtral": "torch traces grouped products in bf16 only",
}

WITHOUT_COLUMNS = ["nn.MultiheadAttention", "DCGAN, generator", "DCGAN, discriminator"]
"""Architectures in whose traced products megatron finds no columns."""

SAMPLE = (("MNIST", "fsdp"),)
"""What the default form tests."""


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of a smooth function."""

    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        ctx.save_for_backward(*args)
        return args[0].round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * torch.sigmoid(x) * 2


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(16, 8), nn.Linear(8, 12)
        self.norm, self.down = nn.LayerNorm(12), nn.Linear(12, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.norm(Rounded.apply(self.up(self.table(x))))))


def loss_of(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(outputs.flatten(0, 1), labels.flatten())


def quantized() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    return Quantized(), torch.randint(16, (8, 4)), torch.randint(16, (8, 4))


@pytest.mark.parametrize("plan", sampled(PLANS, 1))
def test_a_gradient_that_is_written_by_hand_is_used(plan: str) -> None:
    model, x, labels = quantized()
    found = traced(model, x, (labels,), loss_of, mesh="dp = 2, tp = 2")
    wanted = in_torch(model, lambda m: loss_of(m(x), labels))
    assert all(abs(g).max() > 0 for g in wanted.gradients.values())
    assert_equal(traced_in_numpy(found, *PLANS[plan]), wanted, 1e-4)


def test_ranks_train_with_gradients_that_are_written_by_hand() -> None:
    model, x, labels = quantized()
    reference, losses = Quantized(), []
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(loss_of(reference(x), labels))
        losses[-1].backward()
        optimizer.step()
    program = shardir.compile(
        model, x, labels=labels, loss=loss_of, optimizer="sgd, lr = 0.5", trace=True,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    report = program.run(steps=3)
    assert torch.allclose(torch.tensor(report.losses["step"]), torch.stack(losses), rtol=1e-5)
    for name, value in program.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], rtol=1e-4, atol=1e-5), name


TRACED = [
    (name, plan) for name, plan in product(IMPORTED, PLANS)
    if name not in NOT_TRACED and not (plan == "megatron" and name in WITHOUT_COLUMNS)
]  # fmt: skip


def traced_architecture(name: str) -> Any:
    """Return an architecture's example, and what is traced of it."""
    architecture = ZOO[name]
    example = architecture.make()
    loss = architecture.loss_function or (lambda o: o if isinstance(o, Tensor) else o["loss"])
    return example, traced(
        example.module, example.args, example.labels, loss, example.kwargs, "dp = 2, tp = 2"
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan"), extent(SAMPLE, tuple(TRACED)))
def test_loss_and_gradients_are_those_of_torch(name: str, plan: str) -> None:
    example, found = traced_architecture(name)
    wanted = in_torch_alone(ZOO[name], example)
    assert_equal(traced_in_numpy(found, *PLANS[plan]), wanted, 1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", extent(WITHOUT_COLUMNS[:1], WITHOUT_COLUMNS))
def test_without_columns_megatron_is_an_error_and_other_presets_split(name: str) -> None:
    example, found = traced_architecture(name)
    with pytest.raises(ShardirError, match=r"\[N5\] expected columns"):
        traced_in_numpy(found, "train", "megatron(tp)")
    with pytest.warns(UserWarning, match=r"\[N5\] expected columns.*devices compute the same"):
        given = traced_in_numpy(found, "train", "fsdp(dp) * megatron(tp)")
    assert_equal(given, in_torch_alone(ZOO[name], example), 1e-4)


class Diagonal(nn.Module):
    """Writes to a part of a tensor, by a view."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.diagonal().add_(1.0)
        return y.square().mean()


def test_a_write_to_a_view_is_in_the_trace() -> None:
    torch.manual_seed(0)
    found = traced(model := Diagonal(), x := torch.ones(4, 4))
    assert_equal(traced_in_numpy(found, "train"), in_torch(model, lambda m: m(x)), 1e-5)


def test_a_program_that_does_not_train_is_not_traced() -> None:
    model, x, _ = quantized()
    with pytest.raises(ShardirError, match="expected no trace with train=False, got True"):
        shardir.compile(model, x, train=False, mesh="dp = 2", trace=True)


def test_values_of_a_step() -> None:
    """The momentum of the first step is the gradient: a product of two numbers."""
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(3.0)
    found = traced(model, torch.full((2, 1), 5.0), (), lambda y: y.mean())
    assert_equal(
        traced_in_numpy(found), Values(15.0, {"weight": torch.full((1, 1), 5.0).numpy()}), 1e-6
    )
