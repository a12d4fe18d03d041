"""Values on which numpy writes StableHLO: `x + np.exp(y)` writes the ops that compute it.

So the definition of an op in numpy, `evaluate`, is also how it is written. A value has the shape
and the type of the array that it stands for, but no elements: a definition that looks at elements
raises Untraceable.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from shardir.algebra.layout import Shape
from shardir.backend.stablehlo.literals import ELEMENTS, FLOATS, NARROW, NUMPY, ints_text
from shardir.backend.stablehlo.writer import HloWriter, WrittenValue
from shardir.dialects.nn.elementwise import broadcast_shape

numpy: Any = np
"""The functions of numpy, with traced values in place of arrays."""


class Untraceable(Exception):  # noqa: N818 - it says why, and is caught for each op
    """A definition that values without elements do not pass through; the message says why."""


class UnevenShards(Untraceable):
    """An op that mixes the padding of uneven shards into elements; the message says where."""


Ufunc = Callable[..., "TracedArray"]

UFUNCS: dict[Any, Ufunc] = {}
FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""How each function of numpy is written; functions.py fills both."""


class TracedArray(NDArrayOperatorsMixin):
    """A value in place of an array."""

    def __init__(self, writer: HloWriter, value: WrittenValue):
        self.writer, self.value = writer, value

    @property
    def shape(self) -> Shape:
        return self.value.shape

    @property
    def element(self) -> str:
        return self.value.element

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(NUMPY[self.element])

    @property
    def number(self) -> Any:
        """The number that all elements are, if it is known; else None."""
        return self.writer.numbers.get(self.value)

    # ---- numpy's protocols ----

    def __array_ufunc__(
        self, ufunc: Any, method: str, *inputs: Any, **options: Any
    ) -> "TracedArray":
        if ufunc not in UFUNCS or method != "__call__" or options.keys() - {"out"}:
            raise Untraceable(f"numpy.{ufunc.__name__} has no counterpart")
        return UFUNCS[ufunc](*self.promoted(*inputs, spread=ufunc.signature is None))

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        if function not in FUNCTIONS:
            raise Untraceable(f"numpy.{function.__name__} has no counterpart")
        return FUNCTIONS[function](self, *args, **options)

    def _without_elements(self, *_: Any) -> NoReturn:
        raise Untraceable("what it computes depends on the elements of a value")

    __bool__ = __int__ = __float__ = __index__ = __hash__ = _without_elements
    __setitem__ = _without_elements

    # ---- other values ----

    def make(self, value: WrittenValue) -> "TracedArray":
        return TracedArray(self.writer, value)

    def lift(self, x: Any, element: str | None = None) -> "TracedArray":
        """Return a number or an array as a value, of an element type if it is given. The integers
        from 0 on, and what numpy broadcasts, are not listed."""
        if isinstance(x, TracedArray):
            return x if element is None else x.to(element)
        array = np.asarray(x)
        if array.dtype == object and array.ndim == 0:
            return self.lift(array.item(), element)
        if element is None:
            if array.dtype not in ELEMENTS:
                raise Untraceable(f"numbers of {array.dtype} have no counterpart")
            element = ELEMENTS[array.dtype]
        if array.ndim == 1 and len(array) > 2 and element != "i1":
            step = array[1] - array[0]
            if step == 1 and np.array_equal(array, np.arange(len(array)) + array[0]):
                steps = self.iota((len(array),), 0, element)
                return steps if array[0] == 0 else steps + self.constant(array[0], element)
        return self.constant(array, element)

    def constant(self, values: Any, element: str, shape: Shape | None = None) -> "TracedArray":
        return self.make(self.writer.constant(values, element, shape))

    def iota(self, shape: Shape, dim: int, element: str = "i64") -> "TracedArray":
        after = f"dim = {dim}"
        return self.make(self.writer.op("iota", [], tuple(shape), element, after=after))

    def promoted(self, *inputs: Any, spread: bool = True) -> list["TracedArray"]:
        """Return operands with one element type, as numpy promotes them, and, with `spread`, one
        shape."""
        own = [x.element for x in inputs if isinstance(x, TracedArray)]
        if len({*own}) == 1 and all(
            isinstance(x, TracedArray | int | float | bool) for x in inputs
        ):  # numbers of Python take the type of the others; so do 16-bit floats
            element = own[0]
            if any(isinstance(x, float) for x in inputs) and element not in FLOATS:
                element = "f64"
        else:
            types = [x.dtype if isinstance(x, TracedArray) else x for x in inputs]
            element = ELEMENTS[np.result_type(*types)]
        values = [self.lift(x, element) for x in inputs]
        if not spread:
            return values
        shape = broadcast_shape([v.shape for v in values])
        return [v.spread(shape) for v in values]

    # ---- ops ----

    def op(
        self, name: str, *others: "TracedArray", shape: Sequence[int] | None = None,
        element: str | None = None, same: bool = False, **text: str,
    ) -> "TracedArray":  # fmt: skip
        """Write an op of this value and others; by default with a result of this type."""
        return self.make(self.writer.op(
            name, [self.value, *(o.value for o in others)],
            self.shape if shape is None else tuple(shape), element or self.element, same=same,
            **text,
        ))  # fmt: skip

    def same(self, name: str, *others: "TracedArray") -> "TracedArray":
        """Write an op whose operands and result have one type."""
        return self.op(name, *others, same=True)

    def to(self, element: str) -> "TracedArray":
        if element == self.element:
            return self
        if element == "i1":
            return self.compare("NE", self.constant(0, self.element, self.shape))
        if self.number is not None and self.element not in NARROW:
            return self.constant(self.number, element, self.shape)
        return self.op("convert", element=element)

    def compare(self, how: str, other: "TracedArray") -> "TracedArray":
        return self.op("compare", other, element="i1", before=f" {how}, ")

    def select(self, x: "TracedArray", y: "TracedArray") -> "TracedArray":
        """x where this value is true, else y."""
        types = f"{self.value.type}, {x.value.type}"
        out = self.op("select", x, y, shape=x.shape, element=x.element)
        self.writer.ops[-1].types = types
        return out

    def spread(self, shape: Sequence[int]) -> "TracedArray":
        """Broadcast as numpy does."""
        shape = tuple(shape)
        if shape == self.shape:
            return self
        first = len(shape) - self.ndim
        return self.broadcast(shape, range(first, len(shape)))

    def broadcast(self, shape: Sequence[int], dims: Sequence[int]) -> "TracedArray":
        """Repeat along the dimensions of a shape that are not in `dims`, or of size 1 here."""
        if self.number is not None:
            return self.constant(self.number, self.element, tuple(shape))
        if tuple(shape) == self.shape and [*dims] == [*range(self.ndim)]:
            return self
        return self.op("broadcast_in_dim", shape=shape, after=f", dims = {ints_text(dims)}")

    def reshape(self, *shape: Any) -> "TracedArray":
        sizes = [*(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)]
        if -1 in sizes:
            rest = int(np.prod([n for n in sizes if n != -1]))
            sizes[sizes.index(-1)] = self.size // rest if rest else 0
        if tuple(sizes) == self.shape:
            return self
        if self.number is not None:
            return self.constant(self.number, self.element, tuple(sizes))
        return self.op("reshape", shape=sizes)

    def transpose(self, perm: Sequence[int] | None = None) -> "TracedArray":
        order = [*range(self.ndim)][::-1] if perm is None else [*perm]
        if order == [*range(self.ndim)]:
            return self
        shape = [self.shape[d] for d in order]
        return self.op("transpose", shape=shape, after=f", dims = {ints_text(order)}")

    def swapaxes(self, a: int, b: int) -> "TracedArray":
        order = [*range(self.ndim)]
        order[a], order[b] = order[b], order[a]
        return self.transpose(order)

    def part(
        self, starts: Sequence[int], limits: Sequence[int], strides: Sequence[int] | None = None
    ) -> "TracedArray":
        """The elements `starts`, `starts` + `strides`, ... below `limits` of each dimension."""
        strides = [1] * self.ndim if strides is None else strides
        if not any(starts) and tuple(limits) == self.shape and all(s == 1 for s in strides):
            return self
        bounds = [*zip(starts, limits, strides, strict=True)]
        text = ", ".join(f"{a}:{b}" + (f":{s}" if s != 1 else "") for a, b, s in bounds)
        shape = [-((a - b) // s) for a, b, s in bounds]
        return self.op("slice", shape=shape, after=f" [{text}]")

    def along(self, dim: int, start: int, stop: int, stride: int = 1) -> "TracedArray":
        """A part of one dimension."""
        starts, limits, strides = [0] * self.ndim, [*self.shape], [1] * self.ndim
        starts[dim], limits[dim], strides[dim] = start, stop, stride
        return self.part(starts, limits, strides)

    def dynamic_part(self, dim: int, start: "TracedArray", size: int) -> "TracedArray":
        """`size` elements of one dimension, from a value on."""
        if self.shape[dim] == size:
            return self
        if start.number is not None:
            return self.along(dim, int(start.number), int(start.number) + size)
        zero = start.constant(0, start.element)
        starts = [start if d == dim else zero for d in range(self.ndim)]
        shape = [size if d == dim else n for d, n in enumerate(self.shape)]
        after = f", sizes = {ints_text(shape)}"
        return self.op("dynamic_slice", *starts, shape=shape, after=after)

    def pad(
        self, low: Sequence[int], high: Sequence[int], value: Any = 0,
        interior: Sequence[int] | None = None,
    ) -> "TracedArray":  # fmt: skip
        """Pad with a number; negative counts remove elements."""
        between = [0] * self.ndim if interior is None else interior
        if not any((*low, *high, *between)):
            return self
        shape = [
            n + a + b + max(0, n - 1) * i
            for n, a, b, i in zip(self.shape, low, high, between, strict=True)
        ]
        text = f", low = {ints_text(low)}, high = {ints_text(high)}"
        text += f", interior = {ints_text(between)}"
        return self.op("pad", self.constant(value, self.element), shape=shape, after=text)

    def concatenated(self, others: Sequence["TracedArray"], dim: int) -> "TracedArray":
        """This value and others, one after the other along a dimension."""
        if not others:
            return self
        shape = [*self.shape]
        shape[dim] += sum(o.shape[dim] for o in others)
        return self.op("concatenate", *others, shape=shape, after=f", dim = {dim}")

    def reversed(self, dims: Sequence[int]) -> "TracedArray":
        return self.op("reverse", after=f", dims = {ints_text(dims)}") if dims else self

    def reduced(
        self, kind: str, first: Any, dims: Sequence[int], keep: bool = False
    ) -> "TracedArray":
        """Reduce dimensions by an op, `add`, from a number on."""
        dims = sorted(d % self.ndim for d in dims)
        left = [n for d, n in enumerate(self.shape) if d not in dims]
        out = self
        if dims:
            text = f") applies stablehlo.{kind} across dimensions = {ints_text(dims)}"
            out = self.op(
                "reduce", self.constant(first, self.element), shape=left, before="(",
                separator=" init: ", after=text,
            )  # fmt: skip
        if not keep:
            return out
        return out.reshape([1 if d in dims else n for d, n in enumerate(self.shape)])

    # ---- numpy's methods ----

    def astype(self, dtype: Any, copy: bool = True) -> "TracedArray":
        return self.to(ELEMENTS[np.dtype(dtype)])

    def copy(self) -> "TracedArray":
        return self

    def sqrt(self) -> Any:
        """numpy calls this of an array of values, as `np.asarray` makes it."""
        return numpy.sqrt(self)

    def sum(self, axis: Any = None, **options: Any) -> "TracedArray":
        return numpy.sum(self, axis, **options)

    def mean(self, axis: Any = None, **options: Any) -> "TracedArray":
        return numpy.mean(self, axis, **options)

    def max(self, axis: Any = None, **options: Any) -> "TracedArray":
        return numpy.max(self, axis, **options)

    def min(self, axis: Any = None, **options: Any) -> "TracedArray":
        return numpy.min(self, axis, **options)

    def __iter__(self) -> Iterator["TracedArray"]:
        return iter([self[i] for i in range(self.shape[0])])

    def __getitem__(self, index: Any) -> "TracedArray":
        """Basic indexing: integers, slices, an ellipsis, None."""
        parts = [*index] if isinstance(index, tuple) else [index]
        if any(not isinstance(p, int | slice | np.integer) and p not in (None, ...) for p in parts):
            raise Untraceable("an index of numpy that is no integer, slice or None")
        given = sum(p is not None and p is not ... for p in parts)
        at = next((i for i, p in enumerate(parts) if p is ...), len(parts))
        parts[at : at + 1] = [slice(None)] * (self.ndim - given)
        starts, limits, strides = [0] * self.ndim, [*self.shape], [1] * self.ndim
        shape, backwards, d = [], [], 0
        for p in parts:
            if p is None:
                shape.append(1)
                continue
            n = self.shape[d]
            if isinstance(p, slice):
                a, b, s = p.indices(n)
                if s < 0:
                    backwards.append(d)
                    indices = range(a, b, s)
                    a, b, s = (indices[-1], indices[0] + 1, -s) if indices else (0, 0, 1)
                starts[d], limits[d], strides[d] = a, max(a, b), s
                shape.append(-((a - max(a, b)) // s))
            else:
                starts[d], limits[d] = int(p) % n, int(p) % n + 1
            d += 1
        return self.part(starts, limits, strides).reversed(backwards).reshape(shape)


def generic(
    x: TracedArray, name: str, operands: Sequence[TracedArray], types: Sequence[tuple[Shape, str]],
    properties: Mapping[str, str], region: str = "",
) -> list[TracedArray]:  # fmt: skip
    """Write an op in MLIR's generic form.

    Args:
        properties: their text.
        region: the text of its region. Its names begin with `_` in the module, as those of other
            values do not.
    """
    text = ", ".join(f"{k} = {v}" if v else k for k, v in properties.items())
    body = f" ({{\n{region.replace('%', '%_')}\n    }})" if region else ""
    values = x.writer.results(
        f'"stablehlo.{name}"', [o.value for o in operands], types, before="(",
        after=f") <{{{text}}}>{body}",
    )  # fmt: skip
    if not operands:
        ins = f"() -> {', '.join(v.type for v in values)}"
        x.writer.ops[-1].types = ins
    return [x.make(v) for v in values]


def scalar_region(name: str, element: str) -> str:
    """The text of a region that combines two scalars by an op."""
    t = f"tensor<{element}>"
    return (
        f"      ^bb0(%lhs: {t}, %rhs: {t}):\n"
        f"        %both = stablehlo.{name} %lhs, %rhs : {t}\n"
        f"        stablehlo.return %both : {t}"
    )
