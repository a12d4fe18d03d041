"""Presets of attention blocks and of uneven parameters on real ranks: they train as in torch."""

from pathlib import Path

import pytest
import torch
from support.attention_blocks import FEATURES, Block, Case
from support.extent import extent, long_form
from torch import nn

import shardir

STEPS = 2
BLOCKS = [
    (Case("apart", 8, 2), "tp = 4", "megatron"),
    (Case("timm", 4, 4, 2), "tp = 4", "megatron"),
    (Case("split", 4, 2), "tp = 4", "megatron"),
    (Case("split", 4, 2), "dp = 2, tp = 4", "fsdp(dp) * megatron(tp)"),
]
MORE = [
    (Case(form, 8, 2, samples), mesh, plan)
    for form in ("repeated", "expanded", "grouped", "pair", "heads", "slices", "neox", "apart")
    for samples, mesh, plan in (
        (2, "tp = 4", "megatron+sequence"), (12, "dp = 3, tp = 2", "fsdp(dp) * megatron(tp)"),
    )
]  # fmt: skip
MORE += [(Case("apart", 12, 6), "tp = 4", "megatron"), (Case("apart", 6, 3), "tp = 2", "megatron")]


@pytest.mark.filterwarnings("ignore:.*presets leave")
@pytest.mark.parametrize(("case", "mesh", "plan"), extent(BLOCKS[2:3], BLOCKS + MORE))
def test_a_preset_trains_a_block_as_torch_does(case: Case, mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    width = case.heads * FEATURES
    batches = [torch.randn(2, case.samples, 6, width) for _ in range(STEPS)]
    trains_as_torch(Block(case), [(x, y) for x, y in batches], mesh, plan, "sgd")


class Uneven(nn.Module):
    """A network none of whose dimensions 3 or 6 devices divide."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(11, 7), nn.Linear(7, 16)
        self.norm, self.down = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.norm(self.up(self.table(ids).mean(1)))))


UNEVEN = [("dp = 3", "fsdp"), ("dp = 3", "zero1"), ("a = 2, b = 3", "fsdp")]
FURTHER = [
    ("a = 2, b = 3", "ddp * fsdp"), ("a = 2, b = 3", "zero2(a) * fsdp(b)"),
    ("tp = 2, dp = 3", "megatron(tp) * fsdp(dp)"), ("dp = 5", "fsdp"),
]  # fmt: skip


@long_form
@pytest.mark.parametrize(("mesh", "plan"), UNEVEN + FURTHER)
def test_uneven_parameters_train_as_in_torch(mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    batches = [(torch.randint(0, 11, (30, 4)), torch.randn(30, 5)) for _ in range(STEPS)]
    trains_as_torch(Uneven(), batches, mesh, plan, "adamw")


def test_uneven_parameters_go_on_from_a_checkpoint_on_another_mesh(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Uneven()
    batches = [(torch.randint(0, 11, (6, 4)), torch.randn(6, 5)) for _ in range(2 * STEPS)]
    meshes = "dp = 3", "dp = 2"
    first, other = (compiled(model, batches[0], mesh, "fsdp", "adamw") for mesh in meshes)
    first.run(batches, steps=STEPS, checkpoints=tmp_path)
    report = other.run(batches[STEPS:], steps=2 * STEPS, resume=tmp_path)
    losses, _ = by_torch(model, batches, "adamw")
    torch.testing.assert_close(report.losses["step"], losses[STEPS:], rtol=1e-5, atol=0)
    torch.testing.assert_close(other.state_dict(), dict(model.state_dict()), rtol=1e-4, atol=1e-5)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}
MAX_NORM = 0.5


def compiled(model: nn.Module, batch: tuple, mesh: str, plan: str, optimizer: str):
    x, y = batch
    return shardir.compile(
        model, x, labels=y, loss=nn.functional.mse_loss, mesh=mesh, plan=plan,
        optimizer=OPTIMIZERS[optimizer](model.parameters()), clip=f"norm, max = {MAX_NORM}",
    )  # fmt: skip


def by_torch(model: nn.Module, batches: list, optimizer: str) -> tuple[list[float], dict]:
    """Train a model in eager torch; return its losses and states."""
    losses, steps = [], OPTIMIZERS[optimizer](model.parameters())
    for x, y in batches:
        steps.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        steps.step()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def trains_as_torch(model: nn.Module, batches: list, mesh: str, plan: str, optimizer: str) -> None:
    program = compiled(model, batches[0], mesh, plan, optimizer)
    report = program.run(batches, steps=STEPS)
    losses, states = by_torch(model, batches, optimizer)
    torch.testing.assert_close(report.losses["step"], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(program.state_dict(), states, rtol=1e-4, atol=1e-5)
