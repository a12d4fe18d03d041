"""Writes one class of a random module, statement by statement, as torch takes them."""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from support.modules.text import HELPERS, ClassText, Statement, globals_of_texts

MAX_ELEMENTS = 72


class ImpossibleError(Exception):
    """A statement of a kind has no operands."""


class Writer:
    """Writes one class of a module.

    Attributes:
        names: what the text of forward can name at its present end, with its present value.
        atoms: the names of tensors, in their order.
        without: features of statements that are not drawn.
    """

    def __init__(
        self, draw: random.Random, inputs: Sequence[torch.Tensor], name: str, depth: int,
        without: Collection[str], classes: list[ClassText],
    ):  # fmt: skip
        self.draw, self.depth, self.without, self.classes = draw, depth, without, classes
        self.names = globals_of_texts()
        for text in (*HELPERS.values(), *map(str, classes)):
            exec(text, self.names)
        self.names["self"] = nn.Module()
        self.atoms = [f"x{i}" for i in range(len(inputs))]
        self.names.update(zip(self.atoms, inputs, strict=True))
        self.written = ClassText(name, tuple(self.atoms))
        self.counter = 0

    def fresh(self, letter: str = "v") -> str:
        self.counter += 1
        return f"{letter}{self.counter}"

    def value(self, expression: str) -> Any:
        """The present value of an expression. Raises whatever it raises."""
        with torch.no_grad():
            return eval(expression, self.names)

    def _has(self, atom: str) -> bool:
        """Whether an atom still has a value: a statement may break a parametrization."""
        try:
            self.value(atom)
        except Exception:  # of any kind, as in `add`
            return False
        return True

    def tensors(self, wanted: Callable[[torch.Tensor], bool] = lambda x: True) -> list[str]:
        """The atoms whose tensors are wanted."""
        return [a for a in self.atoms if wanted(self.value(a))]

    def floats(self) -> list[str]:
        """The atoms of small tensors of floating-point numbers."""
        return self.tensors(lambda x: x.dtype == torch.float64 and 0 < x.numel() <= MAX_ELEMENTS)

    def recent(self, atoms: Sequence[str]) -> str:
        """One of the atoms, later ones more often."""
        if not atoms:
            raise ImpossibleError
        return atoms[-1 - int(len(atoms) * self.draw.random() ** 2)]

    def add(
        self, text: str, names: Collection[str], init: Sequence[str] = (),
        made: Sequence[str] = (),
    ) -> bool:  # fmt: skip
        """Add a statement, with statements of __init__, unless torch refuses it.

        Args:
            names: the features of the statement.
            init: the statements of __init__.
            made: the atoms that there are afterwards.
        """
        if not set(names).isdisjoint(self.without):
            return False
        try:
            for line in init:
                exec(line, self.names)
            if text:
                exec(text, self.names)
            for atom in made:
                x = self.value(atom)
                if not isinstance(x, torch.Tensor) or x.numel() > 4 * MAX_ELEMENTS or not x.numel():
                    return False
        except Exception:  # torch refuses it, in one of many ways
            return False
        finally:
            self.atoms = [a for a in self.atoms if self._has(a)]
        found = frozenset(names)
        new = tuple(Statement(line, found) for line in init)
        self.written = replace(self.written, init=(*self.written.init, *new))
        if text:
            forward = (*self.written.forward, Statement(text, found))
            self.written = replace(self.written, forward=forward)
        self.atoms += [atom for atom in made if atom not in self.atoms]
        return True

    def finished(self) -> ClassText:
        """The class, which returns some of its last values."""
        own = [a for a in self.floats() if not a.startswith("self.")]
        fixed = [a for a in own if a.startswith("x")]
        last = [a for a in own if not a.startswith("x")][-5:]
        found = last[-1:] + [a for a in last[:-1] if self.draw.random() < 0.6]
        if self.draw.random() < 0.15:
            found += fixed[:1]
        if self.draw.random() < 0.15:
            found += [a for a in self.floats() if a.startswith("self.")][:1]
        self.written = replace(self.written, returns=tuple(found) or ("x0",))
        return self.written
