"""No emitted program reads a value that it has freed."""

import pytest
import torch
from support.extent import extent
from support.freed import reads_of_freed
from torch import nn

import shardir


def test_reads_are_found() -> None:
    text = """
def step(a, b):
    xs = [a, b]
    c = a + xs[0]
    del c
    xs[0] = None
    for i in range(2):
        d = xs[1] + xs[0]
        xs[1] = None
    xs = [a, b]
    return xs[0] + c + d
"""
    assert reads_of_freed(text) == ["xs[0] in line 8", "xs[1] in line 8", "c in line 11"]


class Recurrent(nn.Module):
    """Loops whose results one collective reduces together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(6, 8, 2, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.rnn(x)[0]).square().mean()


@pytest.mark.parametrize("plan", extent(["fsdp"], ["ddp", "fsdp"]))
def test_loops_of_a_recurrent_model(plan: str) -> None:
    program = shardir.compile(
        Recurrent(), torch.randn(8, 5, 6), optimizer="sgd, lr = 0.1", plan=plan, mesh="dp = 4"
    )
    text = program.program
    assert "for " in text
    assert not reads_of_freed(text)
