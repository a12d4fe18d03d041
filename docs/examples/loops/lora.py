"""LoRA: adapters of two frozen layers are trained, and then merged into the weights."""

import torch
from torch import nn

import shardir


class Adapted(nn.Module):
    """A linear layer that does not train, and a product of two narrow matrices that does."""

    def __init__(self, layer, width=2):
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(width, layer.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(layer.out_features, width))

    def forward(self, x):
        return self.layer(x) + x @ self.down.T @ self.up.T

    def merged(self):
        self.layer.weight += self.up @ self.down
        return self.layer


def build():
    torch.manual_seed(0)
    layers = Adapted(nn.Linear(16, 32)), nn.GELU(), Adapted(nn.Linear(32, 4))
    model = nn.Sequential(*layers).double()
    adapters = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(adapters, lr=0.03)


def batches(count):
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(8, 16, generator=g).double(), torch.randint(4, (8,), generator=g)


def train(steps=5):
    (model, optimizer), (x, labels) = build(), next(batches(1))
    program = shardir.compile(
        model, x, labels=labels, loss=nn.functional.cross_entropy, optimizer=optimizer,
        mesh="dp = 2, tp = 2", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for x, labels in batches(steps):
            losses.append(trainer.step(x, labels).item())
            print(f"loss {losses[-1]:.6f}")
        model.load_state_dict(trainer.state_dict())
    with torch.no_grad():
        trained = model(x)
        merged = nn.Sequential(model[0].merged(), model[1], model[2].merged())
        print(f"largest difference {(merged(x) - trained).abs().max().item():.1e}")
        return losses, trained, merged


if __name__ == "__main__":
    train()
