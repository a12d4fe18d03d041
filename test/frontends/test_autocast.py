"""Narrow products: autocast of any device, of modules with and without values, and `precision`."""

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from support.extent import extent
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import shardir
from shardir.diagnostics import ShardirError
from shardir.frontends.torch.autocasts import LOST


class Narrow(nn.Module):
    """A layer within autocast of a device."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.kind, torch.bfloat16):
            return self.layer(x).float()


def text_of(model: nn.Module, **options: Any) -> str:
    x = torch.ones(4, 4)
    program = shardir.compile(
        model, x, labels=x, loss=mse_loss, optimizer="sgd, lr = 0.1", mesh="d = 2", **options
    )
    return program.text


@pytest.mark.parametrize(
    ("kind", "device"),
    extent([("cpu", "cpu"), ("cuda", "meta")], [*product(["cpu", "cuda"], ["cpu", "meta"])]),
)
def test_a_region_of_autocast_is_narrow(kind: str, device: str) -> None:
    with torch.device(device):
        model = Narrow(kind)
    assert "xbf16" in text_of(model)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_compiled_within_autocast_is_narrow(device: str) -> None:
    with torch.device(device):
        model = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert "xbf16" in text_of(model)
    assert "xbf16" not in text_of(model)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch leaves autocast of CUDA on")
def test_autocast_that_torch_switches_off_is_on_or_named() -> None:
    """Python retains the warnings that it has shown, by which what is off is known to be asked
    for."""
    with warnings.catch_warnings(), torch.autocast("cuda", torch.bfloat16, enabled=False):
        warnings.simplefilter("error", FutureWarning)
        with pytest.warns(UserWarning, match=LOST[:30].replace("(", r"\(").replace(")", r"\)")):
            assert "xbf16" not in text_of(nn.Linear(4, 4))


def test_a_precision_is_the_pass() -> None:
    model = nn.Linear(4, 4)
    text = text_of(model, precision="bf16")
    assert "xbf16" in text
    assert text == text_of(model, pipeline="mixed-precision{compute=bf16},train")
    with pytest.raises(ShardirError, match="expected a precision, bf16 or f16, got 'fp8'"):
        text_of(model, precision="fp8")
