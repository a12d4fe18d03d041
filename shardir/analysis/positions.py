"""Integers and truth values that follow from the indices of an element alone.

    %i = nn.iota dim 0 -> tensor<8x1xi64>               d0
    %j = nn.iota dim 1 -> tensor<1x8xi64>               d1
    %mask = nn.compare <le> %j, %i                      {d0 - d1 >= 0}: the lower triangle

Each op is asked for its element at an index, which it asks its operands for at theirs. The cost
does not depend on the numbers of elements.
"""

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import IntegerType, i1
from xdsl.ir import Operation, SSAValue

from shardir.algebra.affine import (
    EVERYWHERE,
    NOWHERE,
    Affine,
    IntegerSet,
    compare,
    flatten,
    unflatten,
)
from shardir.dialects import nn
from shardir.dialects.nn.properties import axis_of
from shardir.dialects.nn.types import unsharded_type

PositionForm = Affine | IntegerSet | None
"""An integer, or the indices at which a truth value is true; None: neither is known."""

AffineIndex = tuple[Affine, ...]

DEEPEST = 200
"""The ops on the way from an element to what it is known by: Python's stack has an end."""


def form_of(v: SSAValue) -> PositionForm:
    """Return the form of an element of a value at its index (d0, d1, ...), those of size 1 left
    out."""
    return _ElementForms(unsharded_type(v).get_shape()).of(v)


class _ElementForms:
    """The element of a value at its index, of which those of other values follow."""

    def __init__(self, shape: Sequence[int]):
        self.sizes = dict(enumerate(shape))
        self.index = tuple(Affine.dim(d) if n > 1 else Affine() for d, n in enumerate(shape))
        self._known: dict[tuple[SSAValue, AffineIndex], PositionForm] = {}
        self._depth = 0

    def of(self, v: SSAValue) -> PositionForm:
        return self.at(v, self.index)

    def at(self, v: SSAValue, index: AffineIndex) -> PositionForm:
        """Return the form of the element of a value at an index."""
        op = v.owner
        rule = RULES.get(type(op)) if isinstance(op, Operation) else None
        element = unsharded_type(v).element_type if rule is not None else None
        if rule is None or not isinstance(element, IntegerType) or self._depth > DEEPEST:
            return None
        key = v, index
        if key not in self._known:
            self._depth += 1
            found = rule(self, op, index)
            self._depth -= 1
            self._known[key] = found if self._fits(found, element) else None
        return self._known[key]

    def _fits(self, form: PositionForm, element: IntegerType) -> bool:
        """Whether a form is of numbers that the element type has."""
        width = element.width.data
        if not isinstance(form, Affine):
            return width == 1
        low, high = form.bounds(self.sizes)
        return width > 1 and -(2 ** (width - 1)) <= low and high < 2 ** (width - 1)

    def broadcast(self, op: Operation, index: AffineIndex) -> list[PositionForm]:
        """Return the forms of the operands of an elementwise op."""
        found = list[PositionForm]()
        for v in op.operands:
            shape = unsharded_type(v).get_shape()
            own = index[len(index) - len(shape) :]
            found.append(self.at(v, _within(own, shape)))
        return found

    def new_index(self, size: int) -> Affine:
        """Return an index of its own."""
        dim = len(self.sizes)
        self.sizes[dim] = size
        return Affine.dim(dim) if size > 1 else Affine()


def _within(index: Sequence[Affine], shape: Sequence[int]) -> AffineIndex:
    """The index with 0 for the dimensions of size 1, along which elements repeat."""
    return tuple(e if n > 1 else Affine() for e, n in zip(index, shape, strict=True))


# ---- numbers ----


def _constant(_: _ElementForms, op: nn.ConstantOp, index: AffineIndex) -> PositionForm:
    if not op.value.is_splat():
        return None
    number = nn.dense_values(op.value).flat[0].item()
    return (EVERYWHERE if number else NOWHERE) if isinstance(number, bool) else Affine((), number)


def _iota(_: _ElementForms, op: nn.IotaOp, index: AffineIndex) -> PositionForm:
    return index[axis_of(op.properties, "dim", len(index))]


def _add(of: _ElementForms, op: nn.AddOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    return x + y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _sub(of: _ElementForms, op: nn.SubOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    return x - y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _mul(of: _ElementForms, op: nn.MulOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine) or (x.terms and y.terms):
        return None
    return y.times(x.constant) if y.terms else x.times(y.constant)


def _neg(of: _ElementForms, op: nn.NegOp, index: AffineIndex) -> PositionForm:
    (x,) = of.broadcast(op, index)
    return x.times(-1) if isinstance(x, Affine) else None


def _remainder(of: _ElementForms, op: nn.RemainderOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine) or y.terms or y.constant < 1:
        return None
    parts = x.divide(y.constant, of.sizes)
    return parts and parts[1]


def _cumsum(of: _ElementForms, op: nn.CumsumOp, index: AffineIndex) -> PositionForm:
    axis = axis_of(op.properties, "axis", len(index))
    before = of.new_index(unsharded_type(op.x).get_shape()[axis])
    x = of.at(op.x, (*index[:axis], before, *index[axis + 1 :]))
    if (
        not isinstance(x, Affine)
        or op.reverse is not None
        or any(t in x.terms for t in before.terms)
    ):
        return None
    count = index[axis] + 1
    if x.terms and count.terms:
        return None
    return count.times(x.constant) if count.terms else x.times(count.constant)


# ---- truth ----


def _compare(of: _ElementForms, op: nn.CompareOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine):
        return None
    return compare(op.how.data, x, y, of.sizes)


def _and(of: _ElementForms, op: nn.AndOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    if NOWHERE in (x, y):
        return NOWHERE
    if not isinstance(x, IntegerSet) or not isinstance(y, IntegerSet):
        return None
    return IntegerSet.of(x.constraints | y.constraints, of.sizes)


def _or(of: _ElementForms, op: nn.OrOp, index: AffineIndex) -> PositionForm:
    x, y = of.broadcast(op, index)
    if EVERYWHERE in (x, y):
        return EVERYWHERE
    if not isinstance(x, IntegerSet) or not isinstance(y, IntegerSet):
        return None
    if x == NOWHERE or y.constraints <= x.constraints:
        return y
    return x if y == NOWHERE or x.constraints <= y.constraints else None


def _not(of: _ElementForms, op: nn.NotOp, index: AffineIndex) -> PositionForm:
    (x,) = of.broadcast(op, index)
    return x.complement(of.sizes) if isinstance(x, IntegerSet) else None


def _select(of: _ElementForms, op: nn.SelectOp, index: AffineIndex) -> PositionForm:
    where, x, y = of.broadcast(op, index)
    if where in (EVERYWHERE, NOWHERE):
        return x if where == EVERYWHERE else y
    return x if x == y else None


def _convert(of: _ElementForms, op: nn.ConvertOp, index: AffineIndex) -> PositionForm:
    x, is_truth = of.at(op.x, index), unsharded_type(op.out).element_type == i1
    if isinstance(x, IntegerSet) and not is_truth:
        return {EVERYWHERE: Affine((), 1), NOWHERE: Affine()}.get(x)
    if isinstance(x, Affine) and is_truth:
        return compare("ne", x, Affine(), of.sizes)
    return x


# ---- places ----


def _same(of: _ElementForms, op: nn.StopGradientOp, index: AffineIndex) -> PositionForm:
    return of.at(op.x, index)


def _reshape(of: _ElementForms, op: nn.ReshapeOp, index: AffineIndex) -> PositionForm:
    position = flatten(index, unsharded_type(op.out).get_shape())
    before = unflatten(position, unsharded_type(op.x).get_shape(), of.sizes)
    return None if before is None else of.at(op.x, before)


def _transpose(of: _ElementForms, op: nn.TransposeOp, index: AffineIndex) -> PositionForm:
    before = dict(zip(op.perm.data, index, strict=True))
    return of.at(op.x, tuple(before[d] for d in range(len(index))))


def _broadcast(of: _ElementForms, op: nn.BroadcastOp, index: AffineIndex) -> PositionForm:
    before = [index[d] for d in op.dims.data]
    return of.at(op.x, _within(before, unsharded_type(op.x).get_shape()))


def _slice(of: _ElementForms, op: nn.SliceOp, index: AffineIndex) -> PositionForm:
    before = [e.times(k) + a for e, k, a in
              zip(index, op.strides.data, op.starts.data, strict=True)]  # fmt: skip
    return of.at(op.x, tuple(before))


def _concat(of: _ElementForms, op: nn.ConcatOp, index: AffineIndex) -> PositionForm:
    """The form of all parts, if there is one; a part of one element has any form that is its own
    there."""
    axis = axis_of(op.properties, "axis", len(index))
    low, high = index[axis].bounds(of.sizes)
    start, parts = 0, list[tuple[int, Affine, PositionForm]]()
    for v in op.operands:
        n = unsharded_type(v).get_shape()[axis]
        at = index[axis] + -start
        if start <= low and high < start + n:
            return of.at(v, (*index[:axis], at, *index[axis + 1 :]))
        if start <= high and low < start + n:
            inside = of.new_index(n)
            x = of.at(v, (*index[:axis], inside, *index[axis + 1 :]))
            parts.append((n, at, _replaced(x, inside, at)))
        start += n
    form = max(parts, key=lambda part: part[0])[2] if parts else None
    return form if all(_agrees(x, form, at, n) for n, at, x in parts) else None


def _replaced(form: PositionForm, index: Affine, by: Affine) -> PositionForm:
    """A form with another expression in place of an index."""
    if form is None or not index.terms:
        return form
    ((dim, _),) = index.terms
    if isinstance(form, Affine):
        return form.substitute(dim, by)
    return IntegerSet(frozenset(e.substitute(dim, by) for e in form.constraints))


def _agrees(x: PositionForm, form: PositionForm, at: Affine, size: int) -> bool:
    """Whether two forms are equal where `at` is between 0 and a size."""
    if x == form:
        return True
    if size > 1 or not isinstance(x, Affine) or not isinstance(form, Affine) or not at.terms:
        return False
    difference, (dim, factor) = x - form, at.terms[0]
    times = dict(difference.terms).get(dim, 0)
    return difference == at.times(times // factor)


def _gather(of: _ElementForms, op: nn.GatherOp, index: AffineIndex) -> PositionForm:
    axis = axis_of(op.properties, "axis", len(table := unsharded_type(op.table).get_shape()))
    end = axis + len(unsharded_type(op.ids).get_shape())
    ids = of.at(op.ids, index[axis:end])
    return _taken(of, op.table, ids, axis, table, (*index[:axis], Affine(), *index[end:]))


def _take(of: _ElementForms, op: nn.TakeAlongAxisOp, index: AffineIndex) -> PositionForm:
    axis = axis_of(op.properties, "axis", len(index))
    ids = of.at(op.ids, index)
    return _taken(of, op.x, ids, axis, unsharded_type(op.x).get_shape(), index)


def _taken(
    of: _ElementForms,
    x: SSAValue,
    at: PositionForm,
    axis: int,
    shape: Sequence[int],
    index: AffineIndex,
) -> PositionForm:
    """The element at another index along an axis, unless that can be outside, which is an error."""
    if not isinstance(at, Affine):
        return None
    low, high = at.bounds(of.sizes)
    inside = low >= 0 and high < shape[axis]
    return of.at(x, (*index[:axis], at, *index[axis + 1 :])) if inside else None


RULES: dict[type[Operation], Callable[..., PositionForm]] = {
    nn.ConstantOp: _constant, nn.IotaOp: _iota, nn.AddOp: _add, nn.SubOp: _sub, nn.MulOp: _mul,
    nn.NegOp: _neg, nn.RemainderOp: _remainder, nn.CumsumOp: _cumsum, nn.CompareOp: _compare,
    nn.AndOp: _and, nn.OrOp: _or, nn.NotOp: _not, nn.SelectOp: _select, nn.ConvertOp: _convert,
    nn.StopGradientOp: _same, nn.ReshapeOp: _reshape, nn.TransposeOp: _transpose,
    nn.BroadcastOp: _broadcast, nn.SliceOp: _slice, nn.ConcatOp: _concat, nn.GatherOp: _gather,
    nn.TakeAlongAxisOp: _take,
}  # fmt: skip
"""What each op says of its element. Of others nothing is known."""
