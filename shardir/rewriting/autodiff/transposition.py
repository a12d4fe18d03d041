"""The backward part: each op of the forward part transposed, the last one first.

%y = nn.matmul %x, %w           %d_x = d_y w^T, %d_w = x^T d_y, partial over the batch's axes
%z = dist.redistribute %y       d_z is d_y: redistributed when an op needs it
%z = dist.permute %y            its transposed collective: the permute with its pairs reversed
"""

from collections.abc import Callable, Sequence

from xdsl.ir import Block, Operation, SSAValue

from shardir.compat.xdsl import operands_of
from shardir.diagnostics import Failure, ShardirError, coded
from shardir.dialects.dist import (
    CollectiveOp,
    PropagationBarrierOp,
    RecvOp,
    step_op,
    with_layout,
)
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import elements_of, unsharded_type
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.autodiff.activity import Activity, relocates
from shardir.rewriting.autodiff.cotangents import Cotangents, cotangent_layout, cotangent_name
from shardir.rewriting.autodiff.varying import concerns_varying, transposed
from shardir.rewriting.rewriter import Rewriter

GradientOfManual = Callable[
    [ManualOp, Rewriter, Sequence[SSAValue | None]], Sequence[SSAValue | None]
]


class Transposition:
    """Transposes the ops of a forward part at the end of a block."""

    def __init__(
        self, block: Block, builder: Rewriter, activity: Activity, cotangents: Cotangents,
        manual: GradientOfManual | None = None,
    ):  # fmt: skip
        """`manual`: the gradients of manual computations, which are functions."""
        self.block, self.builder = block, builder
        self.activity, self.cotangents, self.manual = activity, cotangents, manual

    def mark(self, forward: Sequence[Operation]) -> None:
        """Mark the active values of a forward part, and record its redistributions, which are not
        repeated."""
        self.activity.mark(forward)
        for op in forward:
            if self.builder.mesh is not None and relocates(op):
                for v, out in self.activity.communicated(op) or ():
                    self.builder.record_known(v, out)

    def run(self, forward: Sequence[Operation]) -> None:
        """Transpose a forward part.

        Raises:
            Failure: an op has no transpose.
        """
        errors: list[tuple[Operation | None, str]] = []
        for op in reversed(forward):
            if not any(v in self.activity.active and v in self.cotangents for v in op.results):
                continue
            self.builder.location, self.builder.attributes = op.location, stage_attrs(stage_of(op))
            try:
                if (moved := self.activity.communicated(op)) is not None:
                    for v, out in moved:
                        if v in self.activity.active and out in self.cotangents:
                            self.cotangents.add(v, self.communication(op, v, out))
                elif isinstance(op, TensorOp):
                    self.tensor_op(op)
                else:
                    raise ShardirError(
                        coded("G8", f"expected an op with a gradient, got {op.name}")
                    )
            except ShardirError as e:
                errors.append((op, str(e)))
        self.builder.attributes = {}
        if errors:
            raise Failure(errors)

    def tensor_op(self, op: TensorOp) -> None:
        """Add the cotangents of an op's operands, from the cotangents of its results."""
        partial = self.passes_partial(op)
        cotangents = [self.cotangents.sum(v, partial) for v in op.results]
        if isinstance(op, ManualOp) and self.manual is not None:
            gradients = self.manual(op, self.builder, cotangents)
        else:
            gradients = op.gradient(self.builder, *cotangents)
        for v, d in zip(operands_of(op), gradients, strict=True):
            if d is not None and v in self.activity.active:
                if d.name_hint is None:
                    d.name_hint = cotangent_name(v)
                self.cotangents.add(v, [d])

    def passes_partial(self, op: TensorOp) -> bool:
        """Whether an op's transpose takes a partial cotangent: the op is linear, has one active
        operand, and the operand's cotangent is no larger than the results'. So the cotangents of
        several reshapes of one value are added before they are reduced."""
        active = [v for v in operands_of(op) if v in self.activity.active]
        return (
            len(active) == 1
            and bool(op.factors().linear)
            and elements_of(active[0]) <= sum(map(elements_of, op.results))
        )

    def communication(self, op: Operation, v: SSAValue, out: SSAValue) -> list[SSAValue]:
        """Return the addends of the cotangent of `v` from the addends of `out`, its value after
        communication. They are equal, in any layouts, if both values have one global value.

        Raises:
            ShardirError: no layout expresses the cotangent.
        """
        mesh, new = self.builder.mesh, None
        if mesh is None:  # layouts are still to be decided
            if isinstance(op, PropagationBarrierOp):
                new = op.reversed(self.cotangents.value(out))
        elif isinstance(op, RecvOp):
            op.check_keeps(v, mesh)
        elif isinstance(op, CollectiveOp) and concerns_varying(op, v, mesh):
            d = transposed(self.builder, op, v, out, self.cotangents.value(out))
            if d.name_hint is None:
                d.name_hint = cotangent_name(v)
            return [d]
        elif isinstance(op, CollectiveOp) and not op.keeps(v, mesh):
            before = cotangent_layout(self.builder.layout(v))
            step = op.record.transpose(op.step_for(v, out, mesh), before)
            type = with_layout(unsharded_type(v), before)
            new = step_op(step, self.cotangents.value(out), type)
        if new is None:
            return self.cotangents.take(out)
        new.location = op.location
        new.results[0].name_hint = cotangent_name(v)
        self.block.add_op(new)
        return [new.results[0]]
