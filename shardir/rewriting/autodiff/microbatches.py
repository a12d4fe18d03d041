"""The loop over the microbatches of a step, whose gradients it accumulates, or of a forward part.

    ops that all microbatches share, train.carried of each state
    train.microbatches 4
    train.microbatch of each input, own ops, train.backward, transposed own ops
    train.accumulate of each cotangent and of the loss, train.carry of each state
    train.end_microbatches
    transposed shared ops, with the sums of all microbatches' cotangents

An op is a microbatch's own if it depends on an input, on a state that the function updates, or on a
value with the mark `recompute`, which must not be held over the loop; all remaining ops are shared
and computed once. A parameter that the function writes is such a state, with a cotangent. The
addends of a cotangent are added over all microbatches before they are reduced.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from xdsl.dialects.builtin import IntegerAttr, NoneAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.sharding import Sharding
from shardir.dialects.dist import LayoutAttr, ShardingAttr, layout_of, sharding_of
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    AccumulateAttr,
    AccumulateOp,
    CarriedOp,
    CarryOp,
    CollectOp,
    EndMicrobatchesOp,
    MicrobatchesOp,
    MicrobatchOp,
    OfMicrobatches,
    of_microbatches,
)
from shardir.rewriting.autodiff.activity import Activity
from shardir.rewriting.autodiff.arguments import Arguments
from shardir.rewriting.autodiff.backward import BackwardPart
from shardir.rewriting.autodiff.cotangents import AddendPlace
from shardir.rewriting.autodiff.step import TrainStep
from shardir.rewriting.autodiff.tokens import (
    Denominators,
    TokenMeans,
    check_means,
    divide_by_tokens,
    warn_of_means,
)
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter, erase


def add_loop(
    backward: BackwardPart, step: TrainStep, forward: Sequence[Operation],
    returned: Sequence[SSAValue],
) -> list[SSAValue]:  # fmt: skip
    """Turn a forward part, which is the whole block, into a loop over microbatches, and add the
    backward part. Return the sum of the losses, and the updated states, in place of the returned
    values."""
    arguments, b = backward.arguments, backward.builder
    b.location = backward.request.location
    states = [i for i in backward.updated if i is not None]
    marked = [v for op in forward if RECOMPUTE in op.attributes for v in op.results]
    own, shared = split_forward(backward.activity, arguments, forward, states, marked)
    backward.transposition.mark(shared)
    loop = BatchLoop(arguments, b, own, states, step.microbatches)
    returned = [loop.parts.get(v, v) for v in returned]
    pairs = list(zip(returned, backward.updated, strict=True))
    means = loop.means(
        shared, own, [arguments[i] for i in backward.differentiated],
        [*(v for v, i in pairs if i is None), *backward.given.values()],
        [v for v, i in pairs if i is not None],
    )  # fmt: skip
    if step.microbatches > 1 and not step.averages:
        metrics = zip(returned, backward.metrics, strict=True)
        warn_of_means(means, {v: name for v, name in metrics if name is not None})
    own, replaced = loop.divide_by_tokens(step.request.accumulate, means)
    returned = [replaced.get(v, v) for v in returned]
    backward.given = {i: replaced.get(v, v) for i, v in backward.given.items()}
    written = {loop.variables[i]: arguments[i] for i in backward.differentiated if i in states}
    backward.activity.active.update(written)
    backward.add(own, returned)
    for variable, parameter in written.items():
        if variable in backward.cotangents:
            backward.cotangents.sums[parameter] = backward.cotangents.sums.pop(variable)
    b.location = backward.request.location
    retained = {*arguments.block.args, *(v for op in shared for v in op.results)}
    loop.add_up_cotangents(backward.cotangents.sums, retained)
    results = []
    for v, i in zip(returned, backward.updated, strict=True):
        if i is None:
            results.append(loop.sum(v))
        else:
            results.append(loop.carry(i, step.select_new(loop.variables[i], v)))
    b.create(EndMicrobatchesOp, [], [])
    backward.transposition.run(shared)
    return results


def split_forward(
    activity: Activity, arguments: Arguments, forward: Sequence[Operation], states: Sequence[int],
    marked: Sequence[SSAValue],
) -> tuple[list[Operation], list[Operation]]:  # fmt: skip
    """Return the ops that are a microbatch's own, and the ops that all microbatches share.

    Args:
        states: the indices of the states that the function updates.
        marked: values that each microbatch computes in any case.
    """
    inputs = _inputs(arguments)
    own = {v.owner: None for v in marked if isinstance(v.owner, Operation)}
    varying = [*(arguments[i] for i in (*inputs, *states)), *marked]
    own |= dict.fromkeys(activity.dependent_ops(forward, varying))
    return [op for op in forward if op in own], [op for op in forward if op not in own]


def _inputs(arguments: Arguments) -> list[int]:
    """Return the indices of the inputs."""
    count = len(arguments.attributes)
    return [i for i in range(count) if not arguments.annotation(i).is_retained]


class BatchLoop:
    """The loop over the microbatches under construction, at the end of a block.

    Attributes:
        parts: a microbatch's value of each input and state.
        variables: the states in the loop, by the indices of their arguments.
    """

    def __init__(
        self, arguments: Arguments, b: Rewriter, own: Sequence[Operation], states: Sequence[int],
        count: int,
    ):  # fmt: skip
        """`own`: the ops of the loop."""
        self.b, self.block, self.count = b, arguments.block, count
        assert b.location is not None
        self.location = b.location
        for op in own:
            op.detach()
        self.variables = {i: b.create(CarriedOp, [arguments[i]], [arguments[i].type]).out
                          for i in states}  # fmt: skip
        for i, v in self.variables.items():
            v.name_hint = arguments[i].name_hint
            arguments[i].replace_uses_with_if(v, lambda use, v=v: use.operation is not v.owner)
        self.loop = b.create(MicrobatchesOp, [], [], {"count": int_attr(count)})
        self.parts = {arguments[i]: _slice(arguments, b, i, count) for i in _inputs(arguments)}
        self.parts |= {arguments[i]: v for i, v in self.variables.items()}
        for op in own:
            self.block.add_op(op)
        self._sums: dict[SSAValue, SSAValue] = {}

    def means(
        self, shared: Sequence[Operation], own: Sequence[Operation],
        parameters: Sequence[SSAValue], targets: Sequence[SSAValue], others: Sequence[SSAValue],
    ) -> TokenMeans:  # fmt: skip
        """Return the means over tokens among the loop's ops `own`.

        Args:
            targets: the results that are means over microbatches.
            others: the remaining results.
        """
        slices = [v for v in self.parts.values() if isinstance(v.owner, MicrobatchOp)]
        learned = [*parameters, *self.variables.values()]
        return TokenMeans(shared, own, slices, learned, targets, others)

    def divide_by_tokens(
        self, accumulate: AccumulateAttr | None, means: TokenMeans
    ) -> tuple[list[Operation], dict[SSAValue, SSAValue]]:  # fmt: skip
        """Take means of the loop's ops over the tokens of all microbatches, if this is requested.
        Return the ops, and the replaced values with their replacements.

        Raises:
            Failure: means are over tokens although this is not requested; or the requested results
                are no means over tokens.
        """
        if self.count == 1 or accumulate is None or accumulate.kind == "sum":
            return [*means.every], {}
        if accumulate.kind != "tokens":
            check_means(means, self.count)
            return [*means.every], {}
        before = Rewriter(self.b.mesh).before(self.loop)
        stacked = {v: v.owner.operands[0] for v in means.inputs if isinstance(v.owner, Operation)}
        replaced = divide_by_tokens(means, Denominators(before, means, stacked, self.count))
        body = [op for op in self.loop.body() if not isinstance(op, MicrobatchOp)]
        results = {replaced.get(v, v) for v in (*means.targets, *means.others)}
        for op in reversed(body):
            if results.isdisjoint(op.results) and all(v.first_use is None for v in op.results):
                erase(op)
        return [op for op in body if op.parent is not None], replaced

    def sum(self, v: SSAValue) -> SSAValue:
        """Return the sum of a value over all microbatches."""
        if v not in self._sums:
            self._sums[v] = self._insert_after_operand(
                AccumulateOp.create(operands=[v], result_types=[v.type])
            )
        return self._sums[v]

    def collect(self, v: SSAValue) -> SSAValue:
        """Return the values of all microbatches, stacked in a new dimension 0."""
        return self._insert_after_operand(CollectOp.create(
            operands=[v], result_types=[_stacked_type(v, self.count)],
            properties={"count": IntegerAttr(self.count, i64)},
        ))  # fmt: skip

    def carry(self, i: int, v: SSAValue) -> SSAValue:
        """Let a value be the state of argument i in the next microbatch; return the last value."""
        variable = self.variables[i]
        return self.b.create(CarryOp, [v, variable], [variable.type], names=[v]).out

    def add_up_cotangents(
        self, sums: Mapping[SSAValue, dict[AddendPlace, SSAValue]], values: Collection[SSAValue]
    ) -> None:
        """Sum the cotangents of values over all microbatches, at each place."""
        for v, places in sums.items():
            if v in values:
                places |= {place: self.sum(d) for place, d in places.items()}

    @cached_property
    def inside(self) -> set[Operation]:
        """The ops of the loop at the first access."""
        return set(self.loop.body())

    def _insert_after_operand(self, new: OfMicrobatches) -> SSAValue:
        """Insert an op right after its operand is made, so that only the op's result stays live."""
        owner = new.x.owner
        new.location, new.out.name_hint = self.location, new.x.name_hint
        if isinstance(owner, Operation):
            new.location = owner.location
        if isinstance(owner, Operation) and owner in self.inside:
            self.block.insert_op_after(new, owner)
        else:
            self.block.add_op(new)
        return new.out


def _slice(arguments: Arguments, b: Rewriter, i: int, count: int) -> SSAValue:
    """Replace input i by one with all microbatches, and return the microbatch's slice of it."""
    one = arguments.block.args[i]
    batches = arguments.block.insert_arg(_stacked_type(one, count), i)
    batches.name_hint, batches.location = one.name_hint, one.location
    part = b.create(MicrobatchOp, [batches], [one.type], names=[one]).out
    one.replace_all_uses_with(part)
    arguments.block.erase_arg(one)
    arguments.attributes[i] = of_microbatches(arguments.attributes[i], count)
    return part


def _stacked_type(v: SSAValue, count: int) -> TensorType:
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
