"""Writes of forward to parameters, buffers, views and detached tensors, against eager torch: the
loss of each step, and every parameter and buffer after three."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from xdsl.dialects.func import FuncOp

import shardir
from shardir.diagnostics import ShardirError
from shardir.dialects.train import Role, arguments, updated_keys
from shardir.frontends.torch.weights import array_of
from shardir.interpret.evaluator import function, run


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.count: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def assigned(m: Inner, x: Tensor) -> Tensor:
    m.count = m.count + 1
    return m.layer(x) * m.count


def averaged(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        m.mean = m.mean.lerp(y.mean(0), 0.5)
    return y - m.mean


def clamped(m: Inner, x: Tensor) -> Tensor:
    with torch.no_grad():
        m.layer.weight.clamp_(-0.1, 0.1)
    return m.layer(x)


def data_written(m: Inner, x: Tensor) -> Tensor:
    m.layer.weight.data = m.layer.weight.data * 0.5
    m.layer.bias.data.add_(1.0)
    return m.layer(x)


def scaled_activation(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    with torch.no_grad():
        y[0].mul_(3.0)
    return y.square()


def scaled_alias(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y.detach()
    z.mul_(3.0)
    return y.square() + z


def written_out(m: Inner, x: Tensor) -> Tensor:
    y, z = m.layer(x), torch.empty(4, 4, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(y, 2.0, out=z)
    return y + z


def converted_out(m: Inner, x: Tensor) -> Tensor:
    y, z = m.layer(x), torch.empty(4, 4, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(y.float(), 2.3, out=z)
    return y + z


def converted_part(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    y[1:3] = (x[:2] * 0.3).to(torch.int64)
    y[0].copy_(m.layer(x)[0].float())
    return y


def copied(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    z = y.view(4, 2, 2).transpose(0, 1).contiguous()
    z.mul_(0.5)
    return y + z.transpose(0, 1).reshape(4, 4)


def transposed(m: Inner, x: Tensor) -> Tensor:
    y = m.layer(x)
    y.T[0] = 0.25
    y.diagonal().fill_(3.0)
    return y


def without_training(m: Inner, x: Tensor) -> Tensor:
    norm = nn.BatchNorm1d(4, dtype=x.dtype).eval()
    return norm(m.layer(x))


WRITES = [
    assigned, averaged, clamped, data_written, scaled_activation, scaled_alias, written_out, copied,
    converted_out, converted_part,    transposed, without_training,
]  # fmt: skip


def module(forward: Callable[[Inner, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    inner = type("Writing", (Inner,), {"forward": forward})()
    return nn.Sequential(nn.Linear(4, 4), inner).double()


def steps(found: Any, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Run the steps of a program in the interpreter; return the last states, and losses."""
    f = function(found.module, "step")
    states = {name: array_of(x) for name, x in found.imported.values.items()}
    losses = []
    for batch in batches:
        inputs = iter([array_of(x) for x in batch])
        given = [
            next(inputs) if a.role is Role.INPUT else states[a.key or ""] for a in arguments(f)
        ]  # fmt: skip
        results = run(found.module, "step", given)
        states |= {k: v for k, v in zip(updated_keys(f), results, strict=True) if k is not None}
        losses.append(float(results[0]))
    return {name: torch.as_tensor(x) for name, x in states.items()} | {
        "losses": torch.tensor(losses, dtype=torch.float64)
    }


@pytest.mark.parametrize("forward", WRITES)
def test_writes_are_those_of_torch(forward: Callable[[Inner, Tensor], Tensor]) -> None:
    model = module(forward)
    batches = [(torch.randn(4, 4).double(), torch.randn(4, 4).double()) for _ in range(3)]
    program = shardir.compile(
        model, batches[0][0], labels=batches[0][1], loss=mse_loss, optimizer="sgd, lr = 0.1",
        pipeline="single-device",
    )  # fmt: skip
    found = steps(program, batches)
    model = deepcopy(model)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in batches:
        optimizer.zero_grad()
        losses.append(loss := mse_loss(model(x), y))
        loss.backward()
        optimizer.step()
    wanted = dict(model.named_parameters()) | dict(model.named_buffers())
    torch.testing.assert_close(found["losses"], torch.stack(losses).detach())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value.detach())


class Returned(nn.Module):
    """Returns a buffer, or a view of it, that it writes in place or assigns anew."""

    def __init__(self, anew: bool, view: bool) -> None:
        super().__init__()
        self.layer, self.anew, self.view = nn.Linear(4, 4), anew, view
        self.register_buffer("seen", torch.zeros(()))
        self.seen: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        before = self.seen.view(()) if self.view else self.seen
        if self.anew:
            self.seen = self.seen + x.mean()
        else:
            self.seen.add_(x.mean())
        return {"loss": self.layer(x).sum(), "before": before, "after": self.seen}


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_a_returned_buffer_has_the_value_of_torch(anew: bool, view: bool, train: bool) -> None:
    """A buffer that is assigned anew is another tensor in torch, and a result stays the old one."""
    torch.manual_seed(0)
    model, x = Returned(anew, view).double(), torch.randn(3, 4).double()
    options: dict[str, Any] = {"optimizer": "sgd, lr = 0"} if train else {"train": False}
    program = shardir.compile(deepcopy(model), x, pipeline="single-device", **options)
    f = next(f for f in program.module.body.ops if isinstance(f, FuncOp) and f.body.blocks)
    values = {name: array_of(v) for name, v in program.imported.values.items()}
    given = [array_of(x) if a.key is None else values[a.key] for a in arguments(f)]
    results = run(program.module, f.sym_name.data, given)
    found = [r for r, key in zip(results, updated_keys(f), strict=True) if key is None]
    for value, result in zip(model(x).values(), found, strict=True):
        torch.testing.assert_close(torch.as_tensor(result), value.detach())


class Counts(nn.Module):
    """Reads a buffer of the last step, and writes it with numbers of another type."""

    def __init__(self, source: torch.dtype | None, held: torch.dtype) -> None:
        super().__init__()
        self.layer, self.source = nn.Linear(4, 4), source
        self.register_buffer("held", torch.zeros(4, dtype=held))
        self.held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        before = self.held.to(x.dtype)
        number: Any = 2.7
        self.held.copy_(number if self.source is None else (x[0] * 90).to(self.source))
        return self.layer(x) + before + self.held


@pytest.mark.parametrize(("source", "held"), [
    (torch.bool, torch.int64), (torch.int64, torch.uint8), (torch.int64, torch.int8),
    (torch.float64, torch.int32), (torch.float64, torch.bfloat16), (torch.float64, torch.bool),
    (None, torch.int32),
])  # fmt: skip
def test_a_buffer_keeps_its_type(source: torch.dtype | None, held: torch.dtype) -> None:
    """torch.export leaves the conversion of what is written out of the graph."""
    torch.manual_seed(0)
    model = Counts(source, held)
    model.layer.double()
    batches = [(torch.randn(4, 4).double() * 5, torch.randn(4, 4).double()) for _ in range(3)]
    program = shardir.compile(
        model, batches[0][0], labels=batches[0][1], loss=mse_loss, optimizer="sgd, lr = 0",
        pipeline="single-device",
    )  # fmt: skip
    found = steps(program, batches)
    losses = [mse_loss(model(x), y).detach() for x, y in batches]
    torch.testing.assert_close(found["losses"], torch.stack(losses))
    torch.testing.assert_close(found["held"].to(held), model.held)


def refused(forward: Callable[[Inner, Tensor], Tensor]) -> str:
    with pytest.raises(ShardirError) as found:
        shardir.compile(
            module(forward), torch.ones(4, 4).double(), labels=torch.ones(4, 4).double(),
            loss=mse_loss, optimizer="sgd, lr = 0.1", mesh="dp = 2",
        )  # fmt: skip
    return str(found.value)


def test_what_a_program_would_lose_is_refused() -> None:
    def hooked(m: Inner, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.register_hook(lambda g: -g)
        return y

    def reshaped(m: Inner, x: Tensor) -> Tensor:
        m.count = torch.zeros(3)
        return m.layer(x)

    def reread(m: Inner, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        x.T.masked_fill_(x.sum() > 0, -0.6)
        return m.layer(flat.reshape(4, 4))

    def flattened(m: Inner, x: Tensor) -> Tensor:
        with torch.no_grad():
            m.layer.weight.t().tril_()
        y = m.layer.weight * 2
        with torch.no_grad():
            y.flatten().add_(1.0)
        return x @ y

    def strided(m: Inner, x: Tensor) -> Tensor:
        y = m.layer(x)
        y.T.masked_fill_(y.T > 0, -0.6)
        return x + y.as_strided((4,), (1,), 2)

    def windowed(m: Inner, x: Tensor) -> Tensor:
        windows = m.layer.weight.unfold(1, 2, 3)
        with torch.no_grad():
            torch.mul(windows, 2.0, out=windows)
        return m.layer(x)

    assert "a write to windows that overlap or leave elements out" in refused(windowed)
    for forward in (reread, flattened):
        message = "expected no write through a transposed view of a tensor of which a view is read"
        assert message in refused(forward)
    assert "expected as_strided of a contiguous tensor, got one of the strides" in refused(strided)
    assert "expected gradients without hooks, got register_hook" in refused(hooked)
    assert "expected buffer 1.count of one shape and dtype" in refused(reshaped)


def test_a_number_of_python_that_changes_is_named() -> None:
    def counted(m: Inner, x: Tensor) -> Tensor:
        m.steps = 1 + vars(m).get("steps", 0)
        return m.layer(x)

    model = module(counted)
    model(torch.ones(4, 4).double())
    with pytest.warns(UserWarning, match="forward changes 1.steps, a number or text of Python"):
        shardir.compile(
            model, torch.ones(4, 4).double(), labels=torch.ones(4, 4).double(), loss=mse_loss,
            optimizer="sgd, lr = 0.1", mesh="dp = 2",
        )  # fmt: skip
