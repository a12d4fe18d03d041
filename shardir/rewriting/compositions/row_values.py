"""Values of rows keep their dimensions: elementwise ops on values that lack dimensions, which a
reshape of each use puts back with size 1, compute with these dimensions.

    %m = nn.reduce <mean> %x dims <1>         %m = nn.reduce <mean> %x dims <1>
    %q = nn.square %m : tensor<4xf64>         %k = nn.reshape %m : tensor<4x1xf64>
    %r = nn.reshape %q : tensor<4x1xf64>  ->  %q = nn.square %k : tensor<4x1xf64>
    %y = nn.sub %x, %r                        %y = nn.sub %x, %q

So terms of rows need no reshapes: a reduction that keeps its dimensions has the shape of its rows.
"""

from collections.abc import Sequence

from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.layout import Shape
from shardir.compat.xdsl import set_type
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import tensor
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.compositions.matching import is_annotated
from shardir.rewriting.rewriter import Rewriter, erase

Reshaped = dict[tuple[SSAValue, Shape], SSAValue]


def keep_dimensions(block: Block) -> bool:
    """Let values of rows keep their dimensions, where this needs no reshape of anything but
    reductions; return whether one does."""
    ops = ops_of(block)
    kept = _kept_shapes(ops)
    reshaped: Reshaped = {}
    for op in ops:
        if op in kept:
            _keep(op, kept, reshaped)
    return bool(kept)


def _kept_shapes(ops: Sequence[Operation]) -> dict[Operation, Shape]:
    """Return the shape that each op computes with instead of its own."""
    kept: dict[Operation, Shape] = {}
    for op in reversed(ops):
        if isinstance(op, Elementwise) and len(op.results) == 1 and op.operands:
            shapes = {_shape_in(use.operation, op, kept) for use in op.results[0].uses}
            if len(shapes) == 1 and (shape := shapes.pop()) and not is_annotated(op.results[0]):
                kept[op] = shape
    count = -1
    while len(kept) != count:
        count = len(kept)
        for op in [*kept]:
            uses = {_shape_in(use.operation, op, kept) for use in op.results[0].uses}
            if uses != {kept[op]} or not all(_is_row(v, op, kept) for v in op.operands):
                del kept[op]
    return kept


def _shape(v: SSAValue) -> Shape:
    return unsharded_type(v).get_shape()


def _without_ones(shape: Shape) -> list[int]:
    return [n for n in shape if n != 1]


def _shape_in(user: Operation, op: Operation, kept: dict[Operation, Shape]) -> Shape | None:
    """The shape with which a user of an op reads its result; None if that is its own."""
    own = _shape(op.results[0])
    if isinstance(user, nn.ReshapeOp):
        shape = _shape(user.out)
        adds_ones = len(shape) > len(own) > 0 and _without_ones(shape) == _without_ones(own)
        return shape if adds_ones and not is_annotated(user.out) else None
    return kept.get(user) if user in kept and _shape(user.results[0]) == own else None


def _is_row(v: SSAValue, op: Operation, kept: dict[Operation, Shape]) -> bool:
    """Whether an operand of an op has no dimensions, or can keep those of the op without another
    reshape."""
    owner = v.owner
    if not _shape(v):
        return True
    if not isinstance(owner, Operation) or _shape(v) != _shape(op.results[0]):
        return False
    if isinstance(owner, nn.ReshapeOp):
        return _shape(owner.x) == kept[op] and not is_annotated(v)
    return isinstance(owner, nn.ReduceOp) or kept.get(owner) == kept[op]


def _keep(
    op: Operation, kept: dict[Operation, Shape], reshaped: Reshaped
) -> None:  # fmt: skip
    shape, (result,) = kept[op], op.results
    for i, v in enumerate(op.operands):
        if _shape(v) and v.owner not in kept:
            op.operands[i] = _of_shape(v, shape, reshaped)
    set_type(result, tensor(unsharded_type(result).element_type, shape))
    for use in tuple(result.uses):
        if isinstance(use.operation, nn.ReshapeOp):
            use.operation.out.replace_all_uses_with(result)
            erase(use.operation)


def _of_shape(v: SSAValue, shape: Shape, reshaped: Reshaped) -> SSAValue:
    owner = v.owner
    assert isinstance(owner, Operation)
    if isinstance(owner, nn.ReshapeOp):
        return owner.x
    if (v, shape) not in reshaped:
        t = tensor(unsharded_type(v).element_type, shape)
        reshaped[v, shape] = Rewriter().after(owner).value(nn.ReshapeOp, v, result=t)
    return reshaped[v, shape]
