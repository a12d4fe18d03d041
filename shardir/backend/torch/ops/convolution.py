"""Convolutions: torch's own calls if possible, else helpers of shardir_runtime/ops/sliding.py."""

from collections.abc import Callable, Sequence

from xdsl.dialects.builtin import i32
from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.convolution import Convolving, groups_of
from shardir.dialects.nn.sliding import SPATIAL, Slide


def numbers(values: Sequence[int]) -> str:
    return tuple_text(list(map(str, values)))


def per_dimension(values: Sequence[int]) -> str:
    """One number if all dimensions have it, else a tuple."""
    return str(values[0]) if len(set(values)) == 1 else numbers(values)


def slide_texts(windows: Sequence[Slide]) -> list[str]:
    """The texts of stride, padding and dilation."""
    padding = [n for s in windows for n in (s.low, s.high)]
    return [
        numbers([s.stride for s in windows]),
        numbers(padding),
        numbers([s.dilation for s in windows]),
    ]


def is_direct_call(s: EmissionScope, windows: Sequence[Slide], *values: SSAValue) -> bool:
    """Whether torch's own call computes an op: padding is equal on both sides, no shard is empty,
    and no dimension counts windows."""
    rows = s.shape_of(values[0])[SPATIAL:]
    still = any(f.passes and f.kernel == n == 1 for f, n in zip(windows, rows, strict=True))
    return (
        len(windows) <= 3 and all(f.low == f.high for f in windows)
        and not (still and len(windows) > 1)
        and not any(s.may_be_empty(v, d) for v in values for d in range(len(s.shape_of(v))))
    )  # fmt: skip


def options(windows: Sequence[Slide], groups: str = "1") -> str:
    """The arguments of torch's call that differ from the defaults."""
    numbers_of = {
        "stride": ([f.stride for f in windows], 1),
        "padding": ([f.low for f in windows], 0),
        "dilation": ([f.dilation for f in windows], 1),
    }
    texts = [
        f"{name}={per_dimension(values)}"
        for name, (values, default) in numbers_of.items()
        if set(values) != {default}
    ]
    return "".join(f", {t}" for t in [*texts, *([f"groups={groups}"] if groups != "1" else [])])


def _groups(s: EmissionScope, op: Convolving) -> str:
    """The number of this rank's groups."""
    x, w, _ = op.ends(op.operands, op.results)
    if groups_of(s.global_shape(x), s.global_shape(w)) == 1:
        return "1"
    if s.global_shape(w)[1] == 1:
        return s.size(x, 1)
    return str(s.shape_of(x)[1] // s.shape_of(w)[1])


def _conv(s: EmissionScope, op: nn.ConvOp) -> Text:
    windows, groups = op.slides(), _groups(s, op)
    operands = f"{s.operand(op.x)}, {s.operand(op.weight)}"
    if s.type(op.x).element_type != i32 and is_direct_call(s, windows, op.x, op.weight):
        s.use("F")
        return f"F.conv{len(windows)}d({operands}{options(windows, groups)})"
    s.use("sliding")
    return f"sliding.conv({operands}, {', '.join(slide_texts(windows))}, {groups})"


def _helper(name: str) -> Callable[[EmissionScope, Convolving], Text]:
    def entry(s: EmissionScope, op: Convolving) -> Text:
        s.use("sliding")
        arguments = [*(s.operand(v) for v in op.operands), tuple_text(s.sizes(op.results[0]))]
        arguments += [*slide_texts(op.slides()), _groups(s, op)]
        return f"sliding.{name}({', '.join(arguments)})"

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _helper("conv_transpose"),
    nn.ConvWeightOp: _helper("conv_weight"),
}
