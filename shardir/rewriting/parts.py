"""Products by parts: a parameter whose product is cut in parts is cut itself.

%y = nn.matmul %x, %w               %w0, %w1 = nn.split %w sizes <4, 4> axis 1
%z = nn.add %y, %b             ->   %b0, %b1 = nn.split %b sizes <4, 4> axis 0
%q, %k = nn.split %z                %q = nn.add (nn.matmul %x, %w0), %b0, and %k of %w1, %b1

So queries, keys and values of one product are split over devices like queries, keys and values of
three products. A contiguous split of all columns would not give each device its share of all three,
and devices would exchange activations; now they exchange parts of the parameter.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects.dist import RedistributeOp, layout_of
from shardir.dialects.nn import (
    AddOp,
    ConvertOp,
    ReshapeOp,
    SliceOp,
    SplitOp,
    TransposeOp,
)
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.contraction import Contraction
from shardir.dialects.nn.movement import IntsPerDimAttr
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import arguments
from shardir.rewriting.rewriter import Rewriter, erase


class _ColumnStep(NamedTuple):
    """An op of a chain from the product to the cut.

    Attributes:
        operand: the index of the operand from the previous op (for the product: the input).
        axis: the dimension of the result with the columns, or with their major part.
    """

    op: TensorOp
    operand: int
    axis: int


class CutProduct(NamedTuple):
    """A product with a parameter whose columns are cut.

    Attributes:
        chain: the product, and the ops from it to the cut.
        sizes: the columns of each part.
        parts: the values that the cut makes.
    """

    chain: tuple[_ColumnStep, ...]
    sizes: tuple[int, ...]
    parts: tuple[SSAValue, ...]

    @property
    def weight_elements(self) -> int:
        """The elements of the parameter."""
        product, operand, _ = self.chain[0]
        return prod(_shape(product.operands[1 - operand]))

    @property
    def elements(self) -> int:
        """The elements of the product."""
        return prod(_shape(self.chain[0].op.results[0]))

    def split_product(self) -> None:
        """Replace the product by a product for each part."""
        rewriter = Rewriter()
        values: list[SSAValue] = []
        for op, operand, axis in self.chain:
            rewriter.before(op)
            operands_of_parts = [values] if values else [[op.operands[operand]] * len(self.sizes)]
            parameters = [v for i, v in enumerate(op.operands) if i != operand]
            operands_of_parts += [
                _split_parameter(rewriter, v, _column_axis(op, v, axis), self.sizes)
                for v in parameters
            ]
            out = unsharded_type(op.results[0])
            shape, columns = list(out.get_shape()), sum(self.sizes)
            values = []
            for n, *operands in zip(self.sizes, *operands_of_parts, strict=True):
                shape[axis] = out.get_shape()[axis] * n // columns
                if operand:
                    operands.reverse()
                type = TensorType(out.element_type, shape)
                values.append(rewriter.copy(op, operands, [type]).results[0])
        for old, new in zip(self.parts, values, strict=True):
            new.name_hint = old.name_hint
            old.replace_all_uses_with(new)
        for op in dict.fromkeys(v.owner for v in reversed(self.parts)):
            assert isinstance(op, Operation)
            erase(op)
        for op, *_ in reversed(self.chain):
            erase(op)


def cut_products(f: FuncOp) -> dict[str, list[CutProduct]]:
    """Return the products of each parameter or state, or of each part of one, if all of them are
    cut in equal parts; by its name."""
    products: dict[str, list[CutProduct]] = {}
    position = {op: i for i, op in enumerate(f.body.block.ops)}
    for v, argument in zip(f.body.block.args, arguments(f), strict=True):
        if argument.key and argument.is_retained and isinstance(v.type, TensorType):
            for part in parts(v):
                cuts = [cut for product, i in _users(part) if (cut := _cut_product(product, i))]
                if len(cuts) == len([*_users(part)]) and len({cut.sizes for cut in cuts}) == 1:
                    cuts.sort(key=lambda cut: position[cut.chain[0].op])
                    products.setdefault(argument.key, []).extend(cuts)
    return products


def parts(v: SSAValue) -> list[SSAValue]:
    """Return the values into which an argument is cut, or its redistribution or conversion is; the
    argument itself if it is not cut."""
    ops = [use.operation for use in v.uses]
    if len(ops) == 1 and isinstance(op := ops[0], SplitOp | RedistributeOp | ConvertOp):
        pieces = [part for out in op.results for part in parts(out)]
        return pieces if isinstance(op, SplitOp) or pieces != list(op.results) else [v]
    return [v]


def is_cut(v: SSAValue) -> bool:
    """Whether an argument is cut in parts."""
    return parts(v) != [v]


def cuts_argument(op: Operation) -> bool:
    """Whether an op cuts an argument, or its redistribution or conversion."""
    v = op.operands[0] if isinstance(op, SplitOp) else None
    while v is not None and isinstance(v.owner, SplitOp | RedistributeOp | ConvertOp):
        v = v.owner.operands[0]
    return isinstance(v, BlockArgument)


def _users(v: SSAValue) -> Iterator[tuple[Operation, int]]:
    """Yield the ops that use an argument, or its redistribution or conversion, with the operand's
    index."""
    for use in v.uses:
        if isinstance(use.operation, RedistributeOp | ConvertOp):
            yield from _users(use.operation.results[0])
        else:
            yield use.operation, use.index


def _cut_product(product: Operation, weight: int) -> CutProduct | None:
    """Return a product with its cut; None if it is not cut."""
    if not isinstance(product, Contraction) or _is_placed(product):
        return None
    letters = product.letters
    columns = [c for c in letters[2] if c in letters[weight] and c not in letters[1 - weight]]
    if len(columns) != 1:
        return None
    chain = [_ColumnStep(product, 1 - weight, letters[2].index(columns[0]))]
    while True:
        v, axis = chain[-1].op.results[0], chain[-1].axis
        pieces = _cut_pieces(v, axis)
        if pieces is not None:
            sizes, parts = pieces
            unit = _shape(product.out)[chain[0].axis] // _shape(v)[axis]
            return CutProduct(tuple(chain), tuple([n * unit for n in sizes]), parts)
        following = _next_step(v, axis)
        if following is None:
            return None
        chain.append(following)


def _cut_pieces(v: SSAValue, axis: int) -> tuple[tuple[int, ...], tuple[SSAValue, ...]] | None:
    """Return the sizes and values of the parts into which a value is cut along a dimension; None if
    it is not cut."""
    users = [use.operation for use in v.uses]
    if len(users) == 1 and isinstance(op := users[0], SplitOp) and len(op.outs) > 1:
        is_axis = axis_of(op.properties, "axis", len(_shape(v))) == axis
        return (op.pieces(op.properties), tuple(op.outs)) if is_axis else None
    if len(users) < 2:
        return None
    pieces: list[tuple[int, int, SSAValue]] = []
    for op in users:
        if not isinstance(op, SliceOp):
            return None
        bounds = op.bounds(_shape(v), op.properties)
        start, limit, stride = bounds.pop(axis)
        remaining = [n for d, n in enumerate(_shape(v)) if d != axis]
        if stride != 1 or bounds != [(0, n, 1) for n in remaining]:
            return None
        pieces.append((start, limit, op.out))
    pieces.sort(key=lambda part: part[:2])
    ends = [(0, 0), *[part[:2] for part in pieces], (_shape(v)[axis],) * 2]
    if any(a[1] != b[0] for a, b in pairwise(ends)):
        return None
    return tuple([limit - start for start, limit, _ in pieces]), tuple([p[2] for p in pieces])


def _next_step(v: SSAValue, axis: int) -> _ColumnStep | None:
    """Return the only user of a value, if it passes the columns on."""
    users = [use for use in v.uses]
    if len(users) != 1 or _is_placed(op := users[0].operation):
        return None
    operand = users[0].index
    match op:
        case ConvertOp():
            return _ColumnStep(op, 0, axis)
        case TransposeOp():
            return _ColumnStep(op, 0, op.perm.data.index(axis))
        case ReshapeOp():
            at = _reshaped_axis(_shape(v), axis, _shape(op.out))
            return None if at is None else _ColumnStep(op, 0, at)
        case AddOp():
            other = op.operands[1 - operand]
            last = axis == len(_shape(v)) - 1
            if last and isinstance(other, BlockArgument) and _shape(other) == _shape(v)[-1:]:
                return _ColumnStep(op, operand, axis)
    return None


def _is_placed(op: Operation) -> bool:
    """Whether an op has a strategy, or its result a layout."""
    return "strategy" in op.properties or any(layout_of(v) is not None for v in op.results)


def _reshaped_axis(old: Shape, axis: int, new: Shape) -> int | None:
    """Return the dimension of a reshaped value with the major part of an old dimension; None if
    there is none."""
    for d, n in enumerate(new):
        if n > 1 and prod(new[:d]) == prod(old[:axis]):
            return d if old[axis] % n == 0 else None
    return None


def _column_axis(op: TensorOp, other: SSAValue, axis: int) -> int:
    """Return the dimension of the columns in an op's parameter operand."""
    if not isinstance(op, Contraction):
        return 0
    return op.letters[list(op.operands).index(other)].index(op.letters[2][axis])


def _split_parameter(
    rewriter: Rewriter, v: SSAValue, axis: int, sizes: Sequence[int]
) -> Sequence[SSAValue]:
    """Return the parts of a parameter, which is cut once."""
    for op in (use.operation for use in v.uses):
        if isinstance(op, SplitOp) and op.pieces(op.properties) == tuple(sizes):
            return op.outs
    props = {"sizes": IntsPerDimAttr(tuple(sizes)), "axis": IntegerAttr(axis, i64)}
    types = SplitOp.infer([unsharded_type(v)], props)
    return rewriter.create(SplitOp, [v], types, props, names=[v] * len(sizes)).outs


def _shape(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()
