"""The backward part of one forward part: seeded, then transposed.

%y = nn.matmul %x, %w                     forward part
%loss = nn.reduce <sum> %y dims <0, 1>
train.backward
%d_loss = nn.constant dense<1.0>          seed
%d_y = nn.broadcast %d_loss               transposed ops
%d_w = nn.einsum "ik,ij->kj" %x, %d_y
"""

from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import BackwardOp, Request, StepOp
from shardir.rewriting.autodiff.activity import Activity, is_float
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.cotangents import Cotangents
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.autodiff.transposition import Transposition
from shardir.rewriting.rewriter import Rewriter


class BackwardPart:
    """Adds the backward parts of forward parts to the end of a block."""

    def __init__(
        self,
        request: Request,
        arguments: Arguments,
        builder: Rewriter,
        differentiated: Sequence[int],
        updated: Sequence[int | None],
        metrics: Sequence[str | None],
    ):
        """`differentiated`: the indices of arguments. For each returned value, `updated` has the
        index of the state or parameter that it updates, or None; `metrics` the name of the metric,
        or None."""
        self.request, self.arguments, self.builder = request, arguments, builder
        self.given: dict[int, SSAValue] = {}
        """The gradients that the forward part computes, by the indices of arguments."""
        self.differentiated, self.updated, self.metrics = differentiated, updated, metrics
        self.activity = Activity(arguments[i] for i in differentiated)
        self.cotangents = Cotangents(builder)
        self.transposition = Transposition(
            arguments.block, builder, self.activity, self.cotangents
        )  # fmt: skip
        is_step = isinstance(request, StepOp)
        self.step = TrainStep(request, builder, arguments) if is_step else None

    def add(self, forward: Sequence[Operation], returned: Sequence[SSAValue]) -> None:
        """Add the backward part of a forward part that returns these values."""
        self.arguments.block.add_op(BackwardOp.create(location=self.request.location))
        self.transposition.mark(forward)
        for v, state, metric in zip(returned, self.updated, self.metrics, strict=True):
            if is_float(v) and state is None and metric is None and not self.given:
                self.seed(v)
        for i, gradient in self.given.items():
            self.cotangents.add(self.arguments[i], [gradient])
        self.transposition.run(forward)

    def seed(self, v: SSAValue) -> None:
        """Set the cotangent of a returned value: 1 or the step's seed for a scalar; a new argument
        otherwise."""
        t = unsharded_type(v)
        if t.get_shape() == ():
            if v in self.activity.active:
                element = t.element_type
                step, b = self.step, self.builder
                one = step.seed(element) if step is not None else b.constant(1.0, element)
                self.cotangents.add(v, [one])
        else:
            layout = layout_of(v)
            complete = with_layout(t, layout.complete if layout is not None else None)
            arg = self.arguments.add(complete, f"d_{v.name_hint or 'result'}", {})
            self.cotangents.add(v, [arg])
