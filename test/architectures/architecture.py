"""An architecture of the zoo: a module of a few kilobytes, its inputs, and its scalar loss."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

BATCH, LENGTH, VOCABULARY, HIDDEN, HEADS, LAYERS, CLASSES = 4, 8, 64, 32, 4, 2, 8


class Example(NamedTuple):
    """A module, in the mode in which it is to be exported, and what it is called with."""

    module: nn.Module
    args: tuple
    kwargs: dict[str, Any]
    labels: Tensor | None = None  # of the loss function, where the module does not compute the loss

    def double(self) -> "Example":
        """The same in f64, with the tensors that are plain attributes of modules."""

        def cast(value: Any) -> Any:
            floats = isinstance(value, Tensor) and value.is_floating_point()
            return value.double() if floats else value

        for module in self.module.double().modules():
            vars(module).update({name: cast(value) for name, value in vars(module).items()})
        return Example(self.module, *pytree.tree_map(cast, tuple(self[1:])))


class _Doubles(TorchFunctionMode):
    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None):
        args, kwargs = pytree.tree_map(
            lambda value: torch.float64 if value is torch.float32 else value, (args, kwargs or {})
        )
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


@contextmanager
def doubles() -> Iterator[None]:
    """A context to run and export modules in, that gives f64 where they ask for f32.

    Most language models of transformers do so for their norms and their loss.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Doubles():
            yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Architecture:
    """A function that makes the example of an architecture, and another for its loss."""

    name: str
    build: Callable[[], Example]
    loss_function: Callable[..., Tensor] | None = None
    """Of the outputs, and of the labels if there are any. None: the module returns the loss."""
    unexportable: str = ""
    """Why torch.export refuses the loss."""

    def make(self) -> Example:
        """The example, with the same random values each time."""
        torch.manual_seed(0)
        return self.build()

    def loss(self, example: Example, outputs: Any) -> Tensor:
        """The scalar loss of what the example's module returned."""
        if self.loss_function is None:
            return outputs if isinstance(outputs, Tensor) else outputs["loss"]
        labels = () if example.labels is None else (example.labels,)
        return self.loss_function(outputs, *labels)


class Trained(nn.Module):
    """The loss of an architecture as a module of the inputs and the labels."""

    def __init__(self, architecture: Architecture, example: Example):
        super().__init__()
        self.architecture, self.example = architecture, example
        self.module = example.module

    def forward(self, args: tuple, kwargs: dict[str, Any], labels: Tensor | None) -> Tensor:
        outputs = self.module(*args, **kwargs)
        return self.architecture.loss(self.example._replace(labels=labels), outputs)


def export(example: Example) -> torch.export.ExportedProgram:
    """The forward graph, as torch.export has it without decompositions."""
    return torch.export.export(example.module, example.args, example.kwargs, strict=False)


def export_loss(architecture: Architecture) -> torch.export.ExportedProgram:
    """The graph of the loss alone."""
    example = architecture.make()
    trained = Trained(architecture, example)
    return torch.export.export(trained, tuple(example[1:]), strict=False)


def tokens(length: int = LENGTH) -> Tensor:
    """Token numbers at random; those below 4 are left to padding and the like."""
    return torch.randint(4, VOCABULARY, (BATCH, length))


def images(size: int) -> Tensor:
    """Random images with three channels."""
    return torch.randn(BATCH, 3, size, size)


def classes(count: int = CLASSES) -> Tensor:
    """A class for each example of the batch."""
    return torch.randint(count, (BATCH,))
