"""Ops whose results have rows from elsewhere along a dimension.

Where the result is split along it, the call makes the whole dimension and `narrow` keeps what
belongs here.
"""

from collections.abc import Callable, Sequence

from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import Scope, Text
from shardir.dialects import nn
from shardir.dialects.nn.base import axis_of, dims_of


def _ints(values: Sequence[int]) -> str:
    return tuple_text(list(map(str, values)))


def _narrow(s: Scope, text: str, out: SSAValue, dims: Sequence[int]) -> str:
    """The part that belongs here of a result which is whole along `dims`."""
    for d in dims:
        if s.parts(out, d) > 1:
            text += f".narrow({d}, {s.start(out, d)}, {s.size(out, d)})"
    return text


def _slice(s: Scope, op: nn.SliceOp) -> Text:
    bounds = op.bounds(s.whole(op.x), op.properties)
    changed = list(op.rows(s.whole(op.x), op.properties))
    if not changed:
        return op.x
    text, whole = s.operand(op.x), []
    for d in changed:
        start, _, stride = bounds[d]
        if s.parts(op.x, d) > 1:  # what this rank has of it, among zeros
            s.use("ops_runtime as ops")
            rows = f"{start}, {stride}, {s.whole(op.out)[d]}"
            text = f"ops.taken({text}, {d}, {rows}, {s.start(op.x, d)})"
        else:
            whole.append(d)
    if whole:
        cuts = [":"] * (whole[-1] + 1)
        for d in whole:
            start, limit, stride = bounds[d]
            cuts[d] = f"{start or ''}:{limit}{f':{stride}' if stride > 1 else ''}"
        text += f"[{', '.join(cuts)}]"
    return _narrow(s, text, op.out, changed)


def _pad(s: Scope, op: nn.PadOp) -> Text:
    changed = list(op.rows(s.whole(op.x), op.properties))
    if not changed:
        return op.x
    s.use("torch.nn.functional as F")
    sides = [n for d in reversed(range(min(changed, default=0), len(op.low.data)))
             for n in (op.low.data[d], op.high.data[d])]  # fmt: skip
    value = op.filling(op.properties)
    filling = f", value={number_text(value, s.element(op.x))}" if value else ""
    return _narrow(s, f"F.pad({s.operand(op.x)}, {_ints(sides)}{filling})", op.out, changed)


def _flip(s: Scope, op: nn.FlipOp) -> Text:
    dims = dims_of(op.properties, "dims", len(s.shape_of(op.x)))
    return _narrow(s, f"{s.operand(op.x)}.flip({_ints(dims)})", op.out, dims)


def _roll(s: Scope, op: nn.RollOp) -> Text:
    dims = list(op.rows(s.whole(op.x), op.properties))
    shifts = [op.shifts.data[d] for d in dims]
    if not dims:
        return f"{s.operand(op.x)}.clone()"
    text = f"{s.operand(op.x)}.roll({_ints(shifts)}, {_ints(dims)})"
    return _narrow(s, text, op.out, dims)


def _tile(s: Scope, op: nn.TileOp) -> Text:
    text = f"{s.operand(op.x)}.repeat({_ints(op.repeats.data)})"
    return _narrow(s, text, op.out, list(op.rows(s.whole(op.x), op.properties)))


def _repeat_interleave(s: Scope, op: nn.RepeatInterleaveOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    repeats = op.repeats.value.data
    text = f"{s.operand(op.x)}.repeat_interleave({repeats}, {axis})"
    if repeats < 2 or s.axes(op.x, axis) == s.axes(op.out, axis):
        return text
    have, want = s.start(op.x, axis), s.start(op.out, axis)
    first = want if have == "0" else f"{want} - ({have}) * {repeats}"
    return f"{text}.narrow({axis}, {first}, {s.size(op.out, axis)})"


def _joined(call: str) -> Callable[[Scope, nn.ConcatOp | nn.StackOp], Text]:
    def entry(s: Scope, op: nn.ConcatOp | nn.StackOp) -> Text:
        axis = axis_of(op.properties, "axis", len(s.shape_of(op.out)))
        given = ", ".join(s.operand(x) for x in op.xs)
        return _narrow(s, f"torch.{call}(({given},), {axis})", op.out, [axis])

    return entry


def _split(s: Scope, op: nn.SplitOp) -> Text:
    axis = axis_of(op.properties, "axis", len(s.shape_of(op.x)))
    text = f"{s.operand(op.x)}.split({_ints(op.sizes.data)}, {axis})"
    if all(s.parts(out, axis) == 1 for out in op.outs):
        return text if len(op.outs) > 1 else f"{text}[0]"
    s.use("ops_runtime as ops")
    parts = [f"({s.start(out, axis)}, {s.size(out, axis)})" for out in op.outs]
    text = f"ops.parts({text}, {axis}, {tuple_text(parts)})"
    return text if len(op.outs) > 1 else f"{text}[0]"


TORCH: dict[type[Operation], Callable[..., Text]] = {
    nn.SliceOp: _slice,
    nn.PadOp: _pad,
    nn.FlipOp: _flip,
    nn.RollOp: _roll,
    nn.TileOp: _tile,
    nn.RepeatInterleaveOp: _repeat_interleave,
    nn.ConcatOp: _joined("cat"),
    nn.StackOp: _joined("stack"),
    nn.SplitOp: _split,
}
