"""Integers and truth values that are functions of an element's indices.

    %i = nn.iota dim 0 -> tensor<8x1xi64>               d0
    %j = nn.iota dim 1 -> tensor<1x8xi64>               d1
    %mask = nn.compare <le> %j, %i                      {d0 - d1 >= 0}: the lower triangle

The form of an op's element at an index follows from its operands' elements at their indices. The
cost does not depend on the number of elements.
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
"""An integer, or the set of indices at which a truth value is true; None if unknown."""

AffineIndex = tuple[Affine, ...]

DEEPEST = 200
"""Bounds the recursion from an element to its operands' elements, below Python's limit on the
stack."""


def form_of(v: SSAValue) -> PositionForm:
    """Return the form of an element of a value at its index (d0, d1, ...), without dimensions of
    size 1."""
    return _ElementForms(unsharded_type(v).get_shape()).of(v)


class _ElementForms:
    """The forms of elements, given the index of one value's element."""

    def __init__(self, shape: Sequence[int]):
        self.sizes = dict(enumerate(shape))
        self.index = tuple(Affine.dim(d) if n > 1 else Affine() for d, n in enumerate(shape))
        self._known: dict[tuple[SSAValue, AffineIndex], PositionForm] = {}
        self._depth = 0

    def of(self, v: SSAValue) -> PositionForm:
        return self.form_at(v, self.index)

    def form_at(self, v: SSAValue, index: AffineIndex) -> PositionForm:
        """Return the form of the element of a value at an index."""
        op = v.owner
        rule = RULES.get(type(op)) if isinstance(op, Operation) else None
        element = unsharded_type(v).element_type if rule is not None else None
        if rule is None or not isinstance(element, IntegerType) or self._depth > DEEPEST:
            return None
        key = v, index
        if key not in self._known:
            self._depth += 1
            form = rule(self, op, index)
            self._depth -= 1
            self._known[key] = form if self._fits(form, element) else None
        return self._known[key]

    def _fits(self, form: PositionForm, element: IntegerType) -> bool:
        """Whether the element type has all numbers of a form."""
        width = element.width.data
        if not isinstance(form, Affine):
            return width == 1
        low, high = form.bounds(self.sizes)
        return width > 1 and -(2 ** (width - 1)) <= low and high < 2 ** (width - 1)

    def operand_forms(self, op: Operation, index: AffineIndex) -> list[PositionForm]:
        """Return the forms of the operands of an elementwise op."""
        forms = list[PositionForm]()
        for v in op.operands:
            shape = unsharded_type(v).get_shape()
            own = index[len(index) - len(shape) :]
            forms.append(self.form_at(v, _within(own, shape)))
        return forms

    def new_index(self, size: int) -> Affine:
        """Return a new index with a number of values."""
        dim = len(self.sizes)
        self.sizes[dim] = size
        return Affine.dim(dim) if size > 1 else Affine()


def _within(index: Sequence[Affine], shape: Sequence[int]) -> AffineIndex:
    """Return the index with 0 for dimensions of size 1, along which elements repeat."""
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
    x, y = of.operand_forms(op, index)
    return x + y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _sub(of: _ElementForms, op: nn.SubOp, index: AffineIndex) -> PositionForm:
    x, y = of.operand_forms(op, index)
    return x - y if isinstance(x, Affine) and isinstance(y, Affine) else None


def _mul(of: _ElementForms, op: nn.MulOp, index: AffineIndex) -> PositionForm:
    x, y = of.operand_forms(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine) or (x.terms and y.terms):
        return None
    return y.times(x.constant) if y.terms else x.times(y.constant)


def _neg(of: _ElementForms, op: nn.NegOp, index: AffineIndex) -> PositionForm:
    (x,) = of.operand_forms(op, index)
    return x.times(-1) if isinstance(x, Affine) else None


def _remainder(of: _ElementForms, op: nn.RemainderOp, index: AffineIndex) -> PositionForm:
    x, y = of.operand_forms(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine) or y.terms or y.constant < 1:
        return None
    parts = x.divide(y.constant, of.sizes)
    return parts and parts[1]


def _cumsum(of: _ElementForms, op: nn.CumsumOp, index: AffineIndex) -> PositionForm:
    axis = axis_of(op.properties, "axis", len(index))
    before = of.new_index(unsharded_type(op.x).get_shape()[axis])
    x = of.form_at(op.x, (*index[:axis], before, *index[axis + 1 :]))
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
    x, y = of.operand_forms(op, index)
    if not isinstance(x, Affine) or not isinstance(y, Affine):
        return None
    return compare(op.how.data, x, y, of.sizes)


def _and(of: _ElementForms, op: nn.AndOp, index: AffineIndex) -> PositionForm:
    x, y = of.operand_forms(op, index)
    if NOWHERE in (x, y):
        return NOWHERE
    if not isinstance(x, IntegerSet) or not isinstance(y, IntegerSet):
        return None
    return IntegerSet.of(x.constraints | y.constraints, of.sizes)


def _or(of: _ElementForms, op: nn.OrOp, index: AffineIndex) -> PositionForm:
    x, y = of.operand_forms(op, index)
    if EVERYWHERE in (x, y):
        return EVERYWHERE
    if not isinstance(x, IntegerSet) or not isinstance(y, IntegerSet):
        return None
    if x == NOWHERE or y.constraints <= x.constraints:
        return y
    return x if y == NOWHERE or x.constraints <= y.constraints else None


def _not(of: _ElementForms, op: nn.NotOp, index: AffineIndex) -> PositionForm:
    (x,) = of.operand_forms(op, index)
    return x.complement(of.sizes) if isinstance(x, IntegerSet) else None


def _select(of: _ElementForms, op: nn.SelectOp, index: AffineIndex) -> PositionForm:
    where, x, y = of.operand_forms(op, index)
    if where in (EVERYWHERE, NOWHERE):
        return x if where == EVERYWHERE else y
    return x if x == y else None


def _convert(of: _ElementForms, op: nn.ConvertOp, index: AffineIndex) -> PositionForm:
    x, is_truth = of.form_at(op.x, index), unsharded_type(op.out).element_type == i1
    if isinstance(x, IntegerSet) and not is_truth:
        return {EVERYWHERE: Affine((), 1), NOWHERE: Affine()}.get(x)
    if isinstance(x, Affine) and is_truth:
        return compare("ne", x, Affine(), of.sizes)
    return x


# ---- places ----


def _pass_through(of: _ElementForms, op: nn.StopGradientOp, index: AffineIndex) -> PositionForm:
    return of.form_at(op.x, index)


def _reshape(of: _ElementForms, op: nn.ReshapeOp, index: AffineIndex) -> PositionForm:
    position = flatten(index, unsharded_type(op.out).get_shape())
    before = unflatten(position, unsharded_type(op.x).get_shape(), of.sizes)
    return None if before is None else of.form_at(op.x, before)


def _transpose(of: _ElementForms, op: nn.TransposeOp, index: AffineIndex) -> PositionForm:
    before = dict(zip(op.perm.data, index, strict=True))
    return of.form_at(op.x, tuple(before[d] for d in range(len(index))))


def _broadcast(of: _ElementForms, op: nn.BroadcastOp, index: AffineIndex) -> PositionForm:
    before = [index[d] for d in op.dims.data]
    return of.form_at(op.x, _within(before, unsharded_type(op.x).get_shape()))


def _slice(of: _ElementForms, op: nn.SliceOp, index: AffineIndex) -> PositionForm:
    before = [e.times(k) + a for e, k, a in
              zip(index, op.strides.data, op.starts.data, strict=True)]  # fmt: skip
    return of.form_at(op.x, tuple(before))


def _concat(of: _ElementForms, op: nn.ConcatOp, index: AffineIndex) -> PositionForm:
    """Return the form that all operands agree on; an operand of one element agrees with any form
    that has its value there."""
    axis = axis_of(op.properties, "axis", len(index))
    low, high = index[axis].bounds(of.sizes)
    start, operand_forms = 0, list[tuple[int, Affine, PositionForm]]()
    for v in op.operands:
        n = unsharded_type(v).get_shape()[axis]
        at = index[axis] + -start
        if start <= low and high < start + n:
            return of.form_at(v, (*index[:axis], at, *index[axis + 1 :]))
        if start <= high and low < start + n:
            index_in_operand = of.new_index(n)
            x = of.form_at(v, (*index[:axis], index_in_operand, *index[axis + 1 :]))
            operand_forms.append((n, at, _substitute(x, index_in_operand, at)))
        start += n
    form = max(operand_forms, key=lambda part: part[0])[2] if operand_forms else None
    return form if all(_agrees(x, form, at, n) for n, at, x in operand_forms) else None


def _substitute(form: PositionForm, index: Affine, by: Affine) -> PositionForm:
    """Return a form with an index replaced by an expression."""
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
    ids = of.form_at(op.ids, index[axis:end])
    return _element_along(of, op.table, ids, axis, table, (*index[:axis], Affine(), *index[end:]))


def _take(of: _ElementForms, op: nn.TakeAlongAxisOp, index: AffineIndex) -> PositionForm:
    axis = axis_of(op.properties, "axis", len(index))
    ids = of.form_at(op.ids, index)
    return _element_along(of, op.x, ids, axis, unsharded_type(op.x).get_shape(), index)


def _element_along(
    of: _ElementForms,
    x: SSAValue,
    at: PositionForm,
    axis: int,
    shape: Sequence[int],
    index: AffineIndex,
) -> PositionForm:
    """Return the form of the element at a new index along an axis; None if the index may be out of
    range."""
    if not isinstance(at, Affine):
        return None
    low, high = at.bounds(of.sizes)
    in_range = low >= 0 and high < shape[axis]
    return of.form_at(x, (*index[:axis], at, *index[axis + 1 :])) if in_range else None


RULES: dict[type[Operation], Callable[..., PositionForm]] = {
    nn.ConstantOp: _constant, nn.IotaOp: _iota, nn.AddOp: _add, nn.SubOp: _sub, nn.MulOp: _mul,
    nn.NegOp: _neg, nn.RemainderOp: _remainder, nn.CumsumOp: _cumsum, nn.CompareOp: _compare,
    nn.AndOp: _and, nn.OrOp: _or, nn.NotOp: _not, nn.SelectOp: _select, nn.ConvertOp: _convert,
    nn.StopGradientOp: _pass_through, nn.ReshapeOp: _reshape, nn.TransposeOp: _transpose,
    nn.BroadcastOp: _broadcast, nn.SliceOp: _slice, nn.ConcatOp: _concat, nn.GatherOp: _gather,
    nn.TakeAlongAxisOp: _take,
}  # fmt: skip
"""The rule for the element of each kind of op; elements of further kinds are unknown."""
