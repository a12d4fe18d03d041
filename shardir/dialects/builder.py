"""The interface by which ops write other ops: their gradients and decompositions.

    def gradient(self, b, d):
        return [b.mul(d, b.neg(self.out))]

One gradient serves the unsharded program and the laid-out one: the implementation
(`shardir/rewriting/rewriter.py`) infers types, places each op, and redistributes its operands.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from xdsl.dialects.builtin import BFloat16Type, Float16Type, TensorType, f32
from xdsl.ir import Attribute, Operation, Region, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.windows import Windows


class OpBuilder(ABC):
    """Makes ops, one after another."""

    mesh: Mesh | None
    """The mesh of a laid-out program; None where values have no layouts."""

    # ---- any op ----

    @abstractmethod
    def op(
        self,
        kind: type[Any],
        *operands: SSAValue,
        props: Mapping[str, Attribute] | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
        regions: Sequence[Region] = (),
    ) -> Operation:
        """Return a new op.

        Args:
            result: the types that can't be inferred; layouts are ignored.
            like: the preferred layout, or a value with it, where the operands do not decide.
            regions: of an op that has some.
        """

    @abstractmethod
    def results(
        self,
        kind: type[Any],
        *operands: SSAValue,
        props: Mapping[str, Attribute] | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
    ) -> Sequence[SSAValue]:
        """Return the results of a new op (see `op`). A composite, and an op with a sharded
        dimension that it needs whole, is decomposed."""

    def value(self, kind: type[Any], *operands: SSAValue, **options: Any) -> SSAValue:
        """Return the only result of a new op; see `results`."""
        return self.results(kind, *operands, **options)[0]

    # ---- layouts ----

    @abstractmethod
    def layout(self, value: SSAValue) -> Layout:
        """Return the layout of a value; replicated where it has none."""

    @abstractmethod
    def redistribute(self, value: SSAValue, layout: Layout) -> SSAValue:
        """Return the value in another layout; equal redistributions are made once."""

    @abstractmethod
    def complete(self, value: SSAValue) -> SSAValue:
        """Return the value with its partial values reduced and its sharding kept."""

    # ---- constants ----

    @abstractmethod
    def constant(self, number: float, element: Attribute) -> SSAValue:
        """A scalar constant."""

    @abstractmethod
    def scalar(self, number: float, like: SSAValue) -> SSAValue:
        """A scalar constant of the element type of `like`."""

    @abstractmethod
    def zeros(self, type: TensorType, like: SSAValue | None = None) -> SSAValue:
        """Zeros of a type; its layout is ignored."""

    @abstractmethod
    def iota(self, dim: int, like: SSAValue) -> SSAValue:
        """The i64 indices along `dim` of a value of the shape of `like`."""

    # ---- elementwise ----

    @abstractmethod
    def add(self, x: SSAValue, y: SSAValue) -> SSAValue:
        """x + y."""

    @abstractmethod
    def sub(self, x: SSAValue, y: SSAValue) -> SSAValue:
        """x - y."""

    @abstractmethod
    def mul(self, x: SSAValue, y: SSAValue) -> SSAValue:
        """x * y."""

    @abstractmethod
    def div(self, x: SSAValue, y: SSAValue) -> SSAValue:
        """x / y."""

    @abstractmethod
    def neg(self, x: SSAValue) -> SSAValue:
        """-x."""

    def scale(self, x: SSAValue, number: float) -> SSAValue:
        """x times a number."""
        return self.mul(x, self.scalar(number, x))

    @abstractmethod
    def convert(self, x: SSAValue, element: Attribute, partial: bool = False) -> SSAValue:
        """x in another element type; with `partial`, a partial sum stays partial."""

    def widen(self, x: SSAValue) -> SSAValue:
        """x in f32 if it is f16 or bf16: their sums of squares overflow or lose precision."""
        assert isinstance(x.type, TensorType)
        narrow = isinstance(x.type.element_type, Float16Type | BFloat16Type)
        return self.convert(x, f32) if narrow else x

    @abstractmethod
    def compare(self, how: str, x: SSAValue, y: SSAValue) -> SSAValue:
        """The i1 elements of x `how` y: `eq`, `lt`, ..."""

    @abstractmethod
    def select(self, condition: SSAValue, x: SSAValue, y: SSAValue) -> SSAValue:
        """x where the condition holds, y elsewhere."""

    # ---- sums and products ----

    @abstractmethod
    def reduce(self, x: SSAValue, kind: str, dims: Sequence[int], keep: bool = False) -> SSAValue:
        """The sum, maximum, ... of x over `dims`, kept with size 1 if `keep`."""

    @abstractmethod
    def einsum(self, equation: str, x: SSAValue, y: SSAValue) -> SSAValue:
        """The products of x and y, summed: `ij,jk->ik`."""

    @abstractmethod
    def sum_to(self, x: SSAValue, like: SSAValue) -> SSAValue:
        """The gradient of numpy's broadcasting: sums over the dimensions that `like` lacks."""

    @abstractmethod
    def total(self, scalars: Sequence[SSAValue]) -> SSAValue:
        """The complete sum of scalars. Each device adds its partial values, over whichever axes
        they are partial; one reduction follows."""

    # ---- shapes ----

    @abstractmethod
    def broadcast(
        self, x: SSAValue, dims: Sequence[int], shape: Shape, like: SSAValue | None = None
    ) -> SSAValue:
        """x with its dimensions at `dims` of `shape`, repeated along the others."""

    @abstractmethod
    def reshape(self, x: SSAValue, shape: Shape, like: SSAValue | None = None) -> SSAValue:
        """x in another shape, its elements in the same order."""

    @abstractmethod
    def split_shards(self, x: SSAValue, axis: int) -> SSAValue | None:
        """x with its sharded dimension `axis` split in two: shards (sharded) and elements of a
        shard. None if the dimension is unsharded or its shards differ in size."""

    @abstractmethod
    def transpose(self, x: SSAValue, perm: Sequence[int]) -> SSAValue:
        """x with its dimensions in the order `perm`."""

    @abstractmethod
    def pad(
        self,
        x: SSAValue,
        low: Sequence[int],
        high: Sequence[int],
        value: float = 0.0,
        like: SSAValue | None = None,
    ) -> SSAValue:
        """x with `low` elements of `value` before each dimension and `high` after it; negative
        numbers remove elements."""

    @abstractmethod
    def slice(
        self,
        x: SSAValue,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] = (),
        like: SSAValue | None = None,
    ) -> SSAValue:
        """The elements from `starts` to `limits` of each dimension, with steps of `strides`."""

    @abstractmethod
    def split(self, x: SSAValue, sizes: Sequence[int], axis: int) -> Sequence[SSAValue]:
        """Pieces of x along `axis`."""

    @abstractmethod
    def unfold(self, x: SSAValue, dim: int, w: Windows, lowest: bool = False) -> SSAValue:
        """The windows of a dimension."""

    @abstractmethod
    def fold(self, x: SSAValue, dim: int, w: Windows) -> SSAValue:
        """The sum, for each element, of its values in the windows."""
