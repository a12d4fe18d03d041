"""Gradients that add to the sum over the microbatches themselves: no tensor is made for them.

%d = nn.einsum "ki,kj->ij" %x, %dy       d_sum.addmm_(x.mT, dy)
%s = train.accumulate %d

They are products of matrices, and the rows of a table's gradient, which are few of the table's.
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
    """The letters of a contraction that is a product of two matrices, or of a batch of them; the
    first matrix is the second operand if it is `swapped`."""

    batch: str
    rows: str
    columns: str
    summed: str
    swapped: bool


def matrix_product(x: str, y: str, z: str) -> MatrixProduct | None:
    """Return the product that x, y -> z is, whose result torch makes as it is; None if it is
    another contraction."""
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
    """Whether a value that has one use, a sum over the microbatches or the return to one, can add
    to that sum."""
    op = v.owner
    if not (v.has_one_use() and isinstance(unsharded_type(v).element_type, AnyFloat)):
        return False
    if isinstance(op, nn.Contraction):
        return matrix_product(*op.letters) is not None
    return isinstance(op, nn.GatherGradOp)


def added_in_place(ops: Iterable[Operation]) -> dict[SSAValue, train.AccumulateOp]:
    """Return the values of a step's loop that add to sums, each with its sum: those of the loop
    itself, and results of the functions of stages.

    Args:
        ops: those of the step.
    """
    found: dict[SSAValue, train.AccumulateOp] = {}
    for op in of_kind(ops, train.AccumulateOp):
        if not op.x.has_one_use():
            continue
        maker = op.x.owner
        if isinstance(maker, CallOp | train.EitherOp):
            for v in maker.operands if isinstance(maker, train.EitherOp) else [op.x]:
                if (made := _returned(v)) is not None and adds_to_its_sum(made):
                    found[v] = op
        elif isinstance(maker, Operation) and train.loop_of(maker) is train.loop_of(op):
            found |= {op.x: op} if adds_to_its_sum(op.x) else {}
    return found


def _returned(result: SSAValue) -> SSAValue | None:
    """Return what the function of a stage that is called makes for a result, outside of loops."""
    op = result.owner
    callee = train.callee_of(op) if isinstance(op, CallOp) else None
    end = None if callee is None else callee.body.block.last_op
    if not isinstance(end, ReturnOp) or not isinstance(result, OpResult):
        return None
    v = end.operands[result.index]
    maker = v.owner
    return v if isinstance(maker, Operation) and train.loop_of(maker) is None else None
