"""Ten modules as their authors write them: they write to parameters and views, keep statistics,
teachers and codebooks in buffers, and change gradients by hand.

Each has an input of rows of WIDTH numbers (`Rotary` of sequences of such rows), and its outputs are
compared with targets of the input's shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

ROWS, WIDTH, LENGTH = 8, 8, 4


class WrittenParameters(nn.Module):
    """Weights that are clamped, normalized and masked before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.scale = nn.Parameter(torch.linspace(-2.0, 2.0, 16))
        self.register_buffer("mask", torch.rand(WIDTH, 16) > 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.first.weight.clamp_(-0.2, 0.2)
            self.second.weight.mul_(self.mask)
        self.scale.data.div_(self.scale.data.norm())
        self.first.bias.data[::2] = 0.05
        h = torch.tanh(self.first(x)) * self.scale
        return self.second(h)


class WrittenViews(nn.Module):
    """Activations that are written by views: heads, columns, a diagonal, rows of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).clone()
        heads = h.view(-1, 4, 4).transpose(0, 1)
        copied = heads.contiguous()
        copied.mul_(0.5)  # of a copy: h keeps its numbers
        heads[1] = copied[2]
        h.T[0] = 0.25
        h[:, 3:9:2].sin_()
        gram = (h.T @ h / len(h)).contiguous()
        gram.fill_diagonal_(1.0)
        for i in range(4):
            gram[i].mul_(i)
        out = h @ gram
        out += copied.transpose(0, 1).reshape(-1, 16)
        return self.down(torch.relu_(out))


class Queue(nn.Module):
    """The last rows that were seen, and how many, in buffers that are assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", F.normalize(torch.randn(16, WIDTH), dim=1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("full", torch.tensor(False), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        similar = F.softmax(x @ self.rows.clone().mT, dim=-1) @ self.rows
        if self.training:
            with torch.no_grad():
                self.rows = torch.cat([self.rows[len(x) :], F.normalize(x, dim=1)])
            self.seen = self.seen + len(x)
            self.full = self.full | (self.seen >= 16)
        return torch.where(self.full, similar, x)


class AssignedBuffers(nn.Module):
    """Layers within which a queue and a counter are assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.queues = nn.ModuleList([Queue() for _ in range(2)])
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        for layer, queue in zip(self.layers, self.queues, strict=True):
            x = queue(torch.tanh(layer(x))) + x / self.steps
        return x


class Teacher(nn.Module):
    """A student that follows the moving average of its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))
        self.teacher = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Linear(16, WIDTH))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, WIDTH))

    @torch.no_grad()
    def follow(self) -> None:
        for ours, theirs in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            theirs.mul_(0.9).add_(ours.detach(), alpha=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.follow()
        with torch.no_grad():
            wanted = self.teacher(x.flip(-1))
            self.center = self.center * 0.9 + wanted.mean(dim=0, keepdim=True) * 0.1
        found = self.student(x)
        return found - F.softmax(wanted - self.center, dim=-1)


class SpectralNorm(nn.Module):
    """Weights divided by their largest singular values, which a power iteration estimates."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations
        self.first = norm.spectral_norm(nn.Linear(WIDTH, 16))
        self.second = norm.weight_norm(nn.Linear(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.leaky_relu(self.first(x), 0.2, inplace=True))


class Rotary(nn.Module):
    """Attention whose queries and keys are rotated in place, with cosines from a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angles = torch.outer(torch.arange(2 * LENGTH).double(), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        out = torch.empty_like(x)
        out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., ::2] * sin + x[..., 1::2] * cos
        return out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
        o = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        return self.out(o.transpose(1, 2).flatten(2))


class RunningStatistics(nn.Module):
    """Batch norms of several kinds, and one whose statistics its author keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.frozen = nn.BatchNorm1d(WIDTH).eval()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.batch(self.first(x))
        with torch.no_grad():
            self.count.add_(1)
            self.mean += (h.mean(0) - self.mean) / self.count  # of all batches
            self.square.lerp_(h.square().mean(0), 0.1)
            torch.maximum(self.largest, h.abs().max(), out=self.largest)
        h = (h - self.mean) * torch.rsqrt(self.square - self.mean.square() + 1e-3)
        return self.frozen(self.second(h / self.largest))


class Reversed(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return -ctx.scale * gradients[0], None


class GradientReversal(nn.Module):
    """Features that a second head is to know nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(WIDTH, 16)
        self.head, self.other = nn.Linear(16, WIDTH), nn.Linear(16, WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = torch.tanh(self.features(x))
        return self.head(h) + 0.5 * self.other(Reversed.apply(h, 0.3)) / self.calls


class Codebook(nn.Module):
    """Vector quantization: the nearest code, gradients straight through, codes by moving
    averages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
        self.register_buffer("codes", torch.randn(6, 4))
        self.register_buffer("sizes", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.encoder(x)
        distances = (
            z.square().sum(1, keepdim=True) - 2 * z @ self.codes.T + self.codes.square().sum(1)
        )
        nearest = distances.argmin(1)
        chosen = F.embedding(nearest, self.codes)
        if self.training:
            with torch.no_grad():
                taken = F.one_hot(nearest, len(self.codes)).type_as(z)
                self.sizes.mul_(0.9).add_(taken.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(taken.T @ z, alpha=0.1)
                total = self.sizes.sum()
                smoothed = (self.sizes + 1e-3) / (total + len(self.codes) * 1e-3) * total
                self.codes.copy_(self.sums / smoothed.unsqueeze(1))
        commitment = F.mse_loss(z, chosen.detach())
        return self.decoder(z + (chosen - z).detach()), commitment


class BatchRenorm(nn.Module):
    """Batch renormalization: corrections to the running statistics, clamped by the step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("running_mean", torch.zeros(WIDTH))
        self.register_buffer("running_std", torch.ones(WIDTH))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.training:
            mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
            r_max = (1.0 + 0.5 * self.num_batches_tracked).clamp(1.0, 3.0)
            d_max = (0.25 * self.num_batches_tracked).clamp_(0.0, 5.0)
            r = (std.detach() / self.running_std).clamp(1 / r_max, r_max)
            d = ((mean.detach() - self.running_mean) / self.running_std).clamp(-d_max, d_max)
            x = (x - mean) / std * r + d
            self.running_mean += 0.1 * (mean.detach() - self.running_mean)
            self.running_std += 0.1 * (std.detach() - self.running_std)
            self.num_batches_tracked += 1
        else:
            x = (x - self.running_mean) / self.running_std
        return self.weight * x + self.bias


def loss_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    """The distance from the targets, and a second output of a module as a share of it."""
    if isinstance(outputs, tuple):
        return F.mse_loss(outputs[0], targets) + 0.25 * outputs[1]
    return F.mse_loss(outputs, targets)


@dataclass(frozen=True)
class StatefulModule:
    """A module, and how it is compiled; `paired`: it has a product after another one."""

    made: Callable[[], nn.Module]
    shape: tuple[int, ...] = (ROWS, WIDTH)
    trace: bool = False
    paired: bool = True


STATEFUL = {
    "written parameters": StatefulModule(WrittenParameters, paired=False),
    "written views": StatefulModule(WrittenViews, paired=False),
    "assigned buffers": StatefulModule(AssignedBuffers, paired=False),
    "teacher": StatefulModule(Teacher),
    "spectral norm": StatefulModule(SpectralNorm, paired=False),
    "rotary": StatefulModule(Rotary, (ROWS, LENGTH, WIDTH)),
    "running statistics": StatefulModule(RunningStatistics),
    "gradient reversal": StatefulModule(GradientReversal, trace=True),
    "codebook": StatefulModule(Codebook),
    "batch renorm": StatefulModule(BatchRenorm, paired=False),
}
