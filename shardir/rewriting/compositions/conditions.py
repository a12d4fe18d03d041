"""The conditions under which scores of attention stay: what they say of queries and keys."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

from xdsl.dialects.builtin import IntegerType
from xdsl.ir import SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.creation import count_to, dense_values
from shardir.dialects.nn.logic import COMPARISONS
from shardir.dialects.nn.properties import axis_of
from shardir.rewriting.compositions.named import NamedValue, are_same

CAUSAL = {("ge", True), ("lt", False)}
"""How the index of a query compares with that of a key, and whether their score stays."""

MIRRORED = {"ge": "le", "le": "ge", "gt": "lt", "lt": "gt"}

KnownElements = Array | tuple[SSAValue, tuple[str, ...]] | None
"""Elements for each query; or the value whose elements they are, and its dimensions."""


@dataclass(frozen=True)
class Condition:
    """A value of i1, and whether a score stays where it is true, or where it is false."""

    at: NamedValue
    stays: bool = True

    def parts(self) -> "list[Condition]":
        """The conditions that hold together where this one holds."""
        source = self.at.source()
        op = source.value.owner
        if isinstance(op, nn.NotOp):
            return Condition(source.operand(op.x), not self.stays).parts()
        if isinstance(op, nn.AndOp if self.stays else nn.OrOp):
            both = (Condition(source.operand(x), self.stays) for x in op.operands)
            return [part for side in both for part in side.parts()]
        return [self]

    def is_same(self, other: "Condition") -> bool:
        return self.stays == other.stays and are_same(self.at.source(), other.at.source())

    def causal_row(self, column: str) -> str:
        """The dimension of the queries that attend to no later keys; "" for other conditions."""
        x = self.at.source()
        op = x.value.owner
        if isinstance(op, nn.ConstantOp):
            names, values = [n for n in x.names if n], dense_values(op.value)
            if len(names) != 2 or column not in names:
                return ""
            values = values.reshape([*x.sizes.values()])
            values = values if names[1] == column else values.T
            names.remove(column)
            rows, columns = values.shape
            triangle = count_to(rows)[:, None] >= count_to(columns)
            return names[0] if ((values == self.stays) == triangle).all() else ""
        if not isinstance(op, nn.CompareOp):
            return ""
        left, right = (_counted(x.operand(v)) for v in op.operands)
        how = op.how.data
        if left == column:
            left, right, how = right, left, MIRRORED.get(how, "")
        is_causal = left and left != column and right == column and (how, self.stays) in CAUSAL
        return left if is_causal else ""

    def holds_for(self, keys: "Keys") -> bool:
        """Whether the condition is known to hold for a key of each query."""
        known = _known(self.at, keys)
        return _are_elements(known) and bool((known == self.stays).all())


@dataclass(frozen=True)
class Keys:
    """A key of each query: their dimensions, and the index of the key. With `same` it is that of
    the query."""

    row: str
    column: str
    queries: int
    same: bool

    def indices(self, name: str) -> Array | None:
        if name not in (self.row, self.column):
            return None
        is_first = name == self.column and not self.same
        return count_to(self.queries) * (0 if is_first else 1)


def leave_a_key(conditions: Sequence[Condition], row: str, column: str, scores: NamedValue) -> bool:
    """Whether all conditions hold for the key with the index of the query, or for the first key."""
    if row not in scores.sizes:
        return not conditions
    count = scores.sizes[row]
    choices = [Keys(row, column, count, same) for same in (False, True)]
    if count > scores.sizes[column]:
        del choices[1]
    return any(all(c.holds_for(keys) for c in conditions) for keys in choices)


def _counted(x: NamedValue) -> str:
    """The dimension along which a value is 0, 1, 2, ...; "" for other values."""
    x = x.source()
    op = x.value.owner
    if not isinstance(op, nn.IotaOp):
        return ""
    return x.names[axis_of(op.properties, "dim", len(x.names))]


def _are_elements(known: KnownElements) -> TypeGuard[Array]:
    return known is not None and not isinstance(known, tuple)


def _known(x: NamedValue, keys: Keys) -> KnownElements:
    """What is known of the elements of a value for a key of each query."""
    x = x.source()
    op = x.value.owner
    counted = keys.indices(_counted(x))
    if counted is not None:
        return counted
    if isinstance(op, nn.ConstantOp):
        values = dense_values(op.value)
        if values.size and (values == values.flat[0]).all():
            return values.reshape(-1)[:1]
        indices = [keys.indices(n) for n in x.sizes]
        if all(i is not None for i in indices):
            return values.reshape([*x.sizes.values()])[tuple(indices)]
    if isinstance(op, nn.NotOp):
        known = _known(x.operand(op.x), keys)
        return nn.NotOp.NUMPY(known) if _are_elements(known) else None
    if isinstance(op, nn.CompareOp | nn.AddOp | nn.SubOp | nn.AndOp | nn.OrOp):
        left, right = (_known(x.operand(v), keys) for v in op.operands)
        if _are_elements(left) and _are_elements(right):
            if isinstance(op, nn.CompareOp):
                return COMPARISONS[op.how.data](left, right)
            return type(op).NUMPY(left, right)
        if isinstance(op, nn.CompareOp):
            are_equal = isinstance(left, tuple) and isinstance(right, tuple) and left == right
            return COMPARISONS[op.how.data](count_to(1), count_to(1)) if are_equal else None
    if not isinstance(x.element, IntegerType):
        return None  # NaN is not equal to itself
    if not keys.same and keys.column in x.names:
        return None
    return x.value, tuple(keys.row if n == keys.column else n for n in x.names)
