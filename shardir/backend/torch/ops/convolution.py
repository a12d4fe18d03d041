"""Convolutions and pools: torch's own calls where they compute it, else a helper of
shardir_runtime/ops/sliding.py."""

from collections.abc import Callable, Sequence

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.convolution import Convolving, groups_of
from shardir.dialects.nn.sliding import SPATIAL, Slide


def numbers(values: Sequence[int]) -> str:
    return tuple_text(list(map(str, values)))


def per_dimension(values: Sequence[int]) -> str:
    """One number where all dimensions have the same."""
    return str(values[0]) if len(set(values)) == 1 else numbers(values)


def slide_texts(found: Sequence[Slide]) -> list[str]:
    """Stride, padding and dilation."""
    padding = [n for s in found for n in (s.low, s.high)]
    return [
        numbers([s.stride for s in found]),
        numbers(padding),
        numbers([s.dilation for s in found]),
    ]


def is_direct_call(s: EmissionScope, found: Sequence[Slide], *values: SSAValue) -> bool:
    """Whether torch's own call computes it: padding is equal on both sides, no shard is empty, and
    no dimension is one of windows."""
    rows = s.shape_of(values[0])[SPATIAL:]
    still = any(f.passes and f.kernel == n == 1 for f, n in zip(found, rows, strict=True))
    return (
        len(found) <= 3 and all(f.low == f.high for f in found)
        and not (still and len(found) > 1)
        and not any(s.may_be_empty(v, d) for v in values for d in range(len(s.shape_of(v))))
    )  # fmt: skip


def options(found: Sequence[Slide], groups: str = "1") -> str:
    """The arguments of torch's call that are not the defaults."""
    given = {
        "stride": ([f.stride for f in found], 1),
        "padding": ([f.low for f in found], 0),
        "dilation": ([f.dilation for f in found], 1),
    }
    texts = [
        f"{name}={per_dimension(values)}"
        for name, (values, default) in given.items()
        if set(values) != {default}
    ]
    return "".join(f", {t}" for t in [*texts, *([f"groups={groups}"] if groups != "1" else [])])


def _groups(s: EmissionScope, op: Convolving) -> str:
    """The groups of which this rank has channels."""
    x, w, _ = op.ends(op.operands, op.results)
    if groups_of(s.global_shape(x), s.global_shape(w)) == 1:
        return "1"
    if s.global_shape(w)[1] == 1:
        return s.size(x, 1)
    return str(s.shape_of(x)[1] // s.shape_of(w)[1])


def _conv(s: EmissionScope, op: nn.ConvOp) -> Text:
    found, groups = op.slides(), _groups(s, op)
    operands = f"{s.operand(op.x)}, {s.operand(op.weight)}"
    if is_direct_call(s, found, op.x, op.weight):
        s.use("F")
        return f"F.conv{len(found)}d({operands}{options(found, groups)})"
    s.use("sliding")
    return f"sliding.conv({operands}, {', '.join(slide_texts(found))}, {groups})"


def _helper(name: str) -> Callable[[EmissionScope, Convolving], Text]:
    def entry(s: EmissionScope, op: Convolving) -> Text:
        s.use("sliding")
        given = [*(s.operand(v) for v in op.operands), tuple_text(s.sizes(op.results[0]))]
        given += [*slide_texts(op.slides()), _groups(s, op)]
        return f"sliding.{name}({', '.join(given)})"

    return entry


TORCH: dict[type[Operation], Entry] = {
    nn.ConvOp: _conv,
    nn.ConvTransposeOp: _helper("conv_transpose"),
    nn.ConvWeightOp: _helper("conv_weight"),
}
