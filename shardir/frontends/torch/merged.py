"""Dimensions that a view merges and a later one separates: they stay separate on the way.

%a = nn.reshape %x : 4x8x6 -> 32x6
%b = nn.einsum "az,yz->ay" %a, %w           ->    %b = nn.einsum "aAz,yz->aAy" %x, %w
%c = nn.reshape %b : 32x5 -> 4x8x5

Modules of torch flatten the rows of a product, and the samples and heads of an attention into one
batch. Of merged dimensions only the major one can be split over devices.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul
from string import ascii_letters
from typing import NamedTuple

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Shape
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn import AddOp, ConvertOp, EinsumOp, ReshapeOp, TransposeOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.contraction import Contraction
from shardir.dialects.nn.properties import DimsAttr
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.rewriter import Rewriter, erase


class _MergedStep(NamedTuple):
    """An op on the way of a merged dimension: the operand that has it, and where; where the result
    has it."""

    op: TensorOp
    operand: int
    before: int
    after: int


def separate(block: Block) -> None:
    """Keep dimensions separate between the op that merges them and the one that separates them."""
    for op in ops_of(block):
        if isinstance(op, ReshapeOp):
            _separate(op)


def _separate(last: ReshapeOp) -> None:
    """Undo earlier merges of the dimensions that a reshape separates again."""
    for axis, sizes in _separated_dims(_shape(last.x), _shape(last.out)):
        way = _path(last.x, axis)
        v, at = (way[0].op.operands[way[0].operand], way[0].before) if way else (last.x, axis)
        if isinstance(first := v.owner, ReshapeOp) and _merges(first, at, sizes):
            new = _separate_on(last, first, at, way, sizes)
            return None if new is None else _separate(new)
    return None


def _separated_dims(old: Shape, new: Shape) -> list[tuple[int, Shape]]:
    """Return the dimensions that are separated, each with the sizes that it becomes."""
    separated: list[tuple[int, Shape]] = []
    for d, n in enumerate(old):
        for i in range(len(new)):
            j = next((j for j in range(i + 1, len(new)) if prod(new[i : j + 1]) == n), i)
            if j > i and prod(new[:i]) == prod(old[:d]) and min(new[i : j + 1]) > 1:
                separated.append((d, new[i : j + 1]))
                break
    return separated


def _merges(op: ReshapeOp, axis: int, sizes: Shape) -> bool:
    """Whether a dimension of a reshaped value has an end of a dimension where its first part
    ends."""
    start = prod(_shape(op.out)[:axis])
    return start * sizes[0] in accumulate(_shape(op.x), mul)


def _path(v: SSAValue, axis: int) -> list[_MergedStep]:
    """Return the ops on the path of a dimension, each with one use, up to the op that merges it."""
    steps: list[_MergedStep] = []
    while v.has_one_use() and isinstance(op := v.owner, TensorOp):
        step = _step(op, axis)
        if step is None:
            break
        steps.insert(0, step)
        v, axis = op.operands[step.operand], step.before
    return steps


def _step(op: TensorOp, axis: int) -> _MergedStep | None:
    """Return how an op hands a dimension of its result on; None if it does not."""
    match op:
        case ConvertOp():
            return _MergedStep(op, 0, axis, axis)
        case TransposeOp():
            return _MergedStep(op, 0, op.perm.data[axis], axis)
        case ReshapeOp():
            n, start = _shape(op.out)[axis], prod(_shape(op.out)[:axis])
            for d, size in enumerate(old := _shape(op.x)):
                if size == n and prod(old[:d]) == start:
                    return _MergedStep(op, 0, d, axis)
        case AddOp():
            rank = len(_shape(op.out))
            for i, v in enumerate(op.operands):
                other = op.operands[1 - i]
                if _shape(v) == _shape(op.out) and len(_shape(other)) < rank - axis:
                    return _MergedStep(op, i, axis, axis)
        case Contraction():
            *operands, result = op.letters
            having = [i for i, letters in enumerate(operands) if result[axis] in letters]
            if len(having) == 1:
                return _MergedStep(op, having[0], operands[having[0]].index(result[axis]), axis)
    return None


def _separate_on(
    last: ReshapeOp, first: ReshapeOp, axis: int, way: Sequence[_MergedStep], sizes: Shape
) -> ReshapeOp | None:
    """Replace the ops from the one that merges a dimension to the one that separates it by those on
    separate dimensions; return the last of them, if it does anything."""
    rewriter = Rewriter()
    v = _reshape(rewriter.before(way[0].op if way else last), first, first.x,
                 _with(_shape(first.out), axis, sizes))  # fmt: skip
    for op, operand, before, after in way:
        out = unsharded_type(op.results[0])
        operands = list(op.operands)
        operands[operand] = v
        kind, properties = type(op), dict(op.properties)
        if isinstance(op, TransposeOp):
            properties["perm"] = DimsAttr(_perm(op.perm.data, before, len(sizes)))
        elif isinstance(op, Contraction):
            kind, properties = EinsumOp, {"equation": StringAttr(_equation(op, after, len(sizes)))}
        type_ = TensorType(out.element_type, _with(out.get_shape(), after, sizes))
        new = rewriter.before(op).create(
            kind, operands, [type_], properties, op.attributes, op.results
        )
        v = new.results[0]
    new_last = _reshape(rewriter.before(last), last, v, _shape(last.out))
    new_last.name_hint = last.out.name_hint
    last.out.replace_all_uses_with(new_last)
    erase(last)
    for op, *_ in reversed(way):
        erase(op)
    if first.out.first_use is None:
        erase(first)
    owner = new_last.owner
    return owner if isinstance(owner, ReshapeOp) and owner.x is v else None


def _reshape(rewriter: Rewriter, like: ReshapeOp, x: SSAValue, shape: Shape) -> SSAValue:
    """Return a value in another shape, with the name and the marks of an op."""
    if _shape(x) == shape:
        return x
    type = TensorType(unsharded_type(x).element_type, shape)
    return rewriter.copy(like, [x], [type]).out


def _perm(perm: Sequence[int], at: int, count: int) -> tuple[int, ...]:
    """Return a permutation with several dimensions in place of dimension `at` of its operand."""
    places = [range(d + (count - 1) * (d > at), d + (count - 1) * (d >= at) + 1) for d in perm]
    return tuple([d for several in places for d in several])


def _equation(op: Contraction, axis: int, count: int) -> str:
    """Return the equation with several letters in place of one of the result."""
    terms = op.letters
    letter = terms[2][axis]
    unused = [c for c in ascii_letters if c not in "".join(terms)]
    x, y, z = (term.replace(letter, letter + "".join(unused[: count - 1])) for term in terms)
    return f"{x},{y}->{z}"


def _with(shape: Shape, axis: int, sizes: Shape) -> Shape:
    return (*shape[:axis], *sizes, *shape[axis + 1 :])


def _shape(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()
