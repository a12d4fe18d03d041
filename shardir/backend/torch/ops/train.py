"""Loops, marks, and the scalars that all updates of parameters share."""

from collections.abc import Callable

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.emit.updates import fused_step
from shardir.dialects import train
from shardir.dialects.nn.properties import float_of


def _mark(text: str) -> Callable[[EmissionScope, Operation], Text]:
    return lambda s, op: s.head(text)


# ---- loops ----


def _microbatches(s: EmissionScope, op: train.MicrobatchesOp) -> Text:
    """Write zeros for the sums of the loop, memory for collected values, and the head."""
    s.head("microbatches")
    for total in s.totals_of(op):
        name = s.define(total.out, total.out.name_hint or "total").name
        sizes = tuple_text(s.sizes(total.out))
        options = f"dtype={s.dtype(total.out)}, device={s.device(total.out)}"
        create = "zeros" if isinstance(total, train.AccumulateOp) else "empty"
        s.line(f"{name} = {s.placed(total.out, f'torch.{create}({sizes}, {options})')}")
    s.enter(op, "microbatch")
    return None


def _repeat(s: EmissionScope, op: train.RepeatOp) -> Text:
    """Write the head of the loop, after new lists for values that need them."""
    items = [x for x in op.body() if isinstance(x, train.ItemOp) and x in s.storages.at]
    s.gather([x for x in items if x.out not in s.followers])
    s.enter(op, "i")
    return None


def _end(s: EmissionScope, op: train.EndLoop) -> Text:
    s.leave()
    return None


def _microbatch(s: EmissionScope, op: train.MicrobatchOp) -> Text:
    return f"{s.operand(op.x)}[{s.loops[-1].index}]"


def _item(s: EmissionScope, op: train.ItemOp) -> Text:
    return None if op.out in s.followers else s.item(op)


def _items(s: EmissionScope, op: train.ItemsOp) -> Text:
    if op.x not in s.followers:
        s.collect(op)
    return None


def _accumulate(s: EmissionScope, op: train.AccumulateOp) -> Text:
    if op.x in s.sums:
        return None
    s.line(f"{s.variables[op.out].name} += {s.operand(op.x)}")
    return None


def _collect(s: EmissionScope, op: train.CollectOp) -> Text:
    s.line(f"{s.variables[op.out].name}[{s.loops[-1].index}] = {s.operand(op.x)}")
    return None


def _carried(s: EmissionScope, op: train.CarriedOp) -> Text:
    if op.x in s.followers:
        return None
    name = s.operand(op.x)
    if s.is_free(s.variables[op.x], op):
        s.same(op.out, op.x)
    else:
        s.line(f"{s.define(op.out, op.out.name_hint or 'carried').name} = {name}")
    return None


def _carry(s: EmissionScope, op: train.CarryOp) -> Text:
    if op.x in s.followers:
        return None
    left, right = s.operand(op.carried), s.operand(op.x)
    if left != right:
        s.line(f"{left} = {right}")
    s.same(op.out, op.carried)
    return None


# ---- scalars that all parameters share ----


def _learning_rate(s: EmissionScope, op: train.LearningRateOp) -> Text:
    s.use("ops")
    n = op.schedule.values
    if op.schedule.kind == "points":
        points = tuple([tuple(p) for p in train.points_of(n["at"])])
        return f"ops.learning_rate_at({s.operand(op.done)}, {n['rate']!r}, {points})"
    numbers = "".join(f", {n}={x!r}" for n, x in n.items())
    return f'ops.learning_rate({s.operand(op.done)}, "{op.schedule.kind}"{numbers})'


def _bias_correction(s: EmissionScope, op: train.BiasCorrectionOp) -> Text:
    if all(fused_step(use.operation) is not None for use in op.out.uses):
        return None
    return f"1 - {float_of(op, 'beta')!r} ** {s.operand(op.step)}.double()"


def _trust_ratio(s: EmissionScope, op: train.TrustRatioOp) -> Text:
    s.use("ops")
    numbers = f"{float_of(op, 'coefficient')!r}, {float_of(op, 'weight_decay')!r}"
    return f"ops.trust_ratio({s.operand(op.w)}, {s.operand(op.u)}, {numbers})"


def _next_loss_scale(s: EmissionScope, op: train.NextLossScaleOp) -> Text:
    s.use("ops")
    operands = ", ".join(map(s.operand, op.operands))
    numbers = f"growth={float_of(op, 'growth')!r}, backoff={float_of(op, 'backoff')!r}"
    return f"ops.next_loss_scale({operands}, {numbers}, interval={op.interval.value.data})"


TORCH: dict[type[Operation], Entry] = {
    train.BackwardOp: _mark("backward"),
    train.MicrobatchesOp: _microbatches,
    train.EndMicrobatchesOp: _end,
    train.RepeatOp: _repeat,
    train.EndRepeatOp: _end,
    train.ItemOp: _item,
    train.ItemsOp: _items,
    train.MicrobatchOp: _microbatch,
    train.AccumulateOp: _accumulate,
    train.CollectOp: _collect,
    train.CarriedOp: _carried,
    train.CarryOp: _carry,
    train.UpdateOp: _mark("update"),
    train.LearningRateOp: _learning_rate,
    train.BiasCorrectionOp: _bias_correction,
    train.TrustRatioOp: _trust_ratio,
    train.NextLossScaleOp: _next_loss_scale,
}
