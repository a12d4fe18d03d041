"""Updates by torch's fused kernels: adjacent updates of a kind share a call."""

from collections.abc import Iterator

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Operation, SSAValue

from shardir.backend.torch.emit.origins import source_line
from shardir.dialects import train
from shardir.dialects.dist import type_layout
from shardir.dialects.nn.types import element_name

FusedUpdate = train.AdamOp | train.AdamWOp | train.AdagradOp


def fused_step(op: Operation) -> SSAValue | None:
    """The step number from which torch's fused kernel can compute an update's bias corrections;
    None for other updates, and if the corrections have another origin."""
    if not isinstance(op, train.AdamOp | train.AdamWOp):
        return None
    one, two = op.correction1.owner, op.correction2.owner
    if not (isinstance(one, train.BiasCorrectionOp) and isinstance(two, train.BiasCorrectionOp)):
        return None
    same = one.step is two.step and (one.beta, two.beta) == (op.beta1, op.beta2)
    return one.step if same else None


def is_fused(op: FusedUpdate) -> bool:
    """Whether torch's fused kernel computes an update."""
    if isinstance(op, train.AdagradOp):
        assert isinstance(op.w.type, TensorType)
        return element_name(op.w.type.element_type) in ("f32", "f64")
    return fused_step(op) is not None


def updated_with(op: FusedUpdate) -> Iterator[FusedUpdate]:
    """Yield the updates after an update that share its call."""
    after = op.next_op
    while after is not None and _in_one_call(op, after):
        assert isinstance(after, FusedUpdate)
        yield after
        after = after.next_op


def is_updated_before(op: Operation) -> bool:
    """Whether an update is in the call of the update before it."""
    return op.prev_op is not None and _in_one_call(op.prev_op, op)


def _in_one_call(one: Operation, other: Operation) -> bool:
    if not isinstance(one, FusedUpdate) or type(one) is not type(other):
        return False
    assert isinstance(other, FusedUpdate)
    return (
        is_fused(one)
        and is_fused(other)
        and _key(one) == _key(other)
        and not any(isinstance(v.owner, FusedUpdate) for v in other.operands)
        and all(any(result.uses for result in op.results) for op in (one, other))
    )


def _key(op: FusedUpdate) -> tuple[object, ...]:
    """The properties that the updates of a call share: element type, memory, hyperparameters and
    source line."""
    type = op.w.type
    assert isinstance(type, TensorType)
    layout = type_layout(type)
    is_on_host = layout is not None and layout.host
    step = fused_step(op)
    return type.element_type, is_on_host, op.properties, op.lr, step, source_line(op)
