"""Terms: the left sides of the rules that recognise compositions of ops.

    x = anything("x")
    exps = exp(x - top(x))
    softmax = exps / total(exps)

Terms are written with Python's operators. Sums and products are compared without regard to order
and association, and up to how their numbers are distributed: `0.5 * (x * y)` is `x * 0.5 * y`, and
`a / sqrt(b)` is `a * rsqrt(b)`. A term that occurs twice is the same value in both places, or equal
ops on the same values. `total`, `mean` and `top` reduce over the dimensions that the match calls
ROWS, and keep them with size 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from xdsl.ir import Operation, SSAValue

from shardir.dialects import nn

ROWS, LEAD = "rows", "lead"
"""The dimensions that are normalised; those in which the results of a row's op are summed."""


@dataclass(frozen=True, eq=False)
class Term:
    """A term; two terms are equal if they are one object."""

    def __add__(self, other: "Term | float") -> "SumTerm":
        return SumTerm((*_addends(self), *_addends(_term(other))))

    def __radd__(self, other: float) -> "SumTerm":
        return _term(other) + self

    def __sub__(self, other: "Term | float") -> "SumTerm":
        return self + _term(other) * -1.0

    def __rsub__(self, other: float) -> "SumTerm":
        return _term(other) - self

    def __neg__(self) -> "ProductTerm":
        return self * -1.0

    def __mul__(self, other: "Term | float") -> "ProductTerm":
        x, y = _product(self), _product(other)
        return ProductTerm(
            x.number * y.number, x.counts + y.counts, (*x.over, *y.over), (*x.under, *y.under),
            (*x.unknown, *y.unknown),
        )  # fmt: skip

    def __rmul__(self, other: float) -> "ProductTerm":
        return self * other

    def __truediv__(self, other: "Term | float") -> "ProductTerm":
        y = _product(other)
        assert not y.unknown
        return self * ProductTerm(1 / y.number, -y.counts, y.under, y.over)

    def __rtruediv__(self, other: float) -> "ProductTerm":
        return _term(other) / self


@dataclass(frozen=True, eq=False)
class Anything(Term):
    """A value of any origin, by name."""

    name: str
    accepts: Callable[[SSAValue], bool] | None = None


@dataclass(frozen=True, eq=False)
class NumberTerm(Term):
    """A constant with equal elements: a known number, or one that is named."""

    value: float | None = None
    name: str = ""


@dataclass(frozen=True, eq=False)
class SumTerm(Term):
    addends: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class ProductTerm(Term):
    """`number * n^counts * over / under`, where n is the number of elements of a row. A named
    `unknown` takes the place of the number."""

    number: float = 1.0
    counts: int = 0
    over: tuple[Term, ...] = ()
    under: tuple[Term, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class OpTerm(Term):
    """An op of a kind on operands, with properties that `has` accepts."""

    kind: type[Operation]
    operands: tuple[Term, ...]
    has: Callable[[Any], bool] | None = None


@dataclass(frozen=True, eq=False)
class ReducedTerm(Term):
    """A reduction over the dimensions that the match calls `dims`. They are kept with size 1,
    unless `drops`."""

    kind: str
    operand: Term
    dims: str = ROWS
    drops: bool = False


@dataclass(frozen=True, eq=False)
class EitherTerm(Term):
    """One of several terms."""

    choices: tuple[Term, ...] = field(default=())


def anything(name: str, accepts: Callable[[SSAValue], bool] | None = None) -> Anything:
    return Anything(name, accepts)


def number(name: str) -> NumberTerm:
    """A constant, by name."""
    return NumberTerm(name=name)


def factor(name: str) -> ProductTerm:
    """The number of a product, by name: `factor("lr") * x` is `0.1 * x`, and x itself."""
    return ProductTerm(unknown=(name,))


def either(*choices: Term) -> EitherTerm:
    return EitherTerm(choices)


def _term(x: "Term | float") -> Term:
    return x if isinstance(x, Term) else NumberTerm(float(x))


def _addends(x: Term) -> tuple[Term, ...]:
    return x.addends if isinstance(x, SumTerm) else (x,)


def _product(x: "Term | float") -> ProductTerm:
    if not isinstance(x, Term):
        return ProductTerm(float(x))
    if isinstance(x, NumberTerm) and x.value is not None:
        return ProductTerm(x.value)
    return x if isinstance(x, ProductTerm) else ProductTerm(over=(x,))


def _unary(kind: type[Operation]) -> Callable[[Term], OpTerm]:
    return lambda x: OpTerm(kind, (x,))


exp, log, sqrt, tanh, erf, erfc, sigmoid = map(
    _unary, (nn.ExpOp, nn.LogOp, nn.SqrtOp, nn.TanhOp, nn.ErfOp, nn.ErfcOp, nn.SigmoidOp)
)


def square(x: Term) -> ProductTerm:
    return x * x


def total(x: Term) -> ReducedTerm:
    """The sum of each row."""
    return ReducedTerm("sum", x)


PER_ROW = ProductTerm(counts=-1)
"""1 / n"""


def mean(x: Term) -> ProductTerm:
    """The mean of each row."""
    return total(x) * PER_ROW


def top(x: Term) -> ReducedTerm:
    """The maximum of each row."""
    return ReducedTerm("max", x)


def summed(x: Term) -> ReducedTerm:
    """The sum over the leading dimensions."""
    return ReducedTerm("sum", x, LEAD, drops=True)


def maximum(x: Term, y: "Term | float") -> OpTerm:
    return OpTerm(nn.MaxOp, (x, _term(y)))


def power(x: Term, y: Term) -> OpTerm:
    return OpTerm(nn.PowOp, (x, y))
