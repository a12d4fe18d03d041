"""The request for a forward part alone -> the body of its function: a loop over microbatches.

   train.forward @predict of @model accumulate <mean, microbatches = 4>
-> (%x: tensor<4x...>, %w) {
     train.microbatches 4
     %x_1 = train.microbatch %x
     forward part of @model
     %ys = train.collect %y of 4
     train.end_microbatches
     func.return %ys
   }
"""

from collections.abc import Sequence

from xdsl.dialects.builtin import AnyFloat, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    PIPELINE,
    EndMicrobatchesOp,
    ForwardOp,
    Role,
    arg_attrs,
    of_microbatches,
    result_attrs,
    updated_arguments,
)
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.microbatches import BatchLoop, split_forward
from shardir.rewriting.autodiff.tokens import mark_weights
from shardir.rewriting.hoisting import hoist_redistributions
from shardir.rewriting.rewriter import Rewriter


class ForwardFunction:
    """The function of a request, with the body `block`, in place."""

    def __init__(self, request: ForwardOp, source: FuncOp, block: Block, mesh: Mesh | None):
        """`mesh`: the mesh of a body with layouts, otherwise None."""
        self.request, self.block = request, block
        self.arguments = Arguments(block, arg_attrs(source))
        self.result_attributes = result_attrs(source)
        self.updated = updated_arguments(source)
        """For each result the index of the state that it updates, or None."""
        self.builder = Rewriter(mesh, block)
        self.builder.location = request.location

    def run(self) -> None:
        """Put the ops into a loop over the microbatches, and return the results of the loop."""
        last, b = self.block.last_op, self.builder
        assert isinstance(last, ReturnOp)
        returned = list(last.operands)
        self.block.erase_op(last)
        forward = ops_of(self.block)
        states = [i for i in self.updated if i is not None]
        activity = Activity(())
        activity.match(forward)
        computed = self._computed_results(returned)
        own, shared = split_forward(activity, self.arguments, forward, states, computed)
        loop = BatchLoop(self.arguments, b, own, states, self.request.microbatches)
        returned = [loop.parts.get(v, v) for v in returned]
        targets = [v for v, i in zip(returned, self.updated, strict=True)
                   if i is None and _is_averaged(v)]  # fmt: skip
        states_after = [v for v in returned if v not in targets]
        means = loop.means(shared, own, self._parameters(), targets, states_after)
        accumulate = self.request.accumulate
        if loop.count == 1 or (accumulate is not None and accumulate.kind == "tokens"):
            mark_weights(self.request, means, returned, self.request.pipeline is not None)
        _, replaced = loop.divide_by_tokens(accumulate, means)
        returned, targets = ([replaced.get(v, v) for v in vs] for vs in (returned, targets))
        results = []
        for at, (part, i) in enumerate(zip(returned, self.updated, strict=True)):
            if i is not None:
                results.append(loop.carry(i, self._lay_out_state(loop.variables[i], part)))
            elif part in targets:
                results.append(loop.sum(part))
            else:
                results.append(loop.collect(part))
                attributes = self.result_attributes[at]
                self.result_attributes[at] = of_microbatches(attributes, self.request.microbatches)
        b.create(EndMicrobatchesOp, [], [])
        if self.request.microbatches > 1 and not self.request.sums:
            results = [
                self._mean(v) if i is None and _is_averaged(v) else v
                for v, i in zip(results, self.updated, strict=True)
            ]
        self.block.add_op(ReturnOp(*results))
        hoist_redistributions(self.block)

    def _parameters(self) -> list[SSAValue]:
        roles = [self.arguments.annotation(i).role for i in range(len(self.arguments.attributes))]
        return [self.arguments[i] for i, role in enumerate(roles) if role is Role.PARAMETER]

    def _computed_results(self, returned: Sequence[SSAValue]) -> list[SSAValue]:
        """Return the results that ops compute, except states."""
        pairs = zip(returned, self.updated, strict=True)
        return [v for v, i in pairs if i is None and isinstance(v.owner, Operation)]

    def _lay_out_state(self, before: SSAValue, after: SSAValue) -> SSAValue:
        """Return the new value of a state, in the layout of the old one."""
        layout = layout_of(before)
        return after if layout is None else self.builder.redistribute(after, layout)

    def _mean(self, total: SSAValue) -> SSAValue:
        mean = self.builder.scale(total, 1 / self.request.microbatches)
        mean.name_hint = total.name_hint
        return mean

    def functions(self) -> list[FuncOp]:
        """Return the function with the block as its body."""
        f = self.arguments.as_function(self.request, self.result_attributes)
        if self.request.pipeline is not None:
            f.attributes[PIPELINE] = self.request.pipeline
        return [f]


def _is_averaged(v: SSAValue) -> bool:
    """Whether a result over several microbatches is their mean, or sum: a float scalar."""
    t = v.type
    return (
        isinstance(t, TensorType)
        and isinstance(t.element_type, AnyFloat)
        and not unsharded_type(v).get_shape()
    )
