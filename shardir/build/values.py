"""The values of a function builder, with Python's operators.

    h = nn.relu(x @ w + b)
    loss = (h * h).mean()

A number as the other operand is a constant of the value's dtype.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from shardir.compat.xdsl import set_type
from shardir.algebra.layout import Shape
from shardir.build.attributes import element_type, layout_attr
from shardir.diagnostics import ShardirError
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.nn.types import element_name, unsharded_type
from shardir.dialects.text import word
from shardir.dialects.nn.base import Props
from shardir.rewriting.rewriter import Rewriter

Index = int | slice | None | EllipsisType
Real = int | float | bool
Kind = type[nn.TensorOp]


class OpScope(ABC):
    """The builder of a function, to which values add ops."""

    name: str

    @property
    @abstractmethod
    def mesh_name(self) -> str:
        """The name of the module's mesh. Raises ShardirError where it has none."""

    @property
    @abstractmethod
    def builder(self) -> Rewriter:
        """The rewriter at the end of the function, with the location of the caller."""

    @abstractmethod
    def constant(self, values: Any, *, dtype: str = "f32") -> "Value":
        """Add a constant: a number, or numbers in nested lists or an array."""

    @abstractmethod
    def op(
        self,
        kind: Kind,
        operands: "Sequence[Value]",
        props: Props | None = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        results: Sequence[tuple[Sequence[int], str]] | None = None,
    ) -> "tuple[Value, ...]":
        """Add an op; return its results (see `FunctionBuilder.op`)."""

    def value(self, x: "Value | Real", like: "Value") -> "Value":
        """Convert a number to a constant with the dtype of `like`; return values unchanged."""
        return x if isinstance(x, Value) else self.constant(x, dtype=like.dtype)


class Value:
    """A tensor: a result of an op, or an argument."""

    def __init__(self, function: OpScope, ssa: SSAValue):
        self.function, self.ssa = function, ssa

    @property
    def type(self) -> TensorType:
        """The type without the layout."""
        return unsharded_type(self.ssa)

    @property
    def shape(self) -> Shape:
        return self.type.get_shape()

    @property
    def dtype(self) -> str:
        """The element type, by its name: `f32`."""
        return element_name(self.type.element_type)

    def __repr__(self) -> str:
        return f"%{self.ssa.name_hint or '?'}: {self.type}"

    def __bool__(self) -> bool:
        raise ShardirError(
            f"expected a number or a bool of Python, got the value {self!r}, which has elements "
            "when the program runs only; use nn.select"
        )

    # ---- name and layout ----

    def named(self, name: str) -> "Value":
        """Name the value in the text and in the program; return it."""
        self.ssa.name_hint = name
        return self

    def with_layout(self, layout: str) -> "Value":
        """Annotate the value's layout, such as `[{dp}, {}]`; return it."""
        attribute = layout_attr(layout, self.function.mesh_name)
        t = self.type
        set_type(self.ssa, TensorType(t.element_type, t.get_shape(), attribute))
        return self

    # ---- operators ----

    def _binary(self, kind: Kind, x: "Value | Real", y: "Value | Real") -> "Value":
        return self.function.op(kind, [self.function.value(v, self) for v in (x, y)])[0]

    def __add__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.AddOp, self, other)

    def __radd__(self, other: Real) -> "Value":
        return self._binary(nn.AddOp, other, self)

    def __sub__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.SubOp, self, other)

    def __rsub__(self, other: Real) -> "Value":
        return self._binary(nn.SubOp, other, self)

    def __mul__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.MulOp, self, other)

    def __rmul__(self, other: Real) -> "Value":
        return self._binary(nn.MulOp, other, self)

    def __truediv__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.DivOp, self, other)

    def __rtruediv__(self, other: Real) -> "Value":
        return self._binary(nn.DivOp, other, self)

    def __pow__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.PowOp, self, other)

    def __mod__(self, other: "Value | Real") -> "Value":
        return self._binary(nn.RemainderOp, self, other)

    def __matmul__(self, other: "Value") -> "Value":
        return self._binary(nn.MatmulOp, self, other)

    def __and__(self, other: "Value") -> "Value":
        return self._binary(nn.AndOp, self, other)

    def __or__(self, other: "Value") -> "Value":
        return self._binary(nn.OrOp, self, other)

    def __xor__(self, other: "Value") -> "Value":
        return self._binary(nn.XorOp, self, other)

    def __invert__(self) -> "Value":
        return self.function.op(nn.NotOp, [self])[0]

    def __neg__(self) -> "Value":
        return self.function.op(nn.NegOp, [self])[0]

    def compare(self, how: str, other: "Value | Real") -> "Value":
        """Compare elementwise to i1, by `how`: eq, ne, lt, le, gt or ge."""
        operands = [self, self.function.value(other, self)]
        return self.function.op(nn.CompareOp, operands, {"how": word(nn.ComparisonAttr, how)})[0]

    def __lt__(self, other: "Value | Real") -> "Value":
        return self.compare("lt", other)

    def __le__(self, other: "Value | Real") -> "Value":
        return self.compare("le", other)

    def __gt__(self, other: "Value | Real") -> "Value":
        return self.compare("gt", other)

    def __ge__(self, other: "Value | Real") -> "Value":
        return self.compare("ge", other)

    # ---- reductions ----

    def reduce(
        self, kind: str, dims: int | Sequence[int] | None = None, keep: bool = False
    ) -> "Value":
        """Reduce the dimensions `dims`, by default all, by sum, mean, max, ...; `keep` keeps them
        with size 1."""
        rank = len(self.shape)
        reduced = range(rank) if dims is None else [dims] if isinstance(dims, int) else dims
        return Value(
            self.function,
            self.function.builder.reduce(self.ssa, kind, [d % rank for d in reduced], keep),
        )

    def sum(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> "Value":
        return self.reduce("sum", dims, keep)

    def mean(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> "Value":
        return self.reduce("mean", dims, keep)

    def max(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> "Value":
        return self.reduce("max", dims, keep)

    def min(self, dims: int | Sequence[int] | None = None, keep: bool = False) -> "Value":
        return self.reduce("min", dims, keep)

    # ---- shapes and dtypes ----

    def to(self, dtype: str) -> "Value":
        """Convert the elements to a dtype, such as `bf16`."""
        if dtype == self.dtype:
            return self
        return self.function.op(nn.ConvertOp, [self], shape=self.shape, dtype=dtype)[0]

    def reshape(self, *shape: int) -> "Value":
        """Reshape the value; one size may be -1."""
        return self.function.op(nn.ReshapeOp, [self], shape=_infer_size(self.shape, shape))[0]

    def transpose(self, *perm: int) -> "Value":
        """Permute the dimensions to the order `perm`; by default exchange the last two."""
        n = len(self.shape)
        order = [d % n for d in perm] if perm else [*range(n - 2), n - 1, n - 2]
        return self.function.op(nn.TransposeOp, [self], {"perm": dims_attr(*order)})[0]

    def broadcast_to(self, *shape: int) -> "Value":
        """Repeat along new leading dimensions and along dimensions of size 1, as numpy does."""
        if self.shape == shape:
            return self
        extra = len(shape) - len(self.shape)
        moved = [d for d, n in enumerate(self.shape) if n == shape[extra + d]]
        x = self.reshape(*(self.shape[d] for d in moved)) if len(moved) < len(self.shape) else self
        props = {"dims": dims_attr(*(extra + d for d in moved))}
        return self.function.op(nn.BroadcastOp, [x], props, shape=shape)[0]

    def __getitem__(self, index: Index | tuple[Index, ...]) -> "Value":
        """Slice like numpy: `x[:, 1:]`, `x[0]`, `x[..., None]`."""
        entries = list(index) if isinstance(index, tuple) else [index]
        if not all(e is None or isinstance(e, int | slice | EllipsisType) for e in entries):
            raise ShardirError(f"expected numbers, slices, None or ..., got {index!r}; use nn.gather")
        rank = len(self.shape)
        taken = sum(isinstance(e, int | slice) for e in entries)
        at = next((i for i, e in enumerate(entries) if e is Ellipsis), None)
        if at is None:
            at = len(entries)
            entries.append(Ellipsis)
        if taken > rank:
            raise ShardirError(f"expected at most {rank} indices, got {taken}")
        entries[at : at + 1] = [slice(None)] * (rank - taken)
        starts, limits, strides, shape = [], [], [], []
        for e in entries:
            if e is None:
                shape.append(1)
                continue
            n = self.shape[len(starts)]
            if isinstance(e, int):
                if not -n <= e < n:
                    raise ShardirError(f"expected an index from {-n} to {n - 1}, got {e}")
                e = slice(e % n, e % n + 1)
                start, limit, step = e.start, e.stop, 1
            else:
                assert isinstance(e, slice)
                start, limit, step = e.indices(n)
                if step < 1:
                    raise ShardirError(f"expected a positive step, got {step}; use nn.flip")
                limit = max(start, limit)
                shape.append(-(-(limit - start) // step))
            starts.append(start)
            limits.append(limit)
            strides.append(step)
        sliced = self.function.builder.slice(self.ssa, starts, limits, strides)
        return Value(self.function, self.function.builder.reshape(sliced, tuple(shape)))


def _infer_size(have: Shape, shape: Sequence[int]) -> Shape:
    """Replace the -1 of a shape by the remaining size. Raises ShardirError."""
    if list(shape).count(-1) > 1:
        raise ShardirError(f"expected one size of -1, got {tuple(shape)}")
    if -1 not in shape:
        return tuple(shape)
    known, total = 1, 1
    for n in shape:
        known *= 1 if n == -1 else n
    for n in have:
        total *= n
    if known == 0 or total % known:
        raise ShardirError(f"expected a shape of {total} elements, got {tuple(shape)}")
    return tuple(total // known if n == -1 else n for n in shape)
