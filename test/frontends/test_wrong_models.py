"""Wrong models, inputs, labels and losses: each has one message with a fix."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.extent import sampled
from support.modules import wrong_uses
from support.modules.wrong_uses import CROSS_ENTROPY, NET, X, Y, assert_one_message, compiled
from torch import nn

import shardir

IN_ORDER: Any = (NET, X, Y, CROSS_ENTROPY)


class Tripled(torch.autograd.Function):
    """A function whose backward is not the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0] * 3


class Written(nn.Module):
    """A module of a parameter, and a function of it and of the input."""

    def __init__(self, function: Callable[[Any, Any], Any]):
        super().__init__()
        self.w, self.function = nn.Parameter(torch.ones(4)), function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def exported(function: Callable[[Any, Any], Any]) -> Any:
    return compiled(Written(function), labels=None, loss=None)


def assigned(m: Any, view: torch.Tensor) -> torch.Tensor:
    """A view, read after the memory of its tensor is another one."""
    m.w.data = m.w * 0.9
    return (view * m.w).sum()


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "inputs: shape": (
        lambda: compiled(inputs=torch.randn(8, 5)),
        "got RuntimeError in '0': a and b must have same reduction dim, but got [8, 5] X [4, 8",
    ),
    "inputs: too many": (
        lambda: compiled(inputs=(X, X)),
        "expected the arguments Sequential.forward(input), got 2 in order: too many positional",
    ),
    "inputs: none": (
        lambda: compiled(inputs=()),
        "expected the arguments Sequential.forward(input), got none: missing a required argument:",
    ),
    "inputs: keyword": (
        lambda: compiled(inputs={"y": X}),
        "expected an argument of Sequential.forward, got y; it has input",
    ),
    "inputs: numpy": (
        lambda: compiled(inputs=(X.numpy(),)),
        "expected a dense tensor as input, got a ndarray; use torch.as_tensor",
    ),
    "inputs: string": (
        lambda: compiled(inputs="x"),
        "expected inputs: a tensor, a tuple or a dict, got 'x'",
    ),
    "inputs: f64": (
        lambda: compiled(inputs=X.double()),
        "got torch.float64 and torch.float32; convert one, x.to(torch.float32), or give example",
    ),
    "inputs: i64": (
        lambda: compiled(inputs=X.long()),
        f"expected operands of one dtype of linear in '0' at {wrong_uses.__file__}:",
    ),
    "inputs: complex": (
        lambda: compiled(nn.Linear(4, 3), X.to(torch.complex64)),
        "uint8 of input, got torch.complex64; write it with real numbers",
    ),
    "inputs: sparse": (
        lambda: compiled(inputs=X.to_sparse()),
        "expected a dense tensor as input, got torch.sparse_coo; use to_dense()",
    ),
    "inputs: loader": (
        lambda: compiled(inputs=iter([X])),
        "expected inputs: a tensor, a tuple or a dict, got a list_iterator",
    ),
    "inputs: names no text": (
        lambda: compiled(inputs={3: X}),
        "expected an argument of Sequential.forward, got 3; it has input",
    ),
    "inputs: keywords": (
        lambda: compiled(keywords=[X]),
        "expected a dict as keywords, got a list; keywords: further keyword arguments",
    ),
    "inputs: keyword misspelt": (
        lambda: compiled(inputs={"inputs": X}),
        "expected an argument of Sequential.forward, got inputs; did you mean input?",
    ),
    "labels: missing": (
        lambda: compiled(labels=None),
        "missing a required argument: 'target'; pass labels=..., one for each of its parameters",
    ),
    "labels: without a loss": (
        lambda: compiled(loss=None),
        "got a tensor of [8, 3]; use loss=..., a function of the outputs and the labels",
    ),
    "labels: numpy": (
        lambda: compiled(labels=Y.numpy()),
        "expected a dense tensor as labels, got a ndarray; use torch.as_tensor",
    ),
    "labels: number": (
        lambda: compiled(labels=3),
        "argument 'target' (position 2) must be Tensor, not int; correct the module, the loss or",
    ),
    "labels: shape": (
        lambda: compiled(labels=Y[:4]),
        "got ValueError: Expected input batch_size (8) to match target batch_size (4).",
    ),
    "labels: floats": (
        lambda: compiled(labels=Y.float()),
        "got RuntimeError: gather(): Expected dtype int32/int64 for index, but got torch.float",
    ),
    "labels: surplus": (
        lambda: compiled(labels=(Y, Y)),
        "got AssertionError: weight tensor should be defined either for all 3 classes or no cl",
    ),
    "loss: class": (
        lambda: compiled(loss=nn.CrossEntropyLoss),
        "expected a loss function, got the class CrossEntropyLoss; make one: CrossEntropyLoss()",
    ),
    "loss: without labels": (
        lambda: compiled(loss=lambda o: o.sum()),
        "expected the arguments <lambda>(o), got 2 in order: too many positional arguments",
    ),
    "loss: without gradient": (
        lambda: compiled(loss=lambda o, y: CROSS_ENTROPY(o.detach(), y)),
        "expected parameters that require gradients, of which the loss depends, got none; use",
    ),
    "loss: of inference": (
        lambda: compiled(train=False),
        "expected no loss with train=False, got a function; drop loss=...",
    ),
    "loss: not scalar": (
        lambda: compiled(loss=partial(CROSS_ENTROPY, reduction="none")),
        "expected a scalar tensor of the loss function, got a tensor of [8]",
    ),
    "loss: text": (
        lambda: compiled(loss="cross_entropy"),
        "expected a function as loss, got 'cross_entropy'; loss: a function of the outputs, and",
    ),
    "loss: none returned": (
        lambda: compiled(loss=lambda o, y: None),
        "expected a scalar tensor of the loss function, got none",
    ),
    "loss: python number": (
        lambda: compiled(loss=lambda o, y: 3.0),
        "expected a scalar tensor of the loss function, got 3.0; reduce it: losses.mean()",
    ),
    "loss: integer": (
        lambda: compiled(loss=lambda o, y: o.argmax()),
        "[G2] expected @forward to return a loss of floats, got i64",
    ),
    "loss: raises": (
        lambda: compiled(loss=lambda o, y: o.foo),
        "expected a module that torch.export takes, got AttributeError",
    ),
    "model: class": (
        lambda: compiled(nn.Linear),
        "expected text or a module, got the class Linear; make one",
    ),
    "model: function": (
        lambda: compiled(lambda x: x),
        "expected text or a module, got a function; use compile_file for a file",
    ),
    "model: weights": (
        lambda: compiled(NET.state_dict()),
        "expected text or a module, got an OrderedDict; use compile_file for a file",
    ),
    "model: name": (
        lambda: compiled("gpt2"),
        "expected an argument of compile, got labels; it has text_or_module, pipeline,",
    ),
    "model: f64": (
        lambda: compiled(nn.Linear(4, 3).double()),
        "got torch.float32 and torch.float64; convert one, x.to(torch.float64), or give example",
    ),
    "model: complex": (
        lambda: exported(lambda m, x: torch.fft.fft(x * m.w).real.sum()),
        "expected real numbers, got complex ones of aten.fft_fft.default at ",
    ),
    "model: in order": (
        lambda: shardir.compile(*IN_ORDER),
        "expected the arguments compile(model, inputs=..., keywords=..., labels=..., loss=...,",
    ),
    "model: as a file": (
        lambda: shardir.compile_file(NET),
        "expected a text or a path as path, got a Sequential",
    ),
    "model: run": (
        lambda: shardir.run(NET),
        "expected a text or a path or a Compiled as program, got a Sequential",
    ),
    "model: no parameters": (
        lambda: compiled(nn.Sequential(nn.ReLU())),
        "expected parameters that require gradients, of which the loss depends, got none",
    ),
    "model: frozen": (
        lambda: compiled(nn.Linear(4, 3).requires_grad_(False)),
        "expected parameters that require gradients, of which the loss depends, got none",
    ),
    "export: data dependent": (
        lambda: exported(lambda m, x: (x if x.sum() > 0 else -x).sum()),
        "expected a module that torch.export takes, got GuardOnDataDependentSymNode",
    ),
    "export: item": (
        lambda: exported(lambda m, x: x[: int(x.sum())].sum() * m.w.sum()),
        "expected a module that torch.export takes, got GuardOnDataDependentSymNode",
    ),
    "export: nonzero": (
        lambda: exported(lambda m, x: (x[x > 0] * m.w[0]).sum()),
        "expected shapes that do not depend on the data, got a result of aten.index.Tensor",
    ),
    "export: unique": (
        lambda: exported(lambda m, x: x.unique().sum() * m.w.sum()),
        "expected shapes that do not depend on the data, got a result of aten._unique2.default",
    ),
    "export: numpy": (
        lambda: exported(lambda m, x: torch.as_tensor(x.detach().numpy()).sum() * m.w.sum()),
        "expected a module that torch.export takes, got RuntimeError",
    ),
    "export: autograd function": (
        lambda: exported(lambda m, x: Tripled.apply(x * m.w).sum()),
        "expected operations whose gradients follow, got the autograd function Tripled",
    ),
    "export: error of the module": (
        lambda: exported(lambda m, x: x.foo),
        "expected a module that torch.export takes, got AttributeError",
    ),
    "export: backward inside": (
        lambda: exported(lambda m, x: (x * m.w).sum().backward()),
        "expected a scalar loss among the model's outputs, got none",
    ),
    "export: inplace expanded": (
        lambda: exported(
            lambda m, x: m.w.expand(8, 4).clone().sum() + x[:1].expand(8, 4).mul_(2).sum()
        ),
        "got a write to one that repeats elements",
    ),
    **{
        f"export: inplace windows of {size} by {step}": (
            lambda size=size, step=step: exported(
                lambda m, x: (x * m.w + x.clone().unfold(0, size, step).mul_(2).sum()).sum()
            ),
            "got a write to windows that overlap or leave elements out",
        )
        for size, step in ((2, 1), (1, 2), (3, 3))
    },
    "export: inplace view": (
        lambda: exported(lambda m, x: (m.w * x).sum() + x.t_().sum()),
        "expected arguments, parameters and buffers that keep their shape, got aten.t_.default",
    ),
    "export: view before data": (
        lambda: exported(lambda m, x: assigned(m, m.w[0]) + x.sum()),
        "expected no view of a tensor that is read after its data is assigned, got one",
    ),
    "export: data before data": (
        lambda: exported(lambda m, x: assigned(m, m.w.data) + x.sum()),
        "expected no view of a tensor that is read after its data is assigned, got one",
    ),
    "export: strided part": (
        lambda: exported(lambda m, x: (x * m.w)[:, 0].as_strided((2,), (1,)).sum()),
        "expected as_strided of a tensor with all elements of its memory, got a part",
    ),
    "export: strided in another order": (
        lambda: exported(lambda m, x: ((x * m.w).T.exp() + 1).as_strided((2,), (1,)).sum()),
        "expected as_strided of a contiguous tensor, got one of the strides",
    ),
    "export: dtype": (
        lambda: exported(lambda m, x: (x * m.w).to(torch.float8_e4m3fn).float().sum()),
        "expected a dtype of float64, float32, bfloat16, float16, int64, int32, bool, int16, i",
    ),
    "train: text": (lambda: compiled(train="no"), "expected True or False as train, got 'no'"),
    "derived: text": (
        lambda: compiled(derived="Tripled"),
        "expected a list as derived, got 'Tripled'; derived: the names of autograd functions",
    ),
}


@pytest.mark.parametrize("name", sampled(WRONG, 20))
def test_a_wrong_use_has_one_message(name: str) -> None:
    assert_one_message(*WRONG[name])
