"""The application of rules to a block: a composition becomes the op that it computes.

A rule names the value that its op computes (`root`), other values that it computes as well, and
makes the op. It is applied where more ops die than are made: a value inside a composition that
other ops read stays, with the ops that compute it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from xdsl.dialects.builtin import AnyFloat, UnitAttr, f64, i1
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.compat.xdsl import set_type
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import tensor
from shardir.dialects.nn.base import Props, TensorOp
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.text import word
from shardir.rewriting.compositions.matching import (
    Match,
    MatchFacts,
    elsewhere,
    is_annotated,
    matches,
)
from shardir.rewriting.compositions.terms import Term
from shardir.rewriting.rewriter import Rewriter, erase

Replacements = Mapping[Term, SSAValue] | Mapping[SSAValue, SSAValue]
"""The new value of each term, or of other values."""


WEIGHTS: Mapping[type[Operation], float] = {
    nn.ConstantOp: 0.0,
    **dict.fromkeys((nn.ReshapeOp, nn.TransposeOp, nn.NegOp, nn.ConvertOp), 0.25),
    **dict.fromkeys((nn.SoftmaxOp, nn.LogSoftmaxOp), 2.0),
    nn.CrossEntropyOp: 1.5,
}
"""How much ops count that cost less than others, or that compute exponentials of their own."""

WEIGHT_OF_MASKS = 0.25

REACH = 16
"""The number of ops from a value to the result of a composition in which it occurs, at most."""

TermPlace = tuple[Term, Term]
"""A term, and the term from whose value its own is computed."""


@dataclass(frozen=True, eq=False)
class CompositionRule:
    """How a composition is raised.

    Attributes:
        root: the term.
        kinds: the ops whose results may be its value.
        make: makes the new ops; None, before it makes any, where the values do not fit them.
        also: terms that the program must have too.
        perhaps: terms that it may have.
        of_floats: whether the root is of floats, as other values need no look.
    """

    root: Term
    kinds: tuple[type[Operation], ...]
    make: "Callable[[Builder, Match], Replacements | None]"
    also: tuple[TermPlace, ...] = ()
    perhaps: tuple[TermPlace, ...] = ()
    of_floats: bool = True


class Builder:
    """Makes the ops of one composition, each where its operands are available and before the users
    of the values that it replaces."""

    def __init__(self, order: "Order", match: Match, root: SSAValue):
        self.order, self.match = order, match
        self.rewriter = Rewriter()
        self.root, owner = root, root.owner
        assert isinstance(owner, Operation)
        self.root_op = owner
        self.ops: list[Operation] = []

    def before(self, *places: Term | SSAValue) -> None:
        """Make the next ops where the first of values, or of the values of terms, is made."""
        values = (self.match.parts.get(x) if isinstance(x, Term) else x for x in places)
        owners = [v.owner for v in values if v is not None]
        first = min(
            (o for o in owners if isinstance(o, Operation)), key=self.order.__getitem__,
            default=self.root_op,
        )  # fmt: skip
        self.rewriter.before(first)

    def results(
        self, kind: type[TensorOp], /, *operands: SSAValue, result: Any = None, **props: Any
    ) -> Sequence[SSAValue]:
        """Make an op at the current place, or after its operands."""
        point = self.rewriter.next
        assert point is not None
        for v in operands:
            owner = v.owner
            if isinstance(owner, Operation) and self.order[owner] >= self.order[point]:
                following = owner.next_op
                assert following is not None
                point = following
        self.rewriter.next = point
        properties: Props = {k: p for k, p in props.items() if p is not None}
        op = self.rewriter.op(kind, *operands, props=properties, result=result)
        op.results[0].name_hint = _short_name(op)
        self.order.add(op, point)
        self.ops.append(op)
        return op.results

    def value(self, kind: type[TensorOp], /, *operands: SSAValue, **options: Any) -> SSAValue:
        return self.results(kind, *operands, **options)[0]

    def reshape(self, x: SSAValue, shape: Sequence[int]) -> SSAValue:
        t = unsharded_type(x)
        if t.get_shape() == tuple(shape):
            return x
        return self.value(nn.ReshapeOp, x, result=tensor(t.element_type, tuple(shape)))

    def reduced(self, x: SSAValue, kind: str, dims: Sequence[int], keeps: bool = True) -> SSAValue:
        """Reduce over dimensions, which stay with size 1 if it `keeps` them."""
        return self.value(
            nn.ReduceOp, x, kind=word(nn.ReductionKindAttr, kind), dims=dims_attr(*dims),
            keep=UnitAttr() if keeps else None,
        )  # fmt: skip

    def number(self, number: float, element: Attribute = f64) -> SSAValue:
        """Return a scalar constant, one for all compositions."""
        t = tensor(element, ())
        return self._shared(nn.ConstantOp, (), {"value": nn.dense_attr(t, [number])}, t)

    def scalar(self, x: SSAValue, element: Attribute) -> SSAValue:
        """Return a scalar in another element type, one for all compositions."""
        if unsharded_type(x).element_type == element:
            return x
        return self._shared(nn.ConvertOp, (x,), {}, tensor(element, ()))

    def of_scalar(self, kind: type[TensorOp], x: SSAValue, /, **props: Attribute) -> SSAValue:
        """Return the result of an op on a scalar, one for all compositions."""
        return self._shared(kind, (x,), props, None)

    def _shared(
        self, kind: type[TensorOp], operands: tuple[SSAValue, ...], props: Props, result: Any
    ) -> SSAValue:  # fmt: skip
        key = kind, operands, tuple(props.items())
        if (known := self.order.shared.get(key)) is not None:
            return known
        owner = operands[0].owner if operands else None
        block = self.root_op.parent
        assert block is not None
        point = owner.next_op if isinstance(owner, Operation) else block.first_op
        assert point is not None
        rewriter = Rewriter().before(point)
        rewriter.location = self.root_op.location
        op = rewriter.op(kind, *operands, props=props, result=result)
        op.results[0].name_hint = _short_name(op)
        self.order.add(op, point)
        self.order.shared[key] = op.results[0]
        return op.results[0]

    def discard(self) -> None:
        for op in reversed(self.ops):
            self.order.remove(op)
            erase(op)


@dataclass
class Order:
    """The order of the ops of a block, also of new ones."""

    positions: dict[Operation, tuple[int, float]] = field(default_factory=dict)
    count: int = 0
    shared: dict[Any, SSAValue] = field(default_factory=dict)
    """Results of new scalar ops, which all compositions share."""
    known: MatchFacts = field(default_factory=MatchFacts)
    """What is known since the last change."""
    changed: list[Operation] = field(default_factory=list)
    """New ops, their users, and ops whose results lost users."""

    @staticmethod
    def of(ops: Sequence[Operation]) -> "Order":
        return Order({op: (i, 0) for i, op in enumerate(ops)})

    def __getitem__(self, op: Operation) -> tuple[int, float]:
        return self.positions[op]

    def add(self, op: Operation, before: Operation) -> None:
        """Record a new op, after all other new ones before the same op."""
        self.count += 1
        at, among = self.positions[before]
        self.positions[op] = (at, among - 1 / (1 + self.count)) if among else (at - 1, self.count)

    def remove(self, op: Operation) -> None:
        del self.positions[op]


def raise_block(rules: Sequence[CompositionRule], block: Block) -> None:
    """Apply rules to a block from its end, once to each value, until none applies. After the first
    time, only values near changes are tried."""
    by_kind: dict[type[Operation], list[CompositionRule]] = {}
    for rule in rules:
        for kind in rule.kinds:
            by_kind.setdefault(kind, []).append(rule)
    roots = ops_of(block)
    while roots:
        order = Order.of(ops_of(block))
        for op in reversed(roots):
            for rule in by_kind.get(type(op), ()):
                if op.parent is None or not isinstance(op, TensorOp):
                    break
                _apply(rule, op.results[0], order)
        near = _users_within(REACH, order.changed)
        roots = [op for op in ops_of(block) if op in near]


def _users_within(steps: int, ops: Iterable[Operation]) -> set[Operation]:
    """Return ops, and those that read their results through so many ops at most."""
    latest = {op for op in ops if op.parent is not None}
    near = set(latest)
    for _ in range(steps):
        latest = {u.operation for op in latest for r in op.results for u in r.uses} - near
        near |= latest
    return near


def _apply(rule: CompositionRule, root: SSAValue, order: Order) -> bool:
    if rule.of_floats and not isinstance(unsharded_type(root).element_type, AnyFloat):
        return False
    for match in matches(rule.root, root, order.known):
        whole = _with_others(rule, match)
        if whole is None:
            continue
        builder = Builder(order, whole, root)
        builder.before(rule.root)
        replacements = rule.make(builder, whole)
        if replacements is None:
            assert not builder.ops
            continue
        if _replace(builder, whole, replacements):
            order.known.clear()
            return True
        builder.discard()
    return False


def _with_others(rule: CompositionRule, match: Match) -> Match | None:
    for terms, is_optional in ((rule.also, False), (rule.perhaps, True)):
        for term, near in terms:
            if term in match.parts:
                continue
            found = elsewhere(term, match.of(near), match)
            if found is not None:
                match = found
            elif not is_optional:
                return None
    return match


def _replace(builder: Builder, match: Match, replacements: Replacements) -> bool:
    """Replace values by new ones, if this lets more ops die than were made."""
    pairs = [
        (old, new) for x, new in replacements.items()
        if (old := match.parts.get(x) if isinstance(x, Term) else x) is not None
    ]  # fmt: skip
    replaced = {old for old, _ in pairs}
    if any(v in replaced for op in builder.ops for v in op.operands):
        return False
    dead = _dead(replaced, {new for _, new in pairs})
    if _work(dead) <= _work(builder.ops) or not all(
        isinstance(old.owner, Operation)
        and unsharded_type(old) == unsharded_type(new)
        and (not is_annotated(old) or new.owner in builder.ops)
        and _is_before(new, [u.operation for u in old.uses if u.operation not in dead], builder)
        for old, new in pairs
    ):
        return False
    readers = (use.operation for old, _ in pairs for use in old.uses)
    operands = (v.owner for op in dead for v in op.operands)
    near = (op for op in (*readers, *operands) if isinstance(op, Operation) and op not in dead)
    builder.order.changed += [*builder.ops, *near]
    for old, new in pairs:
        if is_annotated(old):
            set_type(new, old.type)
        old.replace_all_uses_with(new)
        if (hint := old.name_hint) is not None and not hint.startswith(_short_name(old.owner)):
            new.name_hint = hint  # a name of the user
    for op in sorted(dead, key=builder.order.__getitem__, reverse=True):
        builder.order.remove(op)
        erase(op)
    return True


def _short_name(op: Operation | Block) -> str:
    return op.name.partition(".")[2] if isinstance(op, Operation) else ""


def _is_before(value: SSAValue, users: Iterable[Operation], builder: Builder) -> bool:
    owner = value.owner
    if not isinstance(owner, Operation):
        return True
    order = builder.order
    return all(order[owner] < order[u] for u in users)


def _dead(replaced: set[SSAValue], new: set[SSAValue]) -> set[Operation]:
    """Return the ops that die when values are replaced by new ones."""
    dead = set[Operation]()
    waiting = [v.owner for v in replaced]
    while waiting:
        op = waiting.pop()
        if op in dead or not isinstance(op, TensorOp):
            continue
        if all(
            r in replaced or (not is_annotated(r) and all(use.operation in dead for use in r.uses))
            for r in op.results
        ) and new.isdisjoint(op.results):
            dead.add(op)
            waiting += [v.owner for v in op.operands]
    return dead


def _work(ops: Iterable[Operation]) -> float:
    """Count the ops that compute something."""
    return sum(
        WEIGHT_OF_MASKS if unsharded_type(op.results[0]).element_type == i1
        else WEIGHTS.get(type(op), 1.0)
        for op in ops
    )  # fmt: skip
