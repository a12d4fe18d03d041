"""Backward ops of traced programs, translated by the gradients of our own ops. Other backward ops
are decomposed."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from xdsl.ir import Block, Operation

from shardir.build import Value
from shardir.dialects.nn.base import Composite
from shardir.frontends.torch.aten import contraction, pooling
from shardir.frontends.torch.translation import AtenEntry, Translation
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.autodiff.cotangents import Cotangents
from shardir.rewriting.autodiff.transposition import Transposition
from shardir.rewriting.rewriter import Rewriter, erase


def cotangents_of(
    t: Translation, forward: Callable[[], Value], operands: Sequence[Value], seed: Value
) -> list[Value | None]:
    """The cotangents of operands of `forward`, given `seed`, the cotangent of its result."""
    block, builder = t.function.block, t.function.builder
    before, result = block.last_op, forward()
    if result is NotImplemented:
        return [NotImplemented] * len(operands)
    y = result.ssa
    for op in list(_after(before, block)):
        if isinstance(op, Composite):
            parts = op.parts(builder)
            assert parts is not None
            y = next((new for old, new in zip(op.results, parts, strict=True) if old is y), y)
            Rewriter.replace(op, parts)
        else:  # parts are at the end of the block, so their readers move behind them
            op.detach()
            block.add_op(op)
    new_ops = list(_after(before, block))
    activity, cotangents = Activity(v.ssa for v in operands), Cotangents(builder)
    transposition = Transposition(block, builder, activity, cotangents)
    transposition.mark(new_ops)
    cotangents.add(y, [seed.ssa])
    transposition.run(new_ops)
    sums = [cotangents.sum(v.ssa) for v in operands]
    for op in reversed(new_ops):
        if all(v.first_use is None for v in op.results):
            erase(op)
    return [None if d is None else Value(t.function, d) for d in sums]


def _after(op: Operation | None, block: Block) -> Iterator[Operation]:
    """Yield the ops of a block after an op; all ops for None."""
    after = op.next_op if op is not None else block.first_op
    while after is not None:
        yield after
        after = after.next_op


def _convolution_backward(
    t: Translation, dy: Value, x: Value, w: Value, bias_sizes: Sequence[int] | None, stride: Any,
    padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int,
    output_mask: Sequence[bool],
) -> tuple[Value | None, ...]:  # fmt: skip
    forward, like_dy = contraction.TABLE["convolution"], t.of(0)
    how = (stride, padding, dilation, transposed, output_padding, groups)
    d_x, d_w = cotangents_of(t, lambda: forward(like_dy, x, w, None, *how), [x, w], dy)
    dims = (0, *range(2, len(dy.shape)))
    bias = bias_sizes is not None and output_mask[2]
    return d_x, d_w, dy.sum(dims) if bias else None


def _pool_backward(t: Translation, name: str, dy: Value, x: Value, *how: Any) -> Value | None:
    """The cotangent of a pool's operand x; `how` has the pool's other arguments."""
    forward, like_dy = pooling.TABLE[name], t.of(0)
    return cotangents_of(t, lambda: forward(like_dy, x, *how), [x], dy)[0]


def _avg_pool_backward(name: str) -> AtenEntry:
    def backward(
        t: Translation, dy: Value, x: Value, kernel_size: Any, stride: Any, padding: Any,
        ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
    ) -> Value | None:  # fmt: skip
        how = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
        return _pool_backward(t, name, dy, x, *how)

    return backward


def _max_pool_backward(name: str) -> AtenEntry:
    def backward(
        t: Translation, dy: Value, x: Value, kernel_size: Any, stride: Any, padding: Any,
        dilation: Any, ceil_mode: bool, indices: Value,
    ) -> Value | None:  # fmt: skip
        del indices  # the maxima are found again
        return _pool_backward(t, name, dy, x, kernel_size, stride, padding, dilation, ceil_mode)

    return backward


TABLE: dict[str, AtenEntry] = {
    "convolution_backward": _convolution_backward,
    **{f"avg_pool{n}d_backward": _avg_pool_backward(f"avg_pool{n}d") for n in (2, 3)},
    **{f"max_pool{n}d_with_indices_backward": _max_pool_backward(f"max_pool{n}d") for n in (2, 3)},
}
