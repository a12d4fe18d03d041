"""Updates of parameters, and marks."""

from collections.abc import Callable

from xdsl.ir import Operation, SSAValue

from shardir.backend.emit import Scope, Text
from shardir.dialects import train
from shardir.dialects.nn.base import float_of


def _backward(s: Scope, op: train.BackwardOp) -> Text:
    s.head("backward")
    return None


def _sgd(s: Scope, op: train.SgdOp) -> Text:
    rate, decay = float_of(op, "lr"), float_of(op, "weight_decay")
    w, g = s.operand(op.w), s.operand(op.g)
    if decay:
        g = f"{g}.add({w}, alpha={decay!r})"
    if s.may_update(op.w, op):
        s.line(f"{w}.sub_({g}, alpha={rate!r})")
        _in_place(s, op.new_w, op.w)
        return None
    return f"{w}.sub({g}, alpha={rate!r})"


def _momentum(s: Scope, op: train.MomentumOp) -> Text:
    rate, factor = float_of(op, "lr"), float_of(op, "momentum")
    decay = float_of(op, "weight_decay")
    w, g, v = s.operand(op.w), s.operand(op.g), s.operand(op.v)
    ours_w, ours_v = s.may_update(op.w, op), s.may_update(op.v, op)
    tail = f".add_({g})" + (f".add_({w}, alpha={decay!r})" if decay else "")
    if ours_v:
        s.line(f"{v}.mul_({factor!r}){tail}")
        _in_place(s, op.new_v, op.v)
    else:
        made = s.define(op.new_v, op.new_v.name_hint or "velocity").name
        s.line(f"{made} = {v}.mul({factor!r}){tail}")
        v = made
    if ours_w:
        s.line(f"{w}.sub_({v}, alpha={rate!r})")
        _in_place(s, op.new_w, op.w)
    else:
        made = s.define(op.new_w, op.new_w.name_hint or "updated").name
        s.line(f"{made} = {w}.sub({v}, alpha={rate!r})")
    return None


def _in_place(s: Scope, new: SSAValue, old: SSAValue) -> None:
    s.storages.join(new, old)
    s.same(new, old)


TORCH: dict[type[Operation], Callable[..., Text]] = {
    train.BackwardOp: _backward,
    train.SgdOp: _sgd,
    train.MomentumOp: _momentum,
}
