"""The interface by which ops write other ops: their gradients and decompositions.

    def gradient(self, b, d):
        return [b.mul(d, b.neg(self.out))]

The same code serves the unsharded program and the laid-out one: what implements it
(`shardir/rewriting/rewriter.py`) infers types, places each op, and redistributes its operands.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from xdsl.dialects.builtin import BFloat16Type, Float16Type, TensorType, f32
from xdsl.ir import Attribute, Operation, SSAValue

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
    ) -> Operation:
        """A new op.

        `result` has the types that can't be inferred (layouts are ignored); `like` is the layout to
        aim at where the operands do not decide: a layout, or a value that has it.
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
        """The results of a new op, see `op`; or of the ops that it decomposes into, where it is a
        composite, or needs a dimension unsharded that is sharded."""

    def value(self, kind: type[Any], *operands: SSAValue, **options: Any) -> SSAValue:
        """The only result of a new op; see `results`."""
        return self.results(kind, *operands, **options)[0]

    # ---- layouts ----

    @abstractmethod
    def layout(self, value: SSAValue) -> Layout:
        """The layout of a value; replicated where it has none."""

    @abstractmethod
    def redistribute(self, value: SSAValue, layout: Layout) -> SSAValue:
        """The value in another layout; the same redistribution is made once."""

    @abstractmethod
    def complete(self, value: SSAValue) -> SSAValue:
        """The value with its partial values reduced, sharded as it is."""

    # ---- constants ----

    @abstractmethod
    def constant(self, number: float, element: Attribute) -> SSAValue:
        """A scalar constant."""

    @abstractmethod
    def scalar(self, number: float, like: SSAValue) -> SSAValue:
        """A scalar constant of the element type of `like`."""

    @abstractmethod
    def zeros(self, type: TensorType, like: SSAValue | None = None) -> SSAValue:
        """Zeros of a type, whose layout is ignored."""

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
        """x in another element type; with `partial` a partial sum stays one."""

    def widened(self, x: SSAValue) -> SSAValue:
        """x in f32 where it is in f16 or bf16, whose sums of squares overflow or lose precision."""
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
        """The sum, maximum, ... of x over dimensions; with `keep` they stay, of size 1."""

    @abstractmethod
    def einsum(self, equation: str, x: SSAValue, y: SSAValue) -> SSAValue:
        """The products of x and y, summed: `ij,jk->ik`."""

    @abstractmethod
    def sum_to(self, x: SSAValue, like: SSAValue) -> SSAValue:
        """The gradient of numpy's broadcasting: sums over the dimensions that `like` lacks."""

    @abstractmethod
    def total(self, scalars: Sequence[SSAValue]) -> SSAValue:
        """The sum of scalars, complete: partial values are added on each device, and then reduced
        once, whatever the axes over which each was partial."""

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
        """x with its sharded dimension `axis` as two: the shards, still sharded, and the elements
        of each. None where it is unsharded, or the shards are not of one size."""

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
        """x with `value` before and after each dimension, so many elements; negative numbers remove
        elements."""

    @abstractmethod
    def slice(
        self,
        x: SSAValue,
        starts: Sequence[int],
        limits: Sequence[int],
        strides: Sequence[int] = (),
        like: SSAValue | None = None,
    ) -> SSAValue:
        """The elements from `starts` to `limits` of each dimension, all or one in `strides`."""

    @abstractmethod
    def split(self, x: SSAValue, sizes: Sequence[int], axis: int) -> Sequence[SSAValue]:
        """Pieces of x along `axis`."""

    @abstractmethod
    def unfold(self, x: SSAValue, dim: int, w: Windows, lowest: bool = False) -> SSAValue:
        """The windows of a dimension."""

    @abstractmethod
    def fold(self, x: SSAValue, dim: int, w: Windows) -> SSAValue:
        """The sum, for each element, of its values in the windows."""
