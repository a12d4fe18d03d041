"""Code that depends on the data, in a submodule: one message, with the module's path and the line,
and nothing else on stdout and stderr."""

import inspect
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardir
from shardir.diagnostics import ShardirError

Function = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.linear = function, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Net(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), Block(function)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x)).sum()


def choice(h: torch.Tensor) -> torch.Tensor:
    return h * 2 if h.sum() > 0 else h


def until(h: torch.Tensor) -> torch.Tensor:
    while h.norm() > 1:
        h = h / 2
    return h


def number(h: torch.Tensor) -> torch.Tensor:
    return h * h.sum().item()


def cond(h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h.clone(), (h,))


def cond_of_views(h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda h: h * 2, lambda h: h, (h,))


SHAPES = "expected shapes that do not depend on the data, got a result of aten"
EXPORT = "expected a module that torch.export takes, got GuardOnDataDependentSymNode"
CONTROL = "expected a module without control flow on tensors, got torch.cond"

CONSTRUCTS: dict[str, tuple[Function, str]] = {
    "mask": (lambda h: h[h.sum(1) > 0], f"{SHAPES}.index.Tensor"),
    "unique": (lambda h: torch.unique(h), f"{SHAPES}._unique2.default"),  # noqa: PLW0108 - not a signature for inspect
    "nonzero": (lambda h: h + torch.nonzero(h).sum(), f"{SHAPES}.nonzero.default"),
    "repeat": (lambda h: h.repeat_interleave(h.argmax(1), 0), f"{SHAPES}.repeat_interleave"),
    "masked_select": (lambda h: h.masked_select(h > 0), f"{SHAPES}.masked_select.default"),
    "if": (choice, EXPORT),
    "while": (until, EXPORT),
    "item": (number, "expected numbers that do not depend on the data, got one from a tensor in"),
    "cond": (cond, CONTROL),
    "cond of views": (cond_of_views, CONTROL),
    "fft": (lambda h: torch.fft.rfft(h).real, "expected real numbers, got complex ones of aten"),
    "random": (lambda h: torch.poisson(h.exp()), "expected an op that can be imported, got aten"),
}


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_code_that_depends_on_the_data_has_one_message(
    name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    function, message = CONSTRUCTS[name]
    with pytest.raises(ShardirError) as found:
        shardir.compile(Net(function), torch.randn(8, 4), train=False, mesh="d = 2")
    text = str(found.value)
    assert text.startswith(message) and "\n" not in text
    lines = {
        line + i
        for of in (function, Block.forward)
        for source, line in [inspect.getsourcelines(of)]
        for i in range(len(source))
    }
    assert " in 'layers.1' at " in text
    assert any(f" at {__file__}:{line}" in text for line in lines)
    assert capfd.readouterr() == ("", "")


def test_what_a_module_prints_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    """And what it logs: only torch is silent, and only while it exports."""

    def loud(h: torch.Tensor) -> torch.Tensor:
        print("of the module")
        logging.getLogger("module").warning("logged by the module")
        return h

    records: list[logging.LogRecord] = []

    class Recording(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler = Recording()
    for name in ("module", "torch.export"):
        logging.getLogger(name).addHandler(handler)
    try:
        shardir.compile(Net(loud), torch.randn(8, 4), train=False, mesh="d = 2")
        logging.getLogger("torch.export").warning("later")
    finally:
        for name in ("module", "torch.export"):
            logging.getLogger(name).removeHandler(handler)
    assert capfd.readouterr().out.startswith("of the module\n")
    assert [r.getMessage() for r in records] == ["logged by the module", "later"]
