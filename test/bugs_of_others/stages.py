"""Stages of a pipeline, and states that forward changes."""

from typing import Any

import torch
from torch import Tensor, nn

from bugs_of_others.record import DOUBLE, Batch, bug, bugs_in

TITLE = "Stages and states"


class Rows(nn.Module):
    @staticmethod
    def batches() -> list[Batch]:
        return [{"x": torch.arange(16.0, **DOUBLE).view(4, 4).sin()}]


@bug(
    "NVIDIA/Megatron-LM#7227, pytorch/torchtitan#4486",
    """The norm of all gradients counted a table twice that the first and the last stage share: 40
    in place of 28.28.""",
    mesh="dp = 1", plan='values "head*" : stage = 1', clip="norm, max = 1.0",
    stages="1f1b, ranks = 2", accumulate="mean, microbatches = 2",
    prints="gradient_norm: 28.28; gradient of table.weight: [[0.7071], [0.7071]]",
)  # fmt: skip
class NormOfATableOnTwoStages(nn.Module):
    """Each element's gradient is 10 of the table, and 10 of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(2, 1, **DOUBLE), nn.Linear(1, 2, False, **DOUBLE)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return 20 * h.mean() + 10 * self.head(h * 0 + 1).mean(0).sum()

    @staticmethod
    def batches() -> list[Batch]:
        return [{"ids": torch.tensor([0, 1, 0, 1])}]


@bug(
    "pytorch/pytorch#180952, pytorch/pytorch#181365",
    """A schedule that computes gradients of weights apart (zero bubble) counted a weight twice that
    its stage uses twice.""",
    mesh="dp = 1", plan='values "shared*" : stage = 1',
    stages="zb-h1, ranks = 2", accumulate="mean, microbatches = 4", prints="loss: 0.0007446",
)  # fmt: skip
class WeightUsedTwiceOnAStage(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = (nn.Linear(4, 4, False, **DOUBLE) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(self.shared(self.first(x))).square().mean()


@bug(
    "pytorch/pytorch#127964, pytorch/pytorch#179279",
    "Schedules sent values to the next stage alone: no skip connections over several stages.",
    mesh="dp = 1", stages="1f1b, ranks = 4", accumulate="mean, microbatches = 2",
    plan='values "layers.1*" : stage = 1\nvalues "layers.2*" : stage = 2\n'
    'values "layers.3*" : stage = 3',
    prints="loss: 0.1984",
)  # fmt: skip
class SkipOverStages(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, **DOUBLE) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.layers[0](x))
        b = torch.tanh(self.layers[1](a))
        c = torch.tanh(self.layers[2](b) + b)
        return (self.layers[3](c) + a).square().mean()


@bug(
    "pytorch/pytorch#37246, pytorch/pytorch#28959",
    "`max_norm` of a table, which changes the table in forward, ended in an error.",
    mesh="d = 2", plan="ddp", prints="losses: [0.5, 0]; table.weight: [[0, 0], [0.6, 0.8]]",
)  # fmt: skip
class TableWithALargestNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 2, max_norm=1.0, **DOUBLE)
        with torch.no_grad():
            self.table.weight.copy_(torch.tensor([[3.0, 4.0], [0.6, 0.8]]))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()

    @staticmethod
    def batches() -> list[Batch]:
        return [{"ids": torch.tensor([0, 0])}] * 2


@bug(
    "pytorch/pytorch#63916, pytorch/pytorch#64472",
    "A buffer that forward assigns anew, `self.count = self.count + 1`, was not synchronised.",
    mesh="d = 2", plan="ddp", prints="losses: [0.25, 1]; count: 2",
)  # fmt: skip
class BufferAssignedAnew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2, **DOUBLE))
        self.register_buffer("count", torch.zeros((), **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return (self.scale * 0 + x * self.count).square().mean()

    @staticmethod
    def batches() -> list[Batch]:
        return [{"x": torch.full((4, 2), 0.5, **DOUBLE)}] * 2


@bug(
    "leggedrobotics/rsl_rl#226",
    "Running statistics were those of each rank's own rows.",
    mesh="d = 2", plan="ddp", prints="norm.running_mean: [0.375]; norm.running_var: [2.392]",
)  # fmt: skip
class BatchNormOverRanks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1, **DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        return (self.norm(x) ** 3).mean()

    @staticmethod
    def batches() -> list[Batch]:
        return [{"x": torch.tensor([[0.0], [2], [4], [9]], **DOUBLE)}]


@bug(
    "pytorch/pytorch#112429, pytorch/pytorch#95050",
    "A copy was taken for a view, or a view for a copy, and a write changed the wrong one.",
    mesh="d = 2", x="[{d}]", prints="result: [[0, 2, 2, 6], [4, 10, 6, 14]]",
)  # fmt: skip
def writes_to_a_copy_and_a_view(x: Any = torch.arange(8.0).view(2, 4)):
    y = x.clone()
    heads = y.view(2, 2, 2).transpose(0, 1).contiguous()  # a copy
    heads.mul_(0.5)
    y.view(2, 2, 2)[:, :, 1].mul_(2.0)  # a view
    return y + 0 * heads.sum()


BUGS = bugs_in(globals())
