"""The ops of a function as they are written: records of text, whose values get names at the end.

An op that no result needs is left out, so that writers may make what they do not use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardir.algebra.layout import Shape
from shardir.backend.stablehlo.literals import NUMPY, dense_text, type_text


@dataclass(eq=False)
class WrittenValue:
    """A value: the sizes of its dimensions, its element type, and a name that it would like."""

    shape: Shape
    element: str
    hint: str | None = None

    @property
    def type(self) -> str:
        return type_text(self.shape, self.element)


@dataclass(eq=False)
class WrittenOp:
    """An op: `head`, the names of its operands, `tail`, and types."""

    head: str
    operands: Sequence[WrittenValue]
    tail: str
    types: str
    results: Sequence[WrittenValue]
    separator: str = ", "


@dataclass
class HloWriter:
    """The ops of a function, in their order."""

    ops: list[WrittenOp] = field(default_factory=list)
    constants: dict[Any, WrittenValue] = field(default_factory=dict)
    numbers: dict[WrittenValue, Any] = field(default_factory=dict)
    """Of a constant whose elements are equal, the element."""

    def results(
        self, name: str, operands: Sequence[WrittenValue], types: Sequence[tuple[Shape, str]],
        before: str = "", after: str = "", same: bool = False, separator: str = ", ",
    ) -> list[WrittenValue]:  # fmt: skip
        """Write an op.

        Args:
            name: with the dialect.
            types: of the results.
            before, after: the text around the operands.
            same: the op's form has one type, which all operands and results have.
        """
        results = [WrittenValue(tuple(shape), element) for shape, element in types]
        ins = ", ".join(v.type for v in operands)
        outs = ", ".join(v.type for v in results)
        outs = outs if len(results) == 1 else f"({outs})"
        signature = outs if same or not operands else f"({ins}) -> {outs}"
        head = f"{name}{before}"
        self.ops.append(WrittenOp(head, list(operands), after, signature, results, separator))
        return results

    def op(
        self, name: str, operands: Sequence[WrittenValue], shape: Shape, element: str,
        before: str = " ", after: str = "", same: bool = False, separator: str = ", ",
    ) -> WrittenValue:  # fmt: skip
        """Write an op of one result."""
        return self.results(
            f"stablehlo.{name}", operands, [(shape, element)], before, after, same, separator
        )[0]

    def constant(self, values: Any, element: str, shape: Shape | None = None) -> WrittenValue:
        """Write a constant; equal ones are one. With a shape all elements are the number."""
        array = np.asarray(values, NUMPY[element])
        shape = array.shape if shape is None else tuple(shape)
        array = np.broadcast_to(array, shape)
        key = shape, element, dense_text(array, element)
        if key not in self.constants:
            self.constants[key] = self.op("constant", [], shape, element, after=key[2])
            if array.size and (array == array.flat[0]).all():
                self.numbers[self.constants[key]] = array.flat[0].item()
        return self.constants[key]

    # ---- text ----

    def needed(self, results: Sequence[WrittenValue]) -> list[WrittenOp]:
        """The ops that results need, in their order."""
        wanted, ops = {*results}, []
        for op in reversed(self.ops):
            if not wanted.isdisjoint(op.results):
                wanted.update(op.operands)
                ops.append(op)
        return ops[::-1]

    def lines(
        self, names: "ValueNames", results: Sequence[WrittenValue], indent: str = "    "
    ) -> list[str]:
        """The text of the ops that `results` need."""
        lines = []
        for op in self.needed(results):
            operands = op.separator.join(names.of(v) for v in op.operands)
            several = len(op.results) > 1
            left = names.of_several(op.results) if several else names.of(op.results[0])
            lines.append(f"{indent}{left} = {op.head}{operands}{op.tail} : {op.types}")
        return lines


class ValueNames:
    """The names of the values of a function: those that they would like, else numbers. None begins
    with `_`: such names are those of regions.

    Args:
        prefix: of all names, which those of a body around them do not have.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._of: dict[WrittenValue, str] = {}
        self._used: set[str] = set()
        self._count = 0

    def of(self, v: WrittenValue) -> str:
        if v not in self._of:
            self._of[v] = f"%{self._prefix}{self._new(v.hint)}"
        return self._of[v]

    def of_several(self, values: Sequence[WrittenValue]) -> str:
        """Name the results of one op; return the text before its `=`."""
        first = f"{self._prefix}{self._new(values[0].hint)}"
        self._of |= {v: f"%{first}#{i}" for i, v in enumerate(values)}
        return f"%{first}:{len(values)}"

    def _new(self, hint: str | None) -> str:
        hint = (hint or "").lstrip("_")
        if not hint or hint.isdecimal():
            self._count += 1
            return str(self._count - 1)
        name, k = hint, 0
        while name in self._used:
            k += 1
            name = f"{hint}_{k}"
        self._used.add(name)
        return name


WriteOp = Callable[..., Any]
"""From a tracer, an op and its traced operands to a traced value, or a sequence of them."""
