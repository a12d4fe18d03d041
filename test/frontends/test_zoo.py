"""The zoo: the loss and the gradients of each architecture are those of torch on one device, by
each of several plans, in the interpreter."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from extent import extent
from imported import Values, assert_equal, imported, in_numpy, in_torch
from zoo import UNEXPORTABLE, ZOO, Architecture, Example, doubles

from shardir.diagnostics import ShardirError
from shardir.frontends.torch.importer import Imported

PLANS = {
    "auto": ("auto", None),
    "fsdp": ("train", "fsdp"),
    "megatron": ("train", "megatron(tp) * fsdp(dp)"),
}
"""The pipeline and the plan of each."""

DERIVED = {
    "Bloom": ["GeLUFunction"],  # the derivative, to save memory
    "RecurrentGemma": ["SqrtBoundDerivative"],  # the derivative, if it is below 1000
}
"""The autograd functions of architectures whose backward is the derivative of their forward."""

CANCELLING = {"VGG"}
"""Architectures with a bias before a batch norm: its gradient is 0, and in f32 rounding errors."""

NOT_IMPORTED = {"FNet": "aten.fft_fftn.default"}
"""The op for which there is none: complex numbers."""

SAMPLE = (("GPT-2", "megatron"), ("Swin", "fsdp"), ("nn.TransformerEncoder", "auto"))
"""What the default form tests."""

IMPORTED = [name for name in ZOO if name not in NOT_IMPORTED]


def imports(architecture: Architecture, example: Example) -> Imported:
    loss = architecture.loss_function
    return imported(
        example.module, example.args, example.labels,
        loss or (lambda o: o if isinstance(o, torch.Tensor) else o["loss"]), example.kwargs,
        mesh="dp = 2, tp = 2", derived=DERIVED.get(architecture.name, ()),
    )  # fmt: skip


def in_torch_alone(architecture: Architecture, example: Example) -> Values:
    return in_torch(
        example.module,
        lambda module: architecture.loss(example, module(*example.args, **example.kwargs)),
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "plan"), extent(SAMPLE, tuple(product(IMPORTED, PLANS))))
def test_loss_and_gradients_are_those_of_torch(name: str, plan: str) -> None:
    architecture = ZOO[name]
    example = architecture.make()
    with doubles() if name in CANCELLING else nullcontext():
        if name in CANCELLING:
            example = example.double()
        found, wanted = imports(architecture, example), in_torch_alone(architecture, example)
    tolerance = 1e-9 if name in CANCELLING else 1e-4
    assert_equal(in_numpy(found, *PLANS[plan]), wanted, tolerance)


@pytest.mark.parametrize("name", extent(list(NOT_IMPORTED)[:1], list(NOT_IMPORTED)))
def test_what_is_not_imported_is_named(name: str) -> None:
    with pytest.raises(ShardirError, match=f"can be imported, got {NOT_IMPORTED[name]} at .*:"):
        imports(ZOO[name], ZOO[name].make())


@pytest.mark.parametrize("name", extent(sorted(UNEXPORTABLE)[:1], sorted(UNEXPORTABLE)))
def test_what_is_not_exported_is_refused_with_its_place(name: str) -> None:
    with pytest.raises(ShardirError, match=r"expected a module that torch\.export takes, got"):
        imports(UNEXPORTABLE[name], UNEXPORTABLE[name].make())
