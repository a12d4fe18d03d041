"""Tensors that share storage: a program in which nothing is written in place, from one in which
views are.

A cell is a tensor of the graph. A view is computed from its base, by `forward`; what is written to
the view is written to the base, by `inverse`, and every other view of the base is computed anew at
its next use. A view without these, of an op that is not known to be one, can't be written to, and
not be read after a write to its base.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardir.build import Value
from shardir.diagnostics import ShardirError


@dataclass(eq=False)
class Cell:
    """A tensor; `base` is the one of which it is a view."""

    value: Value
    base: "Cell | None" = None
    forward: Callable[[Value], Value] | None = None
    inverse: Callable[[Value, Value], Value] | None = None
    """The base's new value from its old one and the view's new one."""
    version: int = 0
    """How often the storage was written to, when `value` was computed."""
    writes: int = field(default=0)
    """How often the storage of a cell without a base was written to."""

    @property
    def root(self) -> "Cell":
        """The cell that owns the storage."""
        cell = self
        while cell.base is not None:
            cell = cell.base
        return cell

    def read(self) -> Value:
        """Return the present value."""
        if self.base is not None and self.version != self.root.writes:
            if self.forward is None:
                raise ShardirError(
                    "expected tensors that are not written to while a view of them is in use, got "
                    "a write in place; clone them first"
                )
            self.value, self.version = self.forward(self.base.read()), self.root.writes
        return self.value

    def write(self, value: Value) -> None:
        """Replace the value, and that of the storage.

        Raises:
            ShardirError: several elements of the view are one of the base.
        """
        if self.base is None:
            self.value = value
            self.writes += 1
            return
        if self.inverse is None:
            raise ShardirError(
                "expected a view that can be written to, got a write to one that repeats elements "
                "or is one of several; clone it first"
            )
        self.base.write(self.inverse(self.base.read(), value))
        self.value, self.version = value, self.root.writes


def to_cells(result: Any, base: Cell | None = None) -> Any:
    """Return the cells of results; `base`: that of the tensor whose storage they share."""
    if isinstance(result, Value):
        return Cell(result, base, version=0 if base is None else base.root.writes)
    if isinstance(result, tuple | list):
        return tuple(to_cells(x, base) for x in result)
    return result


def read(cell: Any) -> Any:
    """Return the present values of cells; what is none, as it is."""
    if isinstance(cell, Cell):
        return cell.read()
    return tuple(map(read, cell)) if isinstance(cell, tuple | list) else cell
