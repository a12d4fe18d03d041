"""Several microbatches: forward and backward part once for each, gradients added up.

    first inputs             shared ops, own ops, train.backward, transposed own ops
    train.microbatch
    second inputs            own ops, train.backward, transposed own ops
    transposed shared ops, with the sums of all microbatches' cotangents

An op is a microbatch's own if it depends on an input, or on a state that the function updates; the
others are shared and computed once. The addends of a cotangent of all microbatches are added before
they are reduced.
"""

from collections.abc import Sequence

from xdsl.ir import Operation, SSAValue

from shardir.analysis.functions import MAX_OPS
from shardir.diagnostics import Failure, coded
from shardir.dialects.train import MicrobatchOp, in_microbatch
from shardir.rewriting.autodiff.backward import BackwardPart


def add_microbatches(
    backward: BackwardPart, forward: Sequence[Operation], returned: Sequence[SSAValue], count: int
) -> list[list[SSAValue]]:
    """Add the backward part of a forward part, the first microbatch's, then the parts of the
    others. Return the returned values of each.

    Raises:
        Failure: the parts of all microbatches have too many ops.
    """
    arguments, activity, step = backward.arguments, backward.activity, backward.step
    assert step is not None
    block = arguments.block
    indices = range(len(arguments.attributes))
    inputs = [i for i in indices if not arguments.annotation(i).is_retained]
    updated = [i for i in backward.updated if i is not None]
    own = activity.dependent(forward, [arguments[i] for i in (*inputs, *updated)])
    if 2 * len(own) * count > MAX_OPS:
        found = (
            f"expected at most {MAX_OPS} ops, got {count} microbatches of {len(own)} ops and as "
            "many of the backward part"
        )
        raise Failure([(backward.request, coded("F4", found))])
    mine = set(own)
    shared = [op for op in forward if op not in mine]
    backward.transposition.mark(shared)
    retained = {*block.args, *(v for op in shared for v in op.results)}
    for i in inputs:
        arguments.attributes[i] = in_microbatch(arguments.attributes[i], 0)
    backward.add(own, returned)
    all_returned = [list(returned)]
    for k in range(1, count):
        backward.cotangents.accumulate(retained)
        block.add_op(MicrobatchOp.create(location=backward.request.location))
        values = {arguments[i]: _input(backward, i, k) for i in inputs}
        for i, v in zip(backward.updated, all_returned[-1], strict=True):
            if i is not None:
                values[arguments[i]] = step.becomes(arguments[i], v)
        ops = [op.clone(values) for op in own]
        activity.match(ops)
        for old, op in zip(own, ops, strict=True):
            op.location = old.location
            block.add_op(op)
        all_returned.append([values.get(v, v) for v in returned])
        backward.add(ops, all_returned[-1])
    backward.cotangents.accumulate(retained)
    backward.transposition.run(shared)
    return all_returned


def _input(backward: BackwardPart, i: int, k: int) -> SSAValue:
    """Add input i of microbatch k."""
    arguments = backward.arguments
    first = arguments[i]
    name = f"{first.name_hint or 'input'}_batch{k}"  # xDSL drops a mere _1
    return arguments.add(first.type, name, in_microbatch(arguments.attributes[i], k))
