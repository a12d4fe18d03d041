"""Products by parts: a parameter whose product is cut in parts is cut itself.

%y = nn.matmul %x, %w               %w0, %w1 = nn.split %w sizes <4, 4> axis 1
%z = nn.add %y, %b             ->   %b0, %b1 = nn.split %b sizes <4, 4> axis 0
%q, %k = nn.split %z                %q = nn.add (nn.matmul %x, %w0), %b0, and %k of %w1, %b1

So queries, keys and values that one product makes are split over devices as those of three are: in
contiguous columns of all of the product no device has a third of each. What devices exchange then
are parts of the parameter, not of activations.
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
    """An op of a chain: the operand that it has from the op before (of a product the input), and
    the dimension of its result that has the columns, or the major part of them."""

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

    def divide(self) -> None:
        """Replace it by a product for each part."""
        rewriter = Rewriter()
        values: list[SSAValue] = []
        for op, operand, axis in self.chain:
            rewriter.before(op)
            given = [values] if values else [[op.operands[operand]] * len(self.sizes)]
            others = [v for i, v in enumerate(op.operands) if i != operand]
            given += [_split(rewriter, v, _axis(op, v, axis), self.sizes) for v in others]
            out = unsharded_type(op.results[0])
            shape, columns = list(out.get_shape()), sum(self.sizes)
            values = []
            for n, *operands in zip(self.sizes, *given, strict=True):
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
    """Return the products of each parameter or state, or of each part of one, that are all cut in
    the same parts, by its name."""
    found: dict[str, list[CutProduct]] = {}
    position = {op: i for i, op in enumerate(f.body.block.ops)}
    for v, argument in zip(f.body.block.args, arguments(f), strict=True):
        if argument.key and argument.is_retained and isinstance(v.type, TensorType):
            for part in parts(v):
                cuts = [cut for product, i in _users(part) if (cut := _cut(product, i))]
                if len(cuts) == len([*_users(part)]) and len({cut.sizes for cut in cuts}) == 1:
                    cuts.sort(key=lambda cut: position[cut.chain[0].op])
                    found.setdefault(argument.key, []).extend(cuts)
    return found


def parts(v: SSAValue) -> list[SSAValue]:
    """Return the values that an argument is cut in, or what it is redistributed or converted to;
    itself where it is not cut."""
    ops = [use.operation for use in v.uses]
    if len(ops) == 1 and isinstance(op := ops[0], SplitOp | RedistributeOp | ConvertOp):
        found = [part for out in op.results for part in parts(out)]
        return found if isinstance(op, SplitOp) or found != list(op.results) else [v]
    return [v]


def is_cut(v: SSAValue) -> bool:
    """Whether an argument is cut in parts."""
    return parts(v) != [v]


def cuts_argument(op: Operation) -> bool:
    """Whether an op cuts an argument, or what it is redistributed or converted to."""
    v = op.operands[0] if isinstance(op, SplitOp) else None
    while v is not None and isinstance(v.owner, SplitOp | RedistributeOp | ConvertOp):
        v = v.owner.operands[0]
    return isinstance(v, BlockArgument)


def _users(v: SSAValue) -> Iterator[tuple[Operation, int]]:
    """Yield the ops that use an argument, or what it is redistributed or converted to."""
    for use in v.uses:
        if isinstance(use.operation, RedistributeOp | ConvertOp):
            yield from _users(use.operation.results[0])
        else:
            yield use.operation, use.index


def _cut(product: Operation, weight: int) -> CutProduct | None:
    """Return the product with its cut, if there is one."""
    if not isinstance(product, Contraction) or _is_placed(product):
        return None
    letters = product.letters
    columns = [c for c in letters[2] if c in letters[weight] and c not in letters[1 - weight]]
    if len(columns) != 1:
        return None
    chain = [_ColumnStep(product, 1 - weight, letters[2].index(columns[0]))]
    while True:
        v, axis = chain[-1].op.results[0], chain[-1].axis
        pieces = _pieces(v, axis)
        if pieces is not None:
            sizes, parts = pieces
            unit = _shape(product.out)[chain[0].axis] // _shape(v)[axis]
            return CutProduct(tuple(chain), tuple([n * unit for n in sizes]), parts)
        following = _following(v, axis)
        if following is None:
            return None
        chain.append(following)


def _pieces(v: SSAValue, axis: int) -> tuple[tuple[int, ...], tuple[SSAValue, ...]] | None:
    """Return the sizes and the values of the parts that a value is cut in along a dimension."""
    users = [use.operation for use in v.uses]
    if len(users) == 1 and isinstance(op := users[0], SplitOp) and len(op.outs) > 1:
        same = axis_of(op.properties, "axis", len(_shape(v))) == axis
        return (op.pieces(op.properties), tuple(op.outs)) if same else None
    if len(users) < 2:
        return None
    found: list[tuple[int, int, SSAValue]] = []
    for op in users:
        if not isinstance(op, SliceOp):
            return None
        bounds = op.bounds(_shape(v), op.properties)
        start, limit, stride = bounds.pop(axis)
        rest = [n for d, n in enumerate(_shape(v)) if d != axis]
        if stride != 1 or bounds != [(0, n, 1) for n in rest]:
            return None
        found.append((start, limit, op.out))
    found.sort(key=lambda part: part[:2])
    ends = [(0, 0), *[part[:2] for part in found], (_shape(v)[axis],) * 2]
    if any(a[1] != b[0] for a, b in pairwise(ends)):
        return None
    return tuple([limit - start for start, limit, _ in found]), tuple([p[2] for p in found])


def _following(v: SSAValue, axis: int) -> _ColumnStep | None:
    """Return the one op that uses a value, if it hands the columns on."""
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
            at = _reshaped(_shape(v), axis, _shape(op.out))
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


def _reshaped(old: Shape, axis: int, new: Shape) -> int | None:
    """Return the dimension that has the major part of a dimension of a reshaped value."""
    for d, n in enumerate(new):
        if n > 1 and prod(new[:d]) == prod(old[:axis]):
            return d if old[axis] % n == 0 else None
    return None


def _axis(op: TensorOp, other: SSAValue, axis: int) -> int:
    """Return the dimension of the columns of an op's other operand: a parameter."""
    if not isinstance(op, Contraction):
        return 0
    return op.letters[list(op.operands).index(other)].index(op.letters[2][axis])


def _split(rewriter: Rewriter, v: SSAValue, axis: int, sizes: Sequence[int]) -> Sequence[SSAValue]:
    """Return the parts of a parameter; it is cut once."""
    for op in (use.operation for use in v.uses):
        if isinstance(op, SplitOp) and op.pieces(op.properties) == tuple(sizes):
            return op.outs
    props = {"sizes": IntsPerDimAttr(tuple(sizes)), "axis": IntegerAttr(axis, i64)}
    types = SplitOp.infer([unsharded_type(v)], props)
    return rewriter.create(SplitOp, [v], types, props, names=[v] * len(sizes)).outs


def _shape(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()
