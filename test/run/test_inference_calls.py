"""Programs for inference that are called from Python, and scalars among inputs, on ranks."""

from collections.abc import Iterator
from copy import deepcopy
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from support.extent import extent
from torch import nn

import shardir
from shardir.diagnostics import ShardirError

X, SCALE, BIAS = torch.randn(4, 8), torch.tensor(2.0), torch.ones(8)


class Scaled(nn.Module):
    """Outputs of several forms, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: torch.Tensor, *, bias: Any = None) -> dict[str, Any]:
        self.calls.add_(1)
        h = self.linear(x) * scale + bias
        return {"half": h.bfloat16(), "none": None, "top": h.argmax(-1), "pair": (h, 3),
                "calls": self.calls + 0}  # fmt: skip


def test_a_call_returns_what_the_module_does() -> None:
    model = Scaled().eval()
    program = shardir.compile(
        deepcopy(model), (X, SCALE), keywords={"bias": BIAS}, mesh="d = 2", plan="ddp", train=False
    )
    for k in range(2):
        given = torch.randn(4, 8), torch.tensor(3.0 + k)
        with torch.no_grad():
            wanted = model(*given, bias=BIAS)
        found = program(*given, bias=BIAS)
        assert found.keys() == wanted.keys() and found["none"] is None and found["pair"][1] == 3
        torch.testing.assert_close(found["pair"][0], wanted["pair"][0])
        torch.testing.assert_close(found["half"], wanted["half"])
        assert torch.equal(found["top"], wanted["top"])
        assert torch.equal(found["calls"], wanted["calls"])
    with pytest.raises(ShardirError, match=r"expected scale of \[\] in batch 0, got \[8\]"):
        program(X, BIAS, bias=BIAS)
    with pytest.raises(ShardirError, match="scale"):
        program(X)


class Sums(nn.Module):
    """The arguments of `*args` and `**kwargs` have names too."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor, **named: torch.Tensor) -> Any:
        return x + 2 * others[0] + 3 * others[1] + 4 * named["last"]


def test_arguments_in_any_number_are_inputs() -> None:
    plan = {"inputs": "[{d}]", 'inputs "others.1"': "[{}, {d}]", 'inputs "last"': "[]"}
    program = shardir.compile(
        Sums(), (X, X, X), keywords={"last": X}, mesh="d = 2", plan=plan, train=False
    )
    given = [torch.randn(4, 8) for _ in range(4)]
    torch.testing.assert_close(
        program(*given[:3], last=given[3]), Sums()(*given[:3], last=given[3])
    )


class Weighted(nn.Module):
    """A loss that a scalar scales."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() * scale


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    for k in range(4):
        yield torch.randn(4, 8, generator=drawn), torch.tensor(0.5 + k)


@pytest.mark.parametrize(
    ("microbatches", "fed"),
    extent([(None, False), (2, True)], [*product((None, 2), (True, False))]),
)
def test_scalars_are_those_of_each_batch(
    microbatches: int | None, fed: bool, tmp_path: Any
) -> None:
    model = Weighted()
    copy = deepcopy(model)
    accumulate = f"mean, microbatches = {microbatches}" if microbatches else None
    program = shardir.compile(
        copy,
        (X, SCALE),
        optimizer="sgd, lr = 0.05",
        mesh="d = 2",
        plan="ddp",
        accumulate=accumulate,
    )
    steps = 4 // (microbatches or 1)
    if fed:
        losses = program.run(batches(), steps=steps).losses["step"]
    else:
        losses = shardir.run(program.save(tmp_path / "out", batches()), steps=steps).losses["step"]
    optimizer, wanted, given = torch.optim.SGD(model.parameters(), lr=0.05), [], batches()
    for _ in range(steps):
        several = [model(*next(given)) for _ in range(microbatches or 1)]
        loss = torch.stack(several).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)


def test_a_training_step_is_not_called() -> None:
    program = shardir.compile(Weighted(), (X, SCALE), optimizer="sgd, lr = 0.1", mesh="d = 2")
    with pytest.raises(ShardirError, match="expected a program for inference, got a training step"):
        program(X, SCALE)
