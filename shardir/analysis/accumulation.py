"""Gradients computed directly into the sum over microbatches, without a tensor of their own.

%d = nn.einsum "ki,kj->ij" %x, %dy       d_sum.addmm_(x.mT, dy)
%s = train.accumulate %d

These are products of matrices, and gradients of tables, which have few nonzero rows.
"""

from collections.abc import Iterable
from typing import NamedTuple

from xdsl.dialects.builtin import AnyFloat
from xdsl.dialects.func import CallOp, ReturnOp
from xdsl.ir import Operation, OpResult, SSAValue

from shardir.dialects import nn, train
from shardir.dialects.blocks import of_kind
from shardir.dialects.nn.types import unsharded_type


class MatrixProduct(NamedTuple):
    """The letters of a contraction that is a product of two matrices, or of two batches of
    matrices. If `swapped`, the second operand is the first matrix."""

    batch: str
    rows: str
    columns: str
    summed: str
    swapped: bool


def matrix_product(x: str, y: str, z: str) -> MatrixProduct | None:
    """Return the matrix product that x, y -> z computes, if torch makes its result without a
    transpose; None otherwise."""
    batch = "".join(c for c in z if c in x and c in y)
    summed = "".join(c for c in x if c in y and c not in z)
    if len(batch) > 1 or not summed or not z.startswith(batch) or len(z) != len(batch) + 2:
        return None
    rows, columns = z[-2:]
    swapped = rows in y
    first, second = (y, x) if swapped else (x, y)
    fits = {first} <= {batch + rows + summed, batch + summed + rows} and {second} <= {
        batch + summed + columns, batch + columns + summed
    }  # fmt: skip
    return MatrixProduct(batch, rows, columns, summed, swapped) if fits else None


def adds_to_its_sum(v: SSAValue) -> bool:
    """Whether a value whose only use is a sum over microbatches, or the return to one, can be
    computed into that sum."""
    op = v.owner
    if not (v.has_one_use() and isinstance(unsharded_type(v).element_type, AnyFloat)):
        return False
    if isinstance(op, nn.Contraction):
        return matrix_product(*op.letters) is not None
    return isinstance(op, nn.GatherGradOp)


def added_in_place(ops: Iterable[Operation]) -> dict[SSAValue, train.AccumulateOp]:
    """Return the values of a step's loop that are computed into sums, with their sums: values of
    the loop itself, and results of the functions of stages.

    Args:
        ops: the ops of the step.
    """
    sums: dict[SSAValue, train.AccumulateOp] = {}
    for op in of_kind(ops, train.AccumulateOp):
        if not op.x.has_one_use():
            continue
        maker = op.x.owner
        if isinstance(maker, CallOp | train.EitherOp):
            for v in maker.operands if isinstance(maker, train.EitherOp) else [op.x]:
                if (returned := _returned_value(v)) is not None and adds_to_its_sum(returned):
                    sums[v] = op
        elif isinstance(maker, Operation) and train.loop_of(maker) is train.loop_of(op):
            sums |= {op.x: op} if adds_to_its_sum(op.x) else {}
    return sums


def _returned_value(result: SSAValue) -> SSAValue | None:
    """Return the value that the called function of a stage returns as a result, if an op outside of
    loops makes it."""
    op = result.owner
    callee = train.callee_of(op) if isinstance(op, CallOp) else None
    last = None if callee is None else callee.body.block.last_op
    if not isinstance(last, ReturnOp) or not isinstance(result, OpResult):
        return None
    v = last.operands[result.index]
    maker = v.owner
    return v if isinstance(maker, Operation) and train.loop_of(maker) is None else None
