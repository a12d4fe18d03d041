"""The loop over the microbatches of a step, with their gradients added up.

    ops that all microbatches share, train.carried of each state
    train.microbatches 4
    train.microbatch of each input, own ops, train.backward, transposed own ops
    train.accumulate of each cotangent and of the loss, train.carry of each state
    train.end_microbatches
    transposed shared ops, with the sums of all microbatches' cotangents

An op is a microbatch's own if it depends on an input, on a state that the function updates, or on
a value with the mark `recompute`, which is not to be held over the loop; the others are shared and
computed once. The addends of a cotangent are added before they are reduced, over all microbatches.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from xdsl.dialects.builtin import NoneAttr, TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.sharding import Sharding
from shardir.dialects.dist import LayoutAttr, ShardingAttr, layout_of, sharding_of
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    AccumulateOp,
    CarriedOp,
    CarryOp,
    EndMicrobatchesOp,
    MicrobatchesOp,
    MicrobatchOp,
    of_microbatches,
)
from shardir.rewriting.autodiff.backward import BackwardPart
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.marks import RECOMPUTE


def add_loop(
    backward: BackwardPart, step: TrainStep, forward: Sequence[Operation],
    returned: Sequence[SSAValue],
) -> list[SSAValue]:  # fmt: skip
    """Make a forward part, which is all of the block, that of each microbatch, and add its backward
    part. Return the sum of the losses, and the updated states, in place of the returned values."""
    arguments, b, block = backward.arguments, backward.builder, backward.arguments.block
    b.location = backward.request.location
    inputs = [
        i for i in range(len(arguments.attributes)) if not arguments.annotation(i).is_retained
    ]
    states = [i for i in backward.updated if i is not None]
    marked = [v for op in forward if RECOMPUTE in op.attributes for v in op.results]
    made = {v.owner: None for v in marked if isinstance(v.owner, Operation)}
    varying = [*(arguments[i] for i in (*inputs, *states)), *marked]
    made |= dict.fromkeys(backward.activity.dependent(forward, varying))
    own = [op for op in forward if op in made]
    shared = [op for op in forward if op not in made]
    for op in own:
        op.detach()
    backward.transposition.mark(shared)
    variables = {i: b.create(CarriedOp, [arguments[i]], [arguments[i].type]).out for i in states}
    for i, v in variables.items():
        v.name_hint = arguments[i].name_hint
        arguments[i].replace_uses_with_if(v, lambda use, v=v: use.operation is not v.owner)
    loop = b.create(MicrobatchesOp, [], [], {"count": int_attr(step.microbatches)})
    parts = {arguments[i]: _slice(backward, i, step.microbatches) for i in inputs}
    parts |= {arguments[i]: v for i, v in variables.items()}
    for op in own:
        block.add_op(op)
    returned = [parts.get(v, v) for v in returned]
    backward.add(own, returned)
    b.location = backward.request.location
    retained = {*block.args, *(v for op in shared for v in op.results)}
    backward.cotangents.accumulate(retained)
    sums, results = Sums(backward, loop), []
    sums.add_cotangents(retained)
    for v, i in zip(returned, backward.updated, strict=True):
        if i is None:
            results.append(sums.of(v))
        else:
            operands = [step.becomes(variables[i], v), variables[i]]
            results.append(b.create(CarryOp, operands, [variables[i].type], names=[v]).out)
    b.create(EndMicrobatchesOp, [], [])
    backward.transposition.run(shared)
    return results


def _slice(backward: BackwardPart, i: int, count: int) -> SSAValue:
    """Replace input i by one with all microbatches, and return a microbatch's part of that."""
    arguments = backward.arguments
    one = arguments.block.args[i]
    batches = arguments.block.insert_arg(_stacked(one, count), i)
    batches.name_hint, batches.location = one.name_hint, one.location
    part = backward.builder.create(MicrobatchOp, [batches], [one.type], names=[one]).out
    one.replace_all_uses_with(part)
    arguments.block.erase_arg(one)
    arguments.attributes[i] = of_microbatches(arguments.attributes[i], count)
    return part


def _stacked(v: SSAValue, count: int) -> TensorType:
    """Return the type of `count` values, stacked in a new dimension 0."""
    t, encoding = unsharded_type(v), NoneAttr()
    if (layout := layout_of(v)) is not None:
        encoding = LayoutAttr(_with_dim(layout))
    elif (sharding := sharding_of(v)) is not None:
        priorities = (0, *sharding.priorities) if sharding.priorities else ()
        opened = frozenset(d + 1 for d in sharding.open)
        layout = _with_dim(sharding.layout)
        encoding = ShardingAttr(Sharding(layout, opened, priorities, sharding.replicated))
    shape = (count, *t.get_shape())
    return TensorType(t.element_type, shape, encoding)


def _with_dim(layout: Layout) -> Layout:
    return replace(layout, dims=((), *layout.dims))


class Sums:
    """The sums of values over all microbatches, each made where the value is: no more than the sum
    is live after that."""

    def __init__(self, backward: BackwardPart, loop: MicrobatchesOp):
        self.backward, self.inside = backward, set(loop.body())
        self._known: dict[SSAValue, SSAValue] = {}

    def of(self, v: SSAValue) -> SSAValue:
        """Return the sum of a value."""
        if v not in self._known:
            block, owner = self.backward.arguments.block, v.owner
            new = AccumulateOp.create(operands=[v], result_types=[v.type])
            new.location, new.out.name_hint = self.backward.request.location, v.name_hint
            if isinstance(owner, Operation):
                new.location = owner.location
            if isinstance(owner, Operation) and owner in self.inside:
                block.insert_op_after(new, owner)
            else:
                block.add_op(new)
            self._known[v] = new.out
        return self._known[v]

    def add_cotangents(self, values: Collection[SSAValue]) -> None:
        """Add up the addends of the cotangents of these values, in each layout."""
        addends = self.backward.cotangents.addends
        for v in addends:
            if v in values:
                addends[v] = [self.of(d) for d in addends[v]]
