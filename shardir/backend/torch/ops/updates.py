"""Updates of parameters and states: in place, or of copies if the step does not own them."""

from xdsl.ir import Operation, OpResult, SSAValue

from shardir.backend.torch.emit.names import call_of_lists
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.backend.torch.emit.updates import (
    FusedUpdate,
    fused_step,
    is_fused,
    is_updated_before,
    updated_with,
)
from shardir.dialects import train
from shardir.dialects.nn.properties import float_of
from shardir.dialects.train.optimizers.nadam import NAdams

Rated = train.SgdOp | train.WithVelocity | train.AdagradOp | train.AdamaxOp | NAdams
"""Updates that subtract the learning rate times a step."""

Moments = train.Adams | train.LambDirectionOp | NAdams
"""Updates with the running means of the gradient and of its square."""


def _bind_update(s: EmissionScope, op: Operation, new: OpResult, old: SSAValue) -> str:
    """Return the variable to update: the old parameter or state itself, or a copy."""
    name = s.operand(old)
    if s.may_update(old, op):
        s.storages.join(new, old)
        s.same(new, old)
        return name
    copy = s.define(new, new.name_hint or "updated").name
    s.line(f"{copy} = {name}.clone()")
    return copy


def _add_decay(s: EmissionScope, op: train.Update) -> str:
    """The gradient plus the weight decay."""
    w, g = map(s.operand, op.operands[:2])
    decay = float_of(op, "weight_decay")
    return f"{g}.add({w}, alpha={decay!r})" if decay else g


def _number(s: EmissionScope, number: SSAValue, beside: SSAValue) -> str:
    """A number in double precision for an op with a tensor, whose type the result must have. torch
    promotes to that type unless the tensor is a scalar too."""
    if (text := s.scalar(number)) is not None:
        return text
    typed = s.shape_of(beside) or s.element(beside) == "f64"
    return s.operand(number) if typed else f"{s.operand(number)}.to({s.dtype(beside)})"


def _subtract(s: EmissionScope, w: str, op: Rated, step: str) -> None:
    """w -= lr step"""
    if (rate := s.scalar(op.lr)) is not None:
        s.line(f"{w}.sub_({step}, alpha={rate})")
    else:
        s.line(f"{w}.sub_({_number(s, op.lr, op.w)} * {step})")


def _sgd(s: EmissionScope, op: train.SgdOp) -> Text:
    g = _add_decay(s, op)
    _subtract(s, _bind_update(s, op, op.new_w, op.w), op, g)
    return None


def _momentum(s: EmissionScope, op: train.MomentumOp) -> Text:
    factor, decay = float_of(op, "momentum"), float_of(op, "weight_decay")
    tail = f".add_({s.operand(op.w)}, alpha={decay!r})" if decay else ""
    v, w = _bind_update(s, op, op.new_v, op.v), _bind_update(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({factor!r}).add_({s.operand(op.g)}){tail}")
    _subtract(s, w, op, v)
    return None


def _nesterov(s: EmissionScope, op: train.NesterovOp) -> Text:
    factor = float_of(op, "momentum")
    g, temporary = _decayed_gradient(s, op)
    v, w = _bind_update(s, op, op.new_v, op.v), _bind_update(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({factor!r}).add_({g})")
    _subtract(s, w, op, f"{g}.add({v}, alpha={factor!r})")
    return _release(s, temporary)


def _lars(s: EmissionScope, op: train.LarsOp) -> Text:
    g = _add_decay(s, op)
    v, w = _bind_update(s, op, op.new_v, op.v), _bind_update(s, op, op.new_w, op.w)
    s.line(f"{v}.mul_({float_of(op, 'momentum')!r}).add_({_number(s, op.lr, op.w)} * {g})")
    s.line(f"{w}.sub_({v})")
    return None


def _moments(s: EmissionScope, op: Moments, g: str) -> tuple[str, str]:
    """Update both moments, and return their variables."""
    beta1, beta2 = float_of(op, "beta1"), float_of(op, "beta2")
    m, v = _bind_update(s, op, op.new_m, op.m), _bind_update(s, op, op.new_v, op.v)
    s.line(f"{m}.lerp_({g}, {1 - beta1!r})")
    s.line(f"{v}.mul_({beta2!r}).addcmul_({g}, {g}, value={1 - beta2!r})")
    return m, v


def _root(s: EmissionScope, op: Moments, v: str) -> str:
    correction = _number(s, op.correction2, op.w)
    return f"({v} / {correction}).sqrt_().add_({float_of(op, 'eps')!r})"


def _by_kernel(s: EmissionScope, op: FusedUpdate, *numbers: str) -> Text:
    """Write the call of torch's fused kernel (shardir_runtime/ops/updates.py) for all adjacent
    updates of a kind, with lists of parameters, of each state, and of gradients."""
    if is_updated_before(op):
        return None
    s.use("ops_updates")
    updates = [op, *updated_with(op)]
    olds = [(update.w, *update.operands[2:]) for update in updates]
    names = [
        [
            _bind_update(s, update, update.results[k], old[k])
            for update, old in zip(updates, olds, strict=True)
        ]
        for k in range(len(op.results))
    ]
    lists = [*names, [s.operand(update.g) for update in updates]]
    step = fused_step(op)
    scalars = [*([] if step is None else [s.operand(step)]), s.scalar(op.lr) or s.operand(op.lr)]
    named = (f"{n}={float_of(op, n)!r}" for n in numbers)
    head = f"ops_updates.{op.name.split('.')[1]}("
    s.lines += call_of_lists(head, lists, [*scalars, *named], s.indent)
    return None


def _adam(s: EmissionScope, op: train.AdamOp) -> Text:
    if is_fused(op):
        return _by_kernel(s, op, "beta1", "beta2", "eps", "weight_decay")
    g, temporary = _decayed_gradient(s, op)
    m, v = _moments(s, op, g)
    _step(s, op, _bind_update(s, op, op.new_w, op.w), m, v)
    return _release(s, temporary)


def _adamw(s: EmissionScope, op: train.AdamWOp) -> Text:
    if is_fused(op):
        return _by_kernel(s, op, "beta1", "beta2", "eps", "weight_decay")
    w = _bind_update(s, op, op.new_w, op.w)
    _decay(s, op, w)
    m, v = _moments(s, op, s.operand(op.g))
    _step(s, op, w, m, v)
    return None


def _decay(s: EmissionScope, op: train.AdamWOp | train.NAdamWOp, w: str) -> None:
    """w -= lr weight_decay w"""
    if decay := float_of(op, "weight_decay"):
        s.line(f"{w}.mul_(1 - {decay!r} * {_number(s, op.lr, op.w)})")


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
    direction = s.define(op.new_w, op.new_w.name_hint or "direction").name
    correction = _number(s, op.correction1, op.w)
    s.line(f"{direction} = {m} / {_root(s, op, v)}.mul_({correction})")
    if decay:
        s.line(f"{direction}.add_({s.operand(op.w)}, alpha={decay!r})")
    return None


def _decayed_gradient(s: EmissionScope, op: train.Update) -> tuple[str, str | None]:
    """The variable of the gradient plus the weight decay; and that variable again if it is new."""
    g = _add_decay(s, op)
    if g == s.operand(op.operands[1]):
        return g, None
    name = s.names.new("decayed")
    s.line(f"{name} = {g}")
    return name, name


def _release(s: EmissionScope, temporary: str | None) -> None:
    if temporary is not None:
        s.line(f"del {temporary}")


def _adagrad(s: EmissionScope, op: train.AdagradOp) -> Text:
    if is_fused(op):
        return _by_kernel(s, op, "eps", "weight_decay")
    g, temporary = _decayed_gradient(s, op)
    total, w = _bind_update(s, op, op.new_s, op.s), _bind_update(s, op, op.new_w, op.w)
    s.line(f"{total}.addcmul_({g}, {g})")
    _subtract(s, w, op, f"({g} / {total}.sqrt().add_({float_of(op, 'eps')!r}))")
    return _release(s, temporary)


def _adamax(s: EmissionScope, op: train.AdamaxOp) -> Text:
    g, temporary = _decayed_gradient(s, op)
    m, n, w = (
        _bind_update(s, op, *of) for of in ((op.new_m, op.m), (op.new_n, op.n), (op.new_w, op.w))
    )
    beta1, beta2, eps = (float_of(op, x) for x in ("beta1", "beta2", "eps"))
    s.line(f"{m}.lerp_({g}, {1 - beta1!r})")
    s.line(f"torch.maximum({n}.mul_({beta2!r}), {g}.abs().add_({eps!r}), out={n})")
    _subtract(s, w, op, f"({m} / ({n} * {_number(s, op.correction1, op.w)}))")
    return _release(s, temporary)


def _nadam(s: EmissionScope, op: train.NAdamOp) -> Text:
    g, temporary = _decayed_gradient(s, op)
    _nadam_step(s, op, _bind_update(s, op, op.new_w, op.w), g)
    return _release(s, temporary)


def _nadamw(s: EmissionScope, op: train.NAdamWOp) -> Text:
    w = _bind_update(s, op, op.new_w, op.w)
    _decay(s, op, w)
    _nadam_step(s, op, w, s.operand(op.g))
    return None


def _nadam_step(s: EmissionScope, op: NAdams, w: str, g: str) -> None:
    m, v = _moments(s, op, g)
    a, b = (_number(s, x, op.w) for x in (op.of_gradient, op.of_mean))
    _subtract(s, w, op, f"({g} * {a}).add_({m} * {b}).div_({_root(s, op, v)})")


def _rms_direction(
    s: EmissionScope, op: train.RmsDirectionOp | train.CenteredRmsDirectionOp
) -> Text:
    g, temporary = _decayed_gradient(s, op)
    alpha, v = float_of(op, "alpha"), _bind_update(s, op, op.new_v, op.v)
    s.line(f"{v}.mul_({alpha!r}).addcmul_({g}, {g}, value={1 - alpha!r})")
    variance = f"{v}.sqrt()"
    if isinstance(op, train.CenteredRmsDirectionOp):
        m = _bind_update(s, op, op.new_m, op.m)
        s.line(f"{m}.lerp_({g}, {1 - alpha!r})")
        variance = f"{v}.addcmul({m}, {m}, value=-1).sqrt_()"
    direction = s.define(op.new_w, op.new_w.name_hint or "direction").name
    s.line(f"{direction} = {g} / {variance}.add_({float_of(op, 'eps')!r})")
    return _release(s, temporary)


TORCH: dict[type[Operation], Entry] = {
    train.SgdOp: _sgd,
    train.MomentumOp: _momentum,
    train.NesterovOp: _nesterov,
    train.AdagradOp: _adagrad,
    train.AdamOp: _adam,
    train.AdamWOp: _adamw,
    train.AdamaxOp: _adamax,
    train.NAdamOp: _nadam,
    train.NAdamWOp: _nadamw,
    train.RmsDirectionOp: _rms_direction,
    train.CenteredRmsDirectionOp: _rms_direction,
    train.LambDirectionOp: _lamb_direction,
    train.LarsOp: _lars,
}
