"""Modules of torch as text: classes of statements, which can be drawn, dropped and executed."""

import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count
from textwrap import indent
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEADER = """\
import torch
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
"""

HELPERS = {
    "Symmetric": """\
class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).mT
""",
    "Scaled": """\
class Scaled(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, n)[:, None])

    def forward(self, w):
        return w * self.scale

    def right_inverse(self, w):
        return w / self.scale
""",
    "Counted": """\
class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, w):
        with torch.no_grad():
            self.calls += 1
        return w / (1 + 0.1 * self.calls)
""",
}
"""Classes that statements name; a module's text has those that it names."""

NAMES = count()


@dataclass(frozen=True)
class Statement:
    """A statement of one or more lines, and what it stands for in the counts of a run."""

    text: str
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ClassText:
    """A class: the statements of __init__ and of forward, and the names that forward returns."""

    name: str
    inputs: tuple[str, ...]
    init: tuple[Statement, ...] = ()
    forward: tuple[Statement, ...] = ()
    returns: tuple[str, ...] = ()
    decorator: str = ""

    def __str__(self) -> str:
        init = "\n".join(["super().__init__()", *(s.text for s in self.init)])
        results = ", ".join(self.returns)
        forward = "\n".join([*(s.text for s in self.forward), f"return {results}"])
        lines = [
            f"class {self.name}(nn.Module):",
            "    def __init__(self):",
            indent(init, " " * 8),
            "",
            *([f"    {self.decorator}"] if self.decorator else []),
            f"    def forward(self, {', '.join(self.inputs)}):",
            indent(forward, " " * 8),
        ]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ModuleText:
    """A module: its classes, of which the last is the module's own, and its mode.

    Attributes:
        shapes: the shape of each input of the module.
        trained: whether the module is in its mode of training.
    """

    classes: tuple[ClassText, ...]
    shapes: tuple[tuple[int, ...], ...]
    trained: bool = True
    features: frozenset[str] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        found = {f for c in self.classes for s in (*c.init, *c.forward) for f in s.features}
        object.__setattr__(self, "features", frozenset(found))

    def __str__(self) -> str:
        return f"{HEADER}\n\n{self.body}"

    @property
    def body(self) -> str:
        """The text without its imports."""
        body = "\n\n".join(str(c) for c in self.classes)
        helpers = (text for name, text in HELPERS.items() if f"{name}(" in body)
        return "\n\n".join([*helpers, body])

    def made(self) -> nn.Module:
        """An instance of the module, the same at each call. Raises whatever its text raises."""
        names = executed(self.body)
        torch.manual_seed(0)
        model = names[self.classes[-1].name]()
        return model if self.trained else model.eval()

    def batches(self, steps: int) -> list[tuple[torch.Tensor, ...]]:
        """The inputs of each step."""
        g = torch.Generator().manual_seed(1)
        return [
            tuple(torch.randn(shape, generator=g, dtype=torch.float64) for shape in self.shapes)
            for _ in range(steps)
        ]


def globals_of_texts() -> dict[str, Any]:
    """The names that all texts know."""
    return {"torch": torch, "F": F, "nn": nn, "__name__": "module_text"}


def executed(text: str) -> dict[str, Any]:
    """Execute a text and return its names; its lines are those of a file to all who ask."""
    names = globals_of_texts()
    file = f"module_{next(NAMES)}.py"
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    exec(compile(text, file, "exec"), names)
    return names


def loss_of(outputs: Any) -> torch.Tensor:
    """A loss that is bounded, and of which each element of each output has a share of its own."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    shares: Iterable[torch.Tensor] = (
        torch.sin(v.double() * torch.linspace(0.5, 1.5, v.numel()).view(v.shape)).mean()
        for v in outputs
    )
    return torch.stack(list(shares)).sum()
