"""Terms against values: all ways in which the ops of a program are an instance of a term.

Each way comes with the ratio of the value to the term, so that a number may stand anywhere in a
product: `total(x) / n * -0.5` matches `mean(-0.5 * x)` with the ratio 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isclose, prod

from xdsl.dialects.builtin import AnyFloat, NoneAttr, TensorType
from xdsl.ir import Attribute, Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.elementary import splat
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.properties import dims_of
from shardir.dialects.nn.types import element_name, unsharded_type
from shardir.rewriting.compositions.terms import (
    ROWS,
    Anything,
    EitherTerm,
    NumberTerm,
    OpTerm,
    ProductTerm,
    ReducedTerm,
    SumTerm,
    Term,
)

PRECISION = {"f64": 1e-12, "f32": 1e-6, "bf16": 3 * 2**-10, "f16": 3 * 2**-13}
"""The relative difference of numbers that are equal up to rounding, by element type."""


def decimal(number: float, element: Attribute) -> float:
    """Return the shortest decimal number that an element type rounds to this one."""
    assert isinstance(element, AnyFloat)
    return next(
        short for digits in range(1, 18)
        if element.pack([short := float(f"{number:.{digits}g}")]) == element.pack([number])
    )  # fmt: skip


COMMUTATIVE = nn.MaxOp | nn.MinOp | nn.AndOp | nn.OrOp
MAX_DEPTH, MAX_USERS = 8, 64
"""Bound comparisons of equal ops, and the search of other results of a composition."""


@dataclass(frozen=True)
class Root:
    """The square root of a value of which the program has the reciprocal root."""

    of: SSAValue


Item = SSAValue | Root


@dataclass(frozen=True)
class RowDims:
    """Dimensions that a match reduces over, and the number of elements of each reduction."""

    dims: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class MatchFacts:
    """What is known as long as the program stays.

    Attributes:
        possible: whether a term matches an item in some way, at a precision, with no name bound:
            it matches in no way otherwise.
        cuts: the ways in which an item is a product of so many others, divided by so many.
    """

    possible: dict[tuple[Term, Item, float], bool] = field(default_factory=dict)
    cuts: dict[tuple[Item, int, int], "list[FactorCut]"] = field(default_factory=dict)

    def clear(self) -> None:
        self.possible.clear()
        self.cuts.clear()


@dataclass(frozen=True)
class Match:
    """The values and numbers of the names of a term, and the values of its parts."""

    values: dict[str, SSAValue] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    rows: dict[str, RowDims] = field(default_factory=dict)
    parts: dict[Term, SSAValue] = field(default_factory=dict)
    precision: float = 1e-6
    known: MatchFacts = field(default_factory=MatchFacts)

    def __getitem__(self, name: str) -> SSAValue:
        return self.values[name]

    def of(self, term: Term) -> SSAValue:
        """The value of a term."""
        return self.values[term.name] if isinstance(term, Anything) else self.parts[term]

    @property
    def dims(self) -> tuple[int, ...]:
        return self.rows[ROWS].dims

    def binding(self, name: str, value: SSAValue) -> "Match":
        return replace(self, values={**self.values, name: value})

    def numbering(self, name: str, number: float) -> "Match | None":
        if name in self.numbers:
            return self if self.is_close(self.numbers[name], number) else None
        return replace(self, numbers={**self.numbers, name: number})

    def is_close(self, x: float, y: float) -> bool:
        return x == y or isclose(x, y, rel_tol=self.precision)


Matches = Iterator[tuple[Match, float]]


def matches(term: Term, value: SSAValue, known: MatchFacts) -> Iterator[Match]:
    """Yield the different matches of a term with a value: no number is left over."""
    precision = PRECISION.get(element_name(unsharded_type(value).element_type), 0.0)
    seen = set[object]()
    for match in again(term, value, Match(precision=precision, known=known)):
        named = (match.values, match.numbers, match.rows, match.parts)
        key = tuple(frozenset(x.items()) for x in named)
        if key not in seen:
            seen.add(key)
            yield match


def again(term: Term, value: SSAValue, match: Match) -> Iterator[Match]:
    """Yield the matches of another term that extend a match."""
    for extended, ratio in _unify(term, value, match, True):
        if extended.is_close(ratio, 1.0):
            yield extended


def elsewhere(term: Term, near: SSAValue, match: Match) -> Match | None:
    """Return a match of a term with a value that is computed from `near`."""
    waiting, seen = [near], set[Operation]()
    while waiting and len(seen) < MAX_USERS:
        for use in tuple(waiting.pop(0).uses):
            op = use.operation
            if op in seen or not isinstance(op, nn.TensorOp):
                continue
            seen.add(op)
            for result in op.results:
                if (found := next(again(term, result, match), None)) is not None:
                    return found
                waiting.append(result)
    return None


def _unify(term: Term, item: Item, match: Match, is_root: bool = False) -> Matches:
    if isinstance(term, Anything):
        yield from _anything(term, item, match)
        return
    if isinstance(term, EitherTerm):
        for choice in term.choices:
            yield from _with_part(term, item, _unify(choice, item, match, is_root))
        return
    if not isinstance(item, Root):
        if match.parts.get(term) is item:
            yield match, 1.0
            return
        if not is_root and is_annotated(item):
            return
    yield from _with_part(term, item, _composed(term, item, match))


def _with_part(term: Term, item: Item, found: Matches) -> Matches:
    for match, ratio in found:
        if not isinstance(item, Root) and match.is_close(ratio, 1.0):
            match = replace(match, parts={**match.parts, term: item})
        yield match, ratio


def _composed(term: Term, item: Item, match: Match) -> Matches:
    if isinstance(term, SumTerm):
        yield from _sum(term, item, match)
    elif isinstance(term, ProductTerm):
        yield from _product(term, item, match)
    elif isinstance(term, ReducedTerm):
        yield from _reduced(term, item, match)
    elif isinstance(term, OpTerm):
        yield from _op(term, item, match)
    elif isinstance(term, NumberTerm) and not isinstance(item, Root):
        known = splat(item)
        if known is None:
            return
        if term.value is None:
            if (named := match.numbering(term.name, known)) is not None:
                yield named, 1.0
        elif known == term.value:  # also zeros and infinities
            yield match, 1.0
        elif term.value and abs(known) < inf:
            yield match, known / term.value


def _anything(term: Anything, item: Item, match: Match) -> Matches:
    """A name: the negation of a value is -1 times the value."""
    if isinstance(item, Root):
        return
    bound, op = match.values.get(term.name), item.owner
    if bound is None:
        if term.accepts is None or term.accepts(item):
            yield match.binding(term.name, item), 1.0
    elif is_same(bound, item):
        yield match, 1.0
        return
    if isinstance(op, nn.NegOp) and not is_annotated(item):
        for extended, ratio in _anything(term, op.x, match):
            yield extended, -ratio


def _op(term: OpTerm, item: Item, match: Match) -> Matches:
    if isinstance(item, Root):
        if term.kind is nn.SqrtOp:
            yield from _operands(term.operands, [item.of], match)
        return
    op = item.owner
    if not isinstance(op, term.kind) or (term.has is not None and not term.has(op)):
        return
    values = op.operands
    if isinstance(op, Elementwise):
        values = [*map(_broadcast_source, values)]
    yield from _operands(term.operands, values, match)
    if isinstance(op, COMMUTATIVE):
        yield from _operands(term.operands, [*reversed(values)], match)


def _operands(terms: Sequence[Term], values: Sequence[SSAValue], match: Match) -> Matches:
    if not terms:
        yield match, 1.0
        return
    for extended, ratio in _unify(terms[0], values[0], match):
        if extended.is_close(ratio, 1.0):
            yield from _operands(terms[1:], values[1:], extended)


# ---- reductions ----


def _reduced(term: ReducedTerm, item: Item, match: Match) -> Matches:
    if isinstance(item, Root) or (op := reduction_of(item, term.drops)) is None:
        return
    kind, shape = op.kind.data, unsharded_type(op.x).get_shape()
    dims = dims_of(op.properties, "dims", len(shape))
    rows = RowDims(tuple(sorted(dims)), prod(shape[d] for d in dims))
    if kind == "mean" and term.kind == "sum":
        scale = 1 / rows.count
    elif kind == term.kind:
        scale = 1.0
    else:
        return
    if match.rows.get(term.dims, rows) != rows:
        return
    bound = replace(match, rows={**match.rows, term.dims: rows})
    for extended, ratio in _unify(term.operand, op.x, bound):
        if kind in ("sum", "mean"):
            yield extended, ratio * scale
        elif extended.is_close(ratio, 1.0):
            yield extended, 1.0


def reduction_of(value: SSAValue, drops: bool) -> nn.ReduceOp | None:
    """Return the reduction that a value is, through reshapes that insert or remove dimensions of
    size 1. It broadcasts as the reduction that keeps its dimensions does, or, with `drops`, has its
    shape. The gradient of a maximum may be stopped, as no composition depends on the number by
    which rows are shifted."""
    op, is_stopped = value.owner, False
    while isinstance(op, nn.ReshapeOp | nn.StopGradientOp):
        if is_annotated(op.x):
            return None
        is_stopped |= isinstance(op, nn.StopGradientOp)
        op = op.x.owner
    if not isinstance(op, nn.ReduceOp) or (is_stopped and op.kind.data != "max"):
        return None
    shape = unsharded_type(op.x).get_shape()
    dims = dims_of(op.properties, "dims", len(shape))
    own = unsharded_type(value).get_shape()
    if drops:
        wanted = tuple(n for d, n in enumerate(shape) if d not in dims)
        return op if own == wanted else None
    wanted = tuple(1 if d in dims else n for d, n in enumerate(shape))
    return op if _without_leading_ones(own) == _without_leading_ones(wanted) else None


def _broadcast_source(value: SSAValue) -> SSAValue:
    """Return a value that broadcasts as this one does: without reshapes that insert or remove
    leading dimensions of size 1."""
    while isinstance(op := value.owner, nn.ReshapeOp) and not is_annotated(value):
        shapes = (unsharded_type(v).get_shape() for v in (op.x, value))
        before, after = map(_without_leading_ones, shapes)
        if before != after:
            break
        value = op.x
    return value


def _without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    first = next((i for i, n in enumerate(shape) if n != 1), len(shape))
    return tuple(shape[first:])


# ---- sums ----


def _sum(term: SumTerm, item: Item, match: Match) -> Matches:
    if isinstance(item, Root) or not isinstance(item.owner, nn.AddOp | nn.SubOp | nn.NegOp):
        return
    terms, count = _constrained_first(term.addends), len(term.addends)
    values = _all_addends(item, count)
    if any(
        isinstance(t, Anything) and t.accepts is not None and not any(map(t.accepts, values))
        for t in terms
    ):
        return
    if len(values) > count + 1 and not all(  # with several cuts
        any(_is_possible(t, v, match) for v in values) for t in terms
    ):
        return
    for addends in _addend_cuts(item, [(item, 1.0)], count):
        yield from _addends(terms, addends, match, None)


def _is_possible(term: Term, item: Item, match: Match) -> bool:
    """Whether a term may match an item, whatever the names are: a product by the number of elements
    of a row also has a reduction of the row."""
    if isinstance(term, Anything) and term.accepts is None:
        return True
    key = term, item, match.precision
    possible = match.known.possible
    if key not in possible:
        unbound = Match(precision=match.precision, known=match.known)
        possible[key] = next(_unify(term, item, unbound), None) is not None
    return possible[key]


def _all_addends(whole: SSAValue, count: int) -> list[SSAValue]:
    """Return the values that occur in some way in which a value is a sum of `count` others."""
    values, waiting = [], [(whole, count)]
    while waiting:
        value, most = waiting.pop()
        if value is not whole:
            value = _broadcast_source(value)
        op = value.owner
        is_open = value is whole or not is_annotated(value)
        if isinstance(op, nn.NegOp) and is_open:
            waiting.append((op.x, most))
            continue
        values.append(value)
        if most > 1 and isinstance(op, nn.AddOp | nn.SubOp) and is_open:
            waiting += [(op.lhs, most - 1), (op.rhs, most - 1)]
    return values


def _addend_cuts(
    whole: SSAValue, waiting: list[tuple[SSAValue, float]], count: int
) -> Iterator[list[tuple[SSAValue, float]]]:
    """Yield the ways in which the first values are a sum of `count` others, each with its sign."""
    if not waiting:
        if not count:
            yield []
        return
    (value, sign), rest = waiting[0], waiting[1:]
    if value is not whole:
        value = _broadcast_source(value)
    op = value.owner
    is_open = value is whole or not is_annotated(value)
    if isinstance(op, nn.NegOp) and is_open:
        yield from _addend_cuts(whole, [(op.x, -sign), *rest], count)
        return
    if count > 0:
        for others in _addend_cuts(whole, rest, count - 1):
            yield [(value, sign), *others]
    if count > 1 and isinstance(op, nn.AddOp | nn.SubOp) and is_open:
        second = sign if isinstance(op, nn.AddOp) else -sign
        yield from _addend_cuts(whole, [(op.lhs, sign), (op.rhs, second), *rest], count)


def _addends(
    terms: Sequence[Term], items: Sequence[tuple[SSAValue, float]], match: Match,
    common: float | None,
) -> Matches:  # fmt: skip
    if not terms:
        yield match, 1.0 if common is None else common
        return
    for i, (value, sign) in enumerate(items):
        if (value, sign) in items[:i]:
            continue
        for extended, ratio in _signed(terms[0], value, sign, match):
            if common is None or extended.is_close(ratio, common):
                rest = [*items[:i], *items[i + 1 :]]
                yield from _addends(terms[1:], rest, extended, ratio)


def _signed(term: Term, value: SSAValue, sign: float, match: Match) -> Matches:
    if isinstance(term, ProductTerm) and term.unknown:
        yield from _product(term, value, match, sign)
        return
    for extended, ratio in _unify(term, value, match):
        yield extended, sign * ratio


def _constrained_first(terms: Sequence[Term]) -> list[Term]:
    """Put names of certain values first, and others last: they match anything."""
    return sorted(terms, key=lambda t: isinstance(t, Anything) and (1 if t.accepts is None else -1))


# ---- products ----


@dataclass(frozen=True)
class FactorCut:
    """A value as a number times values, over values."""

    number: float = 1.0
    over: tuple[Item, ...] = ()
    under: tuple[Item, ...] = ()


def _product(term: ProductTerm, item: Item, match: Match, sign: float = 1.0) -> Matches:
    if isinstance(item, Root):
        return
    over_count, under_count = len(term.over), len(term.under)
    key, cuts = (item, over_count, under_count), match.known.cuts
    if key not in cuts:
        cuts[key] = [*_factor_cuts(item, [(item, True)], over_count, under_count)]
    for factors in cuts[key]:
        over, under = _constrained_first(term.over), _constrained_first(term.under)
        for extended, divisor in _factors(under, factors.under, match):  # most are no divisors
            for whole, ratio in _factors(over, factors.over, extended):
                if term.counts and ROWS not in whole.rows:
                    continue
                n = whole.rows[ROWS].count if term.counts else 1
                own = term.number * float(n) ** term.counts
                quotient = sign * factors.number * ratio / (own * divisor)
                if not term.unknown:
                    yield whole, quotient
                elif (named := whole.numbering(term.unknown[0], quotient)) is not None:
                    yield named, 1.0


def _factor_cuts(
    whole: Item, waiting: list[tuple[Item, bool]], over: int, under: int
) -> Iterator[FactorCut]:
    """Yield the ways in which the first items are a product of `over` others, divided by `under`
    others."""
    if not waiting:
        if not over and not under:
            yield FactorCut()
        return
    (item, is_over), rest = waiting[0], waiting[1:]
    if not isinstance(item, Root) and item is not whole:
        item = _broadcast_source(item)
    if not isinstance(item, Root) and (known := splat(item)) is not None:
        if known and abs(known) < inf:
            for f in _factor_cuts(whole, rest, over, under):
                yield replace(f, number=f.number * known if is_over else f.number / known)
        return
    is_open = item is whole or isinstance(item, Root) or not is_annotated(item)
    if is_open and not isinstance(item, Root) and isinstance(item.owner, nn.NegOp):
        for f in _factor_cuts(whole, [(item.owner.x, is_over), *rest], over, under):
            yield replace(f, number=-f.number)
        return
    if is_over and over:
        for f in _factor_cuts(whole, rest, over - 1, under):
            yield replace(f, over=(item, *f.over))
    elif not is_over and under:
        for f in _factor_cuts(whole, rest, over, under - 1):
            yield replace(f, under=(item, *f.under))
    if is_open and len(rest) < over + under + 4 and (parts := _parts(item)):
        yield from _factor_cuts(
            whole, [*((part, is_over is same) for part, same in parts), *rest], over, under
        )


def _parts(item: Item) -> list[tuple[Item, bool]]:
    """Return the factors of an item that is a product; False for those that divide."""
    if isinstance(item, Root):
        return []
    op = item.owner
    if isinstance(op, nn.MulOp):
        return [(op.lhs, True), (op.rhs, True)]
    if isinstance(op, nn.SquareOp):
        return [(op.x, True), (op.x, True)]
    if isinstance(op, nn.DivOp):
        return [(op.lhs, True), (op.rhs, False)]
    if isinstance(op, nn.ReciprocalOp):
        return [(op.x, False)]
    if isinstance(op, nn.RsqrtOp):
        return [(Root(op.x), False)]
    return []


def _factors(terms: Sequence[Term], items: Sequence[Item], match: Match) -> Matches:
    if not terms:
        yield match, 1.0
        return
    for i, item in enumerate(items):
        if item in items[:i]:
            continue
        for extended, ratio in _unify(terms[0], item, match):
            for whole, others in _factors(terms[1:], [*items[:i], *items[i + 1 :]], extended):
                yield whole, ratio * others


# ---- values ----


def is_annotated(value: SSAValue) -> bool:
    """Whether a value has a layout or a sharding, which would be lost with it."""
    return isinstance(value.type, TensorType) and not isinstance(value.type.encoding, NoneAttr)


def is_same(x: SSAValue, y: SSAValue, depth: int = MAX_DEPTH) -> bool:
    """Whether two values are one, or results of equal ops on equal values."""
    if x is y:
        return True
    a, b = x.owner, y.owner
    if not isinstance(a, nn.TensorOp) or not isinstance(b, nn.TensorOp):
        return False
    return (
        depth > 0
        and type(a) is type(b)
        and (bool(a.operands) or isinstance(a, nn.IotaOp | nn.ConstantOp))
        and (x.type, a.properties, len(a.operands)) == (y.type, b.properties, len(b.operands))
        and all(is_same(v, w, depth - 1) for v, w in zip(a.operands, b.operands, strict=True))
    )
