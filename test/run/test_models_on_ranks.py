"""Modules of torch on real ranks: losses, weights and buffers are those of torch on one device."""

import inspect

import pytest
import torch
from architectures import ZOO
from support.extent import long_form
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardir

STEPS = 3

CLUSTER = (
    "levels [node = 4 {bandwidth = 1e+9, latency = 1e-7}], memory = 1000000000 "
    "{bandwidth = 1e+11}, flops {f32 = 1e+9}"
)
"""Slow devices with links of low latency, on which a search splits small layers too."""


class Block(nn.Module):
    """A block of a transformer, with a tied head, a batch norm, whose statistics change, a
    checkpoint and an op that only torch has."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.batch = nn.Linear(16, 32), nn.Linear(32, 16), nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.table(ids)
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(o.transpose(1, 2).flatten(2))
        h = h + checkpoint(lambda h: self.down(nn.functional.gelu(self.up(h))), h,
                           use_reentrant=False)  # fmt: skip
        h = h + torch.special.i0e(h)
        h = self.batch(h.transpose(1, 2)).transpose(1, 2)
        logits = self.head(h)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"logits": logits, "loss": loss}


def test_training_is_that_of_torch_on_one_device() -> None:
    torch.manual_seed(0)
    model = Block()
    batches = [
        {"ids": torch.randint(32, (8, 6)), "labels": torch.randint(32, (8, 6))}
        for _ in range(STEPS)
    ]  # fmt: skip
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.SGD(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.05}],
        lr=0.1, momentum=0.9, weight_decay=0.01,
    )  # fmt: skip
    program = shardir.compile(
        model, batches[0], optimizer=optimizer, mesh="dp = 2, tp = 2", mode="auto"
    )
    report = program.run(batches, steps=STEPS)

    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(report.losses["step"], losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(program.state_dict(), dict(model.state_dict()), rtol=1e-4, atol=1e-5)


GIVEN = (
    ("MNIST", "fsdp"), ("Llama", "megatron(tp) * fsdp(dp)"), ("BERT", "megatron(tp)"),
    ("T5", "fsdp"), ("Mixtral", "fsdp"), ("Mamba", "ddp"), ("ViT", "megatron(tp) * fsdp(dp)"),
    ("Swin", "fsdp"), ("ConvNeXt", "ddp"), ("Whisper", "fsdp"), ("CLIP", "fsdp"),
    ("nn.Transformer", "megatron(tp) * fsdp(dp)"), ("DLRM", "ddp"),
    ("GRU", "ddp"), ("Gemma", "megatron(tp)"),
)  # fmt: skip
SEARCHED = (("MNIST", "2d"), ("GPT-2", "fsdp"), ("BERT", None), ("nn.TransformerEncoder", None))
SAMPLE = tuple((*each, mode) for found, mode in ((SEARCHED, "auto"), (GIVEN, "semi_auto"))
               for each in found)  # fmt: skip
"""Architectures of the zoo, each with a plan, and what decides on the layouts that it leaves
open."""


@long_form
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan", "mode"), SAMPLE)
def test_architectures_train_as_in_torch(name: str, plan: str | None, mode: str) -> None:
    architecture = ZOO[name]
    example = architecture.make()
    model, optimizer = example.module, torch.optim.SGD(example.module.parameters(), lr=0.01)
    batch = {**bound(model, example.args), **example.kwargs}
    program = shardir.compile(
        model, batch, labels=example.labels, loss=architecture.loss_function, optimizer=optimizer,
        mesh="dp = 2, tp = 2", cluster=CLUSTER, plan=plan, mode=mode,
    )  # fmt: skip
    assert "dist." in program.text.partition("func.func")[2]
    given = batch if example.labels is None else (batch, example.labels)
    report = program.run([given] * STEPS, steps=STEPS)

    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = architecture.loss(example, model(**batch))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(report.losses["step"], losses, rtol=1e-4, atol=0)
    torch.testing.assert_close(program.state_dict(), dict(model.state_dict()), rtol=1e-3, atol=1e-5)


def bound(model: nn.Module, args: tuple[object, ...]) -> dict[str, object]:
    """The positional arguments of a module, by their names."""
    return dict(inspect.signature(model.forward).bind_partial(*args).arguments)
