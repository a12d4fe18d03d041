"""IndexBounds of integers: the least and the greatest number that the elements of a value may be.

Indices that are made from positions are within their dimension; so they need no comparison, and no
clamp, as indices of a user do.
"""

from collections.abc import Callable, Mapping

from xdsl.dialects.builtin import IntegerType
from xdsl.ir import Operation, SSAValue

from shardir.dialects import nn
from shardir.dialects.nn.types import unsharded_type
from shardir.frontends.stablehlo.folding import known

IndexBounds = tuple[int, int]
MAX_DEPTH = 40


def bounds_of(
    v: SSAValue, memo: dict[SSAValue, IndexBounds | None], depth: int = 0
) -> IndexBounds | None:
    """Return the bounds of a value; None if they are not known."""
    if v in memo:
        return memo[v]
    memo[v] = None
    element = unsharded_type(v).element_type
    if depth <= MAX_DEPTH and isinstance(element, IntegerType):
        found, bits = _bounds(v, memo, depth), element.width.data
        half = 2 ** (bits - 1)
        # integers that may leave their type wrap around
        is_within = found is not None and (bits == 1 or -half <= found[0] <= found[1] < half)
        memo[v] = found if is_within else None
    return memo[v]


def _bounds(
    v: SSAValue, memo: dict[SSAValue, IndexBounds | None], depth: int
) -> IndexBounds | None:
    op = v.owner
    if not isinstance(op, Operation):
        return None
    if isinstance(op, nn.ConstantOp):
        numbers = known(v)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "iub":
            return None
        return int(numbers.min()), int(numbers.max())
    if isinstance(op, nn.IotaOp):
        return 0, max(0, unsharded_type(v).get_shape()[op.dim.value.data] - 1)
    if isinstance(op, nn.ArgmaxOp | nn.ArgminOp):
        return 0, max(0, unsharded_type(op.x).get_shape()[op.axis.value.data] - 1)
    if isinstance(op, nn.ArgsortOp | nn.SortOp | nn.TopkOp):
        x = unsharded_type(op.x).get_shape()
        return (0, max(0, x[op.axis.value.data] - 1)) if v is op.results[-1] else None
    combine = COMBINED.get(type(op))
    if combine is None:
        return None
    operands = op.operands[1:] if isinstance(op, nn.SelectOp) else op.operands
    if isinstance(op, nn.GatherOp | nn.TakeAlongAxisOp | nn.PickOp):
        operands = op.operands[:1]
    parts = [bounds_of(x, memo, depth + 1) for x in operands]
    if isinstance(op, nn.MinOp | nn.MaxOp):
        element = unsharded_type(v).element_type
        assert isinstance(element, IntegerType)
        half = 2 ** (element.width.data - 1)
        return combine(*(p if p is not None else (-half, half - 1) for p in parts))
    return None if any(p is None for p in parts) else combine(*(p for p in parts if p is not None))


def _union(*parts: IndexBounds) -> IndexBounds:
    return min(p[0] for p in parts), max(p[1] for p in parts)


def _mul(a: IndexBounds, b: IndexBounds) -> IndexBounds:
    products = [x * y for x in a for y in b]
    return min(products), max(products)


def _and(a: IndexBounds, b: IndexBounds) -> IndexBounds:
    return (0, min(a[1], b[1])) if min(a[0], b[0]) >= 0 else (-(2**63), 2**63 - 1)


COMBINED: Mapping[type, Callable[..., IndexBounds]] = {
    nn.AddOp: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    nn.SubOp: lambda a, b: (a[0] - b[1], a[1] - b[0]),
    nn.MulOp: _mul,
    nn.MinOp: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    nn.MaxOp: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    nn.AndOp: _and,
    nn.ShiftRightOp: lambda a, b: (min(a[0] >> n for n in b), max(a[1] >> n for n in b)),
    nn.SelectOp: _union,
    nn.ConcatOp: _union,
    nn.StackOp: _union,
    **dict.fromkeys(
        (nn.BroadcastOp, nn.ReshapeOp, nn.TransposeOp, nn.SliceOp, nn.FlipOp, nn.ConvertOp,
         nn.GatherOp, nn.TakeAlongAxisOp, nn.PickOp, nn.SplitOp),
        lambda a: a,
    ),
}  # fmt: skip
"""The bounds of a result from those of the operands."""
