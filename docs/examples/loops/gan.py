"""A GAN: two steps over two networks, in turn, and samples of the generator's average."""

import torch
from torch import nn, optim
from torch.nn.functional import softplus

import shardir

DECAY = 0.9


def build():
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)).double()
    critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)).double()
    gan = nn.ModuleDict({"maker": maker, "critic": critic})
    return gan, optim.Adam(maker.parameters(), lr=0.01), optim.Adam(critic.parameters(), lr=0.02)


def critic_loss(gan, real, noise):
    fake = gan["maker"](noise).detach()
    return softplus(-gan["critic"](real)).mean() + softplus(gan["critic"](fake)).mean()


def maker_loss(gan, noise):
    return softplus(-gan["critic"](gan["maker"](noise))).mean()


def batches(count):  # points on a circle, and noise
    g = torch.Generator().manual_seed(1)
    for _ in range(count):
        angle = 6.283 * torch.rand(16, dtype=torch.float64, generator=g)
        real = torch.stack([angle.cos(), angle.sin()], dim=1)
        yield real, torch.randn(16, 4, dtype=torch.float64, generator=g)


def train(steps=6):
    gan, of_maker, of_critic = build()
    real, noise = next(batches(1))
    program = shardir.compile(gan, mesh="dp = 2, tp = 2", plan="fsdp(dp)", steps={
        "critic": shardir.Step(critic_loss, (real, noise), optimizer=of_critic),
        "maker": shardir.Step(maker_loss, noise, optimizer=of_maker, ema=DECAY),
        "samples": shardir.Inference(lambda gan, noise: gan["maker"](noise), noise),
    })  # fmt: skip
    losses = []
    with program.ranks() as trainer:
        for real, noise in batches(steps):
            losses += [trainer["critic"].step(real, noise).item()]
            losses += [trainer["maker"].step(noise).item()]
            print(f"critic {losses[-2]:.6f}, maker {losses[-1]:.6f}")
        return losses, trainer.state_dict(), trainer.call("samples", noise, ema=True)


if __name__ == "__main__":
    train()
