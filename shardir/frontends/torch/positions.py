"""Masks and positions that follow from indices alone: causal masks become a mark, others shorter.

%mask = ... of iotas: {d2 - d3 >= 0}
%o = nn.attention %q, %k, %v mask %mask         ->      %o = nn.attention %q, %k, %v causal

Models compute masks and positions from the indices of elements, in many ops, equal in each step.
They are recognised by their forms (analysis/positions.py), not by patterns of ops.
"""

from collections.abc import Iterator

from xdsl.dialects.builtin import TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.affine import EVERYWHERE, NOWHERE, Affine, IntegerSet
from shardir.algebra.layout import Shape
from shardir.analysis.positions import PositionForm, form_of
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.rewriter import Rewriter, erase


def simplify_positions(block: Block) -> None:
    """Mark attention whose mask is causal, drop masks that are true everywhere, and compute further
    functions of positions by as few ops as their forms need."""
    forms = dict[SSAValue, PositionForm]()
    for op in reversed(ops_of(block)):  # so that values without uses are skipped
        if isinstance(op, TensorOp) and all(v.first_use is None for v in op.results):
            erase(op)
        elif not (isinstance(op, nn.AttentionOp) and _drop_mask(op, forms)):
            for v in op.operands:
                if isinstance(v.owner, TensorOp) and not _is_known(op, forms):
                    _shorten(v, forms)


def _form(v: SSAValue, forms: dict[SSAValue, PositionForm]) -> PositionForm:
    if v not in forms:
        forms[v] = form_of(v)
    return forms[v]


def _is_known(op: Operation, forms: dict[SSAValue, PositionForm]) -> bool:
    """Whether the results of an op have forms too, so that its operands need none."""
    return isinstance(op, TensorOp) and all(_form(v, forms) is not None for v in op.results)


# ---- attention ----


def _drop_mask(op: nn.AttentionOp, forms: dict[SSAValue, PositionForm]) -> bool:
    """Leave out a mask that is causal, or true everywhere; return whether it is."""
    if (mask := op.mask) is None:
        return False
    form, shape = _form(mask, forms), unsharded_type(mask).get_shape()
    scores = (unsharded_type(op.q).get_shape()[-2], unsharded_type(op.k).get_shape()[-2])
    is_causal = shape[-2:] == scores and form == _lower_triangle(shape)
    if form != EVERYWHERE and not is_causal:
        return False
    properties = {**op.properties, "causal": UnitAttr()} if is_causal else op.properties
    new = Rewriter().before(op).copy(op, [op.q, op.k, op.v], properties=properties)
    Rewriter.replace(op, new.results)
    return True


def _lower_triangle(shape: Shape) -> IntegerSet:
    """Return the set of a causal mask of this shape: query i attends to keys 0 to i."""
    rank = len(shape)
    row, column = (Affine.dim(d) if shape[d] > 1 else Affine() for d in (rank - 2, rank - 1))
    return IntegerSet.of([row - column], dict(enumerate(shape)))


# ---- other values ----


def _shorten(v: SSAValue, forms: dict[SSAValue, PositionForm]) -> None:
    """Compute a value from its form, if these are fewer ops."""
    form = _form(v, forms)
    if form is None or isinstance(v.owner, nn.IotaOp | nn.ConstantOp):
        return
    assert isinstance(v.owner, TensorOp)
    rewriter, before = Rewriter().before(v.owner), v.owner.prev_op
    rewriter.attributes = dict(v.owner.attributes)
    new = _Written(rewriter, unsharded_type(v)).of(form)
    new_ops = list(_between(before, v.owner))
    if len(new_ops) >= len(_needed_by(v, len(new_ops))):
        for op in new_ops:
            erase(op)
        return
    path, _, _ = (v.name_hint or "").rpartition(".")
    for op in new_ops:
        kind = op.name.partition(".")[2]
        op.results[0].name_hint = f"{path}.{kind}" if path else kind
    new.name_hint = v.name_hint
    v.replace_all_uses_with(new)
    forms[new] = form


class _Written:
    """Ops that compute values of a type from their forms."""

    def __init__(self, b: Rewriter, type: TensorType):
        self.b, self.type, self.shape = b, type, type.get_shape()

    def of(self, form: Affine | IntegerSet) -> SSAValue:
        if isinstance(form, Affine):
            x = self._sum(form, self.type.element_type, full=True)
        elif form.constraints and form != NOWHERE:
            x = self._truth(form)
        else:
            return self._everywhere(form == EVERYWHERE)
        have = unsharded_type(x).get_shape()
        if have == self.shape:
            return x
        return self.b.broadcast(x, range(len(self.shape) - len(have), len(self.shape)), self.shape)

    def _everywhere(self, number: int) -> SSAValue:
        return self.b.value(
            nn.ConstantOp, props={"value": nn.dense_attr(self.type, [number])}, result=self.type
        )

    def _sum(self, form: Affine, element: Attribute, full: bool = False) -> SSAValue:
        """Compute a form. The result has size 1 along dimensions on which it does not depend, with
        `full` only if more would take another op."""
        number = form.constant
        if not form.terms:
            return self._everywhere(number) if full else self.b.constant(number, element)
        x = None
        for dim, factor in form.terms:
            sizes = [n if d == dim else 1 for d, n in enumerate(self.shape)]
            shape = self.shape if full and len(form.terms) == 1 else tuple(sizes)
            term = self.b.value(
                nn.IotaOp, props={"dim": int_attr(dim)}, result=tensor(element, shape)
            )
            if factor != 1:
                term = self.b.mul(term, self.b.constant(factor, element))
            x = term if x is None else self.b.add(x, term)
        assert x is not None
        return self.b.add(x, self.b.constant(number, element)) if number else x

    def _truth(self, form: IntegerSet) -> SSAValue:
        """The truth value that all constraints hold; of an expression and its negative: it is 0."""
        x = None
        for e in sorted(form.constraints):
            opposite = e.times(-1)
            is_equal = opposite in form.constraints
            if is_equal and opposite < e:
                continue
            how = "eq" if is_equal else "ge"
            if how == "ge" and e.constant == -1:  # x - 1 >= 0, of integers
                how, e, opposite = "gt", e + 1, opposite + -1
            sides = [self._sum(side, i64) for side in (_positive(e), _positive(opposite))]
            compared = self.b.compare(how, *sides)
            x = compared if x is None else self.b.value(nn.AndOp, x, compared)
        assert x is not None
        return x


def _positive(e: Affine) -> Affine:
    """The terms of an expression with positive factors."""
    return Affine(tuple((d, k) for d, k in e.terms if k > 0), max(e.constant, 0))


# ---- ops that become unused ----


def _between(first: Operation | None, end: Operation) -> Iterator[Operation]:
    """Yield the ops before `end` back to `first`, which is left out."""
    op = end.prev_op
    while op is not first and op is not None:
        yield op
        op = op.prev_op


def _needed_by(v: SSAValue, limit: int) -> set[Operation]:
    """Return the ops that a value needs; `limit` + 1 of them are enough."""
    needed, waiting = set[Operation](), [v]
    while waiting and len(needed) <= limit:
        op = waiting.pop().owner
        if isinstance(op, Operation) and op not in needed:
            needed.add(op)
            waiting += op.operands
    return needed
