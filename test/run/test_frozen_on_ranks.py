"""Adapters beside frozen weights on real ranks: they train as in torch, and frozen weights stay."""

import pytest
import torch
from support.extent import extent
from torch import nn

import shardir

STEPS = 3


class Adapted(nn.Module):
    """Two frozen layers, each with two narrow ones beside it that are trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(8, 32).requires_grad_(False)
        self.down = nn.Linear(32, 8).requires_grad_(False)
        self.up_a, self.up_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 32, bias=False)
        self.down_a, self.down_b = nn.Linear(32, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.gelu(self.up(x) + self.up_b(self.up_a(x)))
        return self.down(h) + self.down_b(self.down_a(h))


@pytest.mark.parametrize(
    "plan",
    extent(["megatron(tp) * fsdp(dp)"], ["megatron(tp) * fsdp(dp)", "ddp", "fsdp", "zero1"]),
)
def test_adapters_train_as_in_torch(plan: str) -> None:
    model = Adapted()
    start = {name: x.clone() for name, x in model.state_dict().items()}
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(STEPS)]
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    program = shardir.compile(
        model, batches[0][0], labels=batches[0][1], loss=nn.functional.mse_loss,
        optimizer=optimizer, mesh="dp = 2, tp = 2", plan=plan,
    )  # fmt: skip
    report = program.run(batches, steps=STEPS)

    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(report.losses["step"], losses, rtol=1e-5, atol=0)
    found = program.state_dict()
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(found[f"{k}.weight"], start[f"{k}.weight"]) for k in ("up", "down"))
