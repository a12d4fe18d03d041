"""What the entries of the table of ops build with: the current op, and values that broadcast.

A broadcast of StableHLO is an op; ours are implicit in elementwise ops, as numpy's are. So each
broadcast value is recorded with its source, of a shape that numpy broadcasts to the same one, and
elementwise ops take sources: `x + bias` instead of the sum of x and a broadcast bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NoReturn

import numpy as np
from xdsl.dialects.builtin import LocationAttr
from xdsl.ir import SSAValue

from shardir.algebra.layout import Shape
from shardir.build import FunctionBuilder, Value, nn
from shardir.dialects.nn.base import Array
from shardir.frontends.stablehlo.folding import known
from shardir.frontends.stablehlo.form import HloBlock, HloOp, HloType
from shardir.frontends.stablehlo.types import DTYPES

HloEntry = Callable[..., Any]
"""From a translation and the operands to a value, or a sequence of values."""


class Refused(Exception):  # noqa: N818 - it says why, and is caught for each op
    """An op that can't be imported; the message says why."""


@dataclass
class ValueFacts:
    """What is known of the values of a function."""

    sources: dict[SSAValue, Value] = field(default_factory=dict)
    """Of a broadcast value, a value that numpy broadcasts to it."""
    origins: dict[SSAValue, Value] = field(default_factory=dict)
    """Of a reshaped value, the value before."""
    pieces: dict[SSAValue, tuple[int, list[Value]]] = field(default_factory=dict)
    """Of a value that was written in parts, the dimension and its parts."""
    runs: dict[LocationAttr | None, int] = field(default_factory=dict)
    """The number of runs of each loop that was unrolled, by its line."""
    invariant: set[SSAValue] = field(default_factory=set)
    """What loops carry unchanged."""
    loops: int = 0
    """The number of loops whose number of runs depends on values."""
    splits: dict[tuple[SSAValue, int, int], Sequence[Value]] = field(default_factory=dict)
    """Of a value that a loop reads in turn, its pieces: by the dimension and their size."""
    bounds: dict[SSAValue, tuple[int, int] | None] = field(default_factory=dict)
    """Of integers, the least and the greatest that they may be."""


@dataclass
class OpTranslation:
    """The translation of an op."""

    function: FunctionBuilder
    op: HloOp
    facts: ValueFacts
    run: Callable[[HloBlock, Sequence[Value]], Sequence[Value]]
    """Translates a region, with values for its arguments."""
    callee: Callable[[str], HloBlock]
    """The body of a function, by its name."""
    loop: Callable[[Sequence[Value]], Sequence[Value]]
    """Adds the op, a loop whose number of runs depends on values, with these carried values."""

    @property
    def result(self) -> HloType:
        return self.op.results[0].type

    @property
    def shape(self) -> Shape:
        return self.result.shape

    @property
    def element(self) -> str:
        """StableHLO's element type of the result."""
        return self.result.element

    @property
    def dtype(self) -> str:
        return DTYPES[self.element]

    def type(self, operand: int) -> HloType:
        return self.op.operands[operand].type

    def __getitem__(self, name: str) -> Any:
        """An attribute of the op; None without it."""
        return self.op.attributes.get(name)

    def refuse(self, reason: str) -> NoReturn:
        raise Refused(reason)

    # ---- constants ----

    def constant(self, values: Any, dtype: str | None = None) -> Value:
        return self.function.constant(values, dtype=dtype or self.dtype)

    def number(self, x: Value) -> float | int | bool | None:
        """Return the number that all elements of a value are; None if it is not known."""
        array = known(self.source(x))
        if array is None or array.size == 0 or not _is_splat(array):
            return None
        return array.flat[0].item()

    def filled(self, number: float, shape: Shape, dtype: str | None = None) -> Value:
        """Return a value whose elements are one number."""
        return self.spread(self.constant(number, dtype), shape)

    # ---- shapes ----

    def source(self, x: Value) -> Value:
        return self.facts.sources.get(x.ssa, x)

    def spread(self, x: Value, shape: Shape | None = None) -> Value:
        """Broadcast a value as numpy does, by default to the shape of the result."""
        shape = self.shape if shape is None else shape
        if x.shape == shape:
            return x
        extra = len(shape) - len(x.shape)
        kept = [d for d, n in enumerate(x.shape) if n == shape[extra + d]]
        narrow = self.reshape(x, tuple(x.shape[d] for d in kept))
        dims = tuple(extra + d for d in kept)
        out = nn.broadcast(narrow, dims=dims, shape=shape)
        ones = next((d for d, n in enumerate(x.shape) if n != 1), len(x.shape))
        self.facts.sources[out.ssa] = self.reshape(x, x.shape[ones:])
        return out

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Reshape a value, or the value that it was reshaped from."""
        if x.shape == shape:
            return x
        origin = self.facts.origins.get(x.ssa, x)
        if origin.shape == shape:
            return origin
        out = nn.reshape(origin, shape=shape)
        self.facts.origins[out.ssa] = origin
        return out

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        if list(perm) == [*range(len(perm))]:
            return x
        return nn.transpose(x, perm=tuple(perm))

    def slice(
        self, x: Value, starts: Sequence[int], limits: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> Value:  # fmt: skip
        strides = strides or [1] * len(x.shape)
        if not any(starts) and tuple(limits) == x.shape and all(s == 1 for s in strides):
            return x
        return nn.slice(x, starts=tuple(starts), limits=tuple(limits), strides=tuple(strides))

    def part(self, x: Value, dim: int, start: int, size: int) -> Value:
        """Return `size` elements of a dimension."""
        starts, limits = [0] * len(x.shape), list(x.shape)
        starts[dim], limits[dim] = start, start + size
        return self.slice(x, starts, limits)

    def iota(self, shape: Shape, dim: int, dtype: str = "i64") -> Value:
        return self.function.nn.iota(dim=dim, shape=shape, dtype=dtype)

    # ---- integers ----

    def range_of(self, x: Value) -> tuple[int, int] | None:
        """Return the least and the greatest number that integers may be, if it is known."""
        from shardir.frontends.stablehlo.bounds import bounds_of

        return bounds_of(x.ssa, self.facts.bounds)


def _is_splat(array: Array) -> bool:
    first = array.flat[0]
    return bool(np.all(array == first)) or bool(array.dtype.kind == "f" and np.isnan(array).all())


def size_of(shape: Sequence[int]) -> int:
    return prod(shape)
