"""Updates of parameters, the numbers that they share, and marks.

An update changes parameters and states in place, or copies of them where they are not the step's
to change.
"""

from collections.abc import Callable

from xdsl.ir import Operation, OpResult, SSAValue

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import train
from shardir.dialects.nn.properties import float_of


def _mark(text: str) -> Callable[[EmissionScope, Operation], Text]:
    return lambda s, op: s.head(text)


# ---- loops ----


def _microbatches(s: EmissionScope, op: train.MicrobatchesOp) -> Text:
    """Zeros for the sums of the loop, memory for the values that it collects, and its head."""
    s.head("microbatches")
    for total in op.body():
        if not isinstance(total, train.OfMicrobatches) or total not in s.storages.at:
            continue
        name = s.define(total.out, total.out.name_hint or "total").name
        sizes = tuple_text(s.sizes(total.out))
        at = f"dtype={s.dtype(total.out)}, device={s.device(total.out)}"
        made = "zeros" if isinstance(total, train.AccumulateOp) else "empty"
        s.line(f"{name} = torch.{made}({sizes}, {at})")
    s.enter(op, "microbatch")
    return None


def _repeat(s: EmissionScope, op: train.RepeatOp) -> Text:
    """The head of the loop, and before it the lists of values that have none yet."""
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


def _own(s: EmissionScope, op: Operation, new: OpResult, old: SSAValue) -> str:
    """The variable of a parameter or state, which becomes the new one."""
    name = s.operand(old)
    if s.may_update(old, op):
        s.storages.join(new, old)
        s.same(new, old)
        return name
    made = s.define(new, new.name_hint or "updated").name
    s.line(f"{made} = {name}.clone()")
    return made


def _decayed(s: EmissionScope, op: train.Update) -> str:
    """The gradient and the decay of the weight."""
    w, g = map(s.operand, op.operands[:2])
    decay = float_of(op, "weight_decay")
    return f"{g}.add({w}, alpha={decay!r})" if decay else g


def _number(s: EmissionScope, number: SSAValue, beside: SSAValue) -> str:
    """A number in double precision beside a tensor, whose type the result is to have: torch gives
    it that type unless the tensor is a scalar too."""
    if (text := s.scalar(number)) is not None:
        return text
    typed = s.shape_of(beside) or s.element(beside) == "f64"
    return s.operand(number) if typed else f"{s.operand(number)}.to({s.dtype(beside)})"


def _less(s: EmissionScope, w: str, op: train.SgdOp | train.WithVelocity, step: str) -> None:
    """w -= lr step"""
    if (rate := s.scalar(op.lr)) is not None:
        s.line(f"{w}.sub_({step}, alpha={rate})")
    else:
        s.line(f"{w}.sub_({_number(s, op.lr, op.w)} * {step})")


def _sgd(s: EmissionScope, op: train.SgdOp) -> Text:
    g = _decayed(s, op)
    _less(s, _own(s, op, op.new_w, op.w), op, g)
    return None


def _momentum(s: EmissionScope, op: train.MomentumOp) -> Text:
    factor, decay = float_of(op, "momentum"), float_of(op, "weight_decay")
    tail = f".add_({s.operand(op.w)}, alpha={decay!r})" if decay else ""
    v, w = _own(s, op, op.new_v, op.v), _own(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({factor!r}).add_({s.operand(op.g)}){tail}")
    _less(s, w, op, v)
    return None


def _nesterov(s: EmissionScope, op: train.NesterovOp) -> Text:
    factor = float_of(op, "momentum")
    g, temporary = _held(s, op)
    v, w = _own(s, op, op.new_v, op.v), _own(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({factor!r}).add_({g})")
    _less(s, w, op, f"{g}.add({v}, alpha={factor!r})")
    return _released(s, temporary)


def _lars(s: EmissionScope, op: train.LarsOp) -> Text:
    g = _decayed(s, op)
    v, w = _own(s, op, op.new_v, op.v), _own(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({float_of(op, 'momentum')!r}).add_({_number(s, op.lr, op.w)} * {g})")
    s.line(f"{w}.sub_({v})")
    return None


def _moments(s: EmissionScope, op: train.Adams | train.LambDirectionOp, g: str) -> tuple[str, str]:
    """The variables of the new moments, brought up to date."""
    beta1, beta2 = float_of(op, "beta1"), float_of(op, "beta2")
    m, v = _own(s, op, op.new_m, op.m), _own(s, op, op.new_v, op.v)
    s.line(f"{m}.lerp_({g}, {1 - beta1!r})")
    s.line(f"{v}.mul_({beta2!r}).addcmul_({g}, {g}, value={1 - beta2!r})")
    return m, v


def _root(s: EmissionScope, op: train.Adams | train.LambDirectionOp, v: str) -> str:
    correction = _number(s, op.correction2, op.w)
    return f"({v} / {correction}).sqrt_().add_({float_of(op, 'eps')!r})"


def _fused_step(op: Operation) -> SSAValue | None:
    """The number of the step from which torch's fused kernel computes the corrections of an update
    itself; None for an update without one, or with corrections of another origin."""
    if not isinstance(op, train.AdamOp | train.AdamWOp):
        return None
    one, two = op.correction1.owner, op.correction2.owner
    if not (isinstance(one, train.BiasCorrectionOp) and isinstance(two, train.BiasCorrectionOp)):
        return None
    same = one.step is two.step and (one.beta, two.beta) == (op.beta1, op.beta2)
    return one.step if same else None


def _fused(s: EmissionScope, op: train.AdamOp | train.AdamWOp, step: SSAValue) -> Text:
    s.use("ops")
    given = [s.operand(op.g), s.operand(step), s.scalar(op.lr) or s.operand(op.lr)]
    states = [_own(s, op, *of) for of in ((op.new_w, op.w), (op.new_m, op.m), (op.new_v, op.v))]
    numbers = (f"{n}={float_of(op, n)!r}" for n in ("beta1", "beta2", "eps", "weight_decay"))
    s.line(f"ops.{op.name.split('.')[1]}({', '.join([*states, *given, *numbers])})")
    return None


def _adam(s: EmissionScope, op: train.AdamOp) -> Text:
    if (step := _fused_step(op)) is not None:
        return _fused(s, op, step)
    g, temporary = _held(s, op)
    m, v = _moments(s, op, g)
    _step(s, op, _own(s, op, op.new_w, op.w), m, v)
    return _released(s, temporary)


def _adamw(s: EmissionScope, op: train.AdamWOp) -> Text:
    if (step := _fused_step(op)) is not None:
        return _fused(s, op, step)
    w, decay = _own(s, op, op.new_w, op.w), float_of(op, "weight_decay")
    if decay:
        s.line(f"{w}.mul_(1 - {decay!r} * {_number(s, op.lr, op.w)})")
    m, v = _moments(s, op, s.operand(op.g))
    _step(s, op, w, m, v)
    return None


def _step(s: EmissionScope, op: train.AdamOp | train.AdamWOp, w: str, m: str, v: str) -> None:
    """w -= lr m / (correction1 root)"""
    correction, rate = (_number(s, x, op.w) for x in (op.correction1, op.lr))
    if s.scalar(op.lr) is not None:
        divisor, factor = correction, f"-{rate}"
    else:
        divisor, factor = f"{correction} / {rate}", "-1"
    s.line(f"{w}.addcdiv_({m}, {_root(s, op, v)}.mul_({divisor}), value={factor})")


def _lamb_direction(s: EmissionScope, op: train.LambDirectionOp) -> Text:
    decay = float_of(op, "weight_decay")
    m, v = _moments(s, op, s.operand(op.g))
    made = s.define(op.new_w, op.new_w.name_hint or "direction").name
    correction = _number(s, op.correction1, op.w)
    s.line(f"{made} = {m} / {_root(s, op, v)}.mul_({correction})")
    if decay:
        s.line(f"{made}.add_({s.operand(op.w)}, alpha={decay!r})")
    return None


def _held(s: EmissionScope, op: train.Update) -> tuple[str, str | None]:
    """The gradient and the decay of the weight, in a variable; that variable if it is new."""
    g = _decayed(s, op)
    if g == s.operand(op.operands[1]):
        return g, None
    name = s.names.new("decayed")
    s.line(f"{name} = {g}")
    return name, name


def _released(s: EmissionScope, temporary: str | None) -> None:
    if temporary is not None:
        s.line(f"del {temporary}")


# ---- numbers that all parameters share ----


def _learning_rate(s: EmissionScope, op: train.LearningRateOp) -> Text:
    s.use("ops")
    n = op.schedule.values
    if op.schedule.kind == "points":
        points = tuple([tuple(p) for p in train.points_of(n["at"])])
        return f"ops.learning_rate_at({s.operand(op.done)}, {n['rate']!r}, {points})"
    numbers = "".join(f", {n}={x!r}" for n, x in n.items())
    return f'ops.learning_rate({s.operand(op.done)}, "{op.schedule.kind}"{numbers})'


def _bias_correction(s: EmissionScope, op: train.BiasCorrectionOp) -> Text:
    if all(_fused_step(use.operation) is not None for use in op.out.uses):
        return None
    return f"1 - {float_of(op, 'beta')!r} ** {s.operand(op.step)}.double()"


def _trust_ratio(s: EmissionScope, op: train.TrustRatioOp) -> Text:
    s.use("ops")
    numbers = f"{float_of(op, 'coefficient')!r}, {float_of(op, 'weight_decay')!r}"
    return f"ops.trust_ratio({s.operand(op.w)}, {s.operand(op.u)}, {numbers})"


def _next_loss_scale(s: EmissionScope, op: train.NextLossScaleOp) -> Text:
    s.use("ops")
    given = ", ".join(map(s.operand, op.operands))
    numbers = f"growth={float_of(op, 'growth')!r}, backoff={float_of(op, 'backoff')!r}"
    return f"ops.next_loss_scale({given}, {numbers}, interval={op.interval.value.data})"


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
    train.SgdOp: _sgd,
    train.MomentumOp: _momentum,
    train.NesterovOp: _nesterov,
    train.AdamOp: _adam,
    train.AdamWOp: _adamw,
    train.LambDirectionOp: _lamb_direction,
    train.LarsOp: _lars,
    train.LearningRateOp: _learning_rate,
    train.BiasCorrectionOp: _bias_correction,
    train.TrustRatioOp: _trust_ratio,
    train.NextLossScaleOp: _next_loss_scale,
}
