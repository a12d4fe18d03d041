"""Estimates of the largest absolute value of an element, from the ops that compute a value."""

from collections.abc import Callable
from math import e, inf, log

from xdsl.dialects.builtin import AnyFloat, i1
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.creation import dense_values
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import Argument, Role

MAX_ORIGINS = 64
"""A value that is computed from more values may have any size."""

LOGARITHM = 150.0
"""No logarithm of a float of 32 bits is larger."""


def _product(*sizes: float) -> float:
    return inf if inf in sizes else sizes[0] * sizes[-1]


def _power(base: float, exponent: float) -> float:
    return inf if exponent * log(max(base, 1.0)) > 300 else max(base, 1.0) ** exponent


SIZES: dict[type[Operation], Callable[..., float]] = {
    nn.MulOp: _product,
    nn.SquareOp: lambda x: _product(x, x),
    nn.ReciprocalOp: lambda x: inf,
    nn.RsqrtOp: lambda x: inf,
    nn.ExpOp: lambda x: _power(e, x),
    nn.Expm1Op: lambda x: _power(e, x),
    nn.Exp2Op: lambda x: _power(2.0, x),
    nn.PowOp: _power,
    nn.ShiftLeftOp: lambda x, by: _product(x, _power(2.0, by)),
    nn.LogOp: lambda x: max(x, LOGARITHM),
    nn.Log2Op: lambda x: max(x, LOGARITHM),
    nn.GatherOp: lambda x, *ids: x,
    nn.TakeAlongAxisOp: lambda x, ids: x,
}
"""The size of an op's result, from those of its operands; that of other ops is the largest of
these, without the number of addends. Products of matrices, which nobody masks by, are moderate."""


def size_of(v: SSAValue, sizes: dict[SSAValue, float] | None = None) -> float:
    """Return the estimate. It is inf for floats that are given and not trained, and 1 for
    parameters and integers."""
    sizes = {} if sizes is None else sizes
    if v not in sizes:
        sizes[v] = inf
        if len(sizes) <= MAX_ORIGINS:
            sizes[v] = _size(v, sizes)
    return sizes[v]


def _size(v: SSAValue, sizes: dict[SSAValue, float]) -> float:
    op = v.owner
    if not isinstance(op, Operation):
        return inf if _is_given(v) else 1.0
    if isinstance(op, nn.ConstantOp):
        numbers = abs(dense_values(op.value) * 1.0)
        return float(numbers.max(initial=0.0, where=numbers < inf))
    if isinstance(op, nn.EinsumOp) or unsharded_type(v).element_type == i1:
        return 1.0
    if isinstance(op, nn.DivOp):
        return _product(size_of(op.lhs, sizes), _reciprocal(op.rhs))
    operands = [size_of(x, sizes) for x in op.operands]
    of_kind = SIZES.get(type(op))
    return max(operands, default=1.0) if of_kind is None else of_kind(*operands)


def _reciprocal(divisor: SSAValue) -> float:
    """Return the size of the reciprocal of a divisor, which is inf if the divisor is not known."""
    if not isinstance(divisor.owner, nn.ConstantOp):
        return inf
    numbers = abs(dense_values(divisor.owner.value) * 1.0)
    return 1.0 / least if (least := float(numbers.min(initial=inf))) else inf


def _is_given(v: SSAValue) -> bool:
    """Whether a value is an argument of floats that is no parameter."""
    if not isinstance(v, BlockArgument) or not isinstance(unsharded_type(v).element_type, AnyFloat):
        return False
    f = v.owner.parent_op()
    attributes = f.arg_attrs if isinstance(f, FuncOp) else None
    role = Argument.of(attributes.data[v.index].data).role if attributes is not None else None
    return role is not Role.PARAMETER
