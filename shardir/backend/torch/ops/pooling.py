"""Maxima over sliding windows. Average pools are composites."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.ops.convolution import (
    is_direct_call,
    numbers,
    per_dimension,
    slide_texts,
)
from shardir.dialects import nn


def _max_pool(s: EmissionScope, op: nn.MaxPoolOp) -> Text:
    windows, x = op.slides(), s.operand(op.x)
    kernel, (stride, padding, _) = numbers(op.window.data), slide_texts(windows)
    if is_direct_call(s, windows, op.x):
        s.use("F")
        arguments = [
            per_dimension(v)
            for v in zip(*((f.kernel, f.stride, f.low) for f in windows), strict=True)
        ]
        return f"F.max_pool{len(windows)}d({x}, {', '.join(arguments)})"
    s.use("sliding")
    return f"sliding.max_pool({x}, {kernel}, {stride}, {padding})"


def _max_pool_grad(s: EmissionScope, op: nn.MaxPoolGradOp) -> Text:
    s.use("sliding")
    stride, padding, _ = slide_texts(op.slides())
    arguments = [*(s.operand(v) for v in op.operands), numbers(op.window.data), stride, padding]
    return f"sliding.max_pool_grad({', '.join(arguments)})"


TORCH: dict[type[Operation], Entry] = {
    nn.MaxPoolOp: _max_pool,
    nn.MaxPoolGradOp: _max_pool_grad,
}
