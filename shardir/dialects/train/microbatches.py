"""The loop of a training step over its microbatches: two marks, and ops on the values that enter
and leave the loop.

    %s = train.carried %s0                     a state, before the first microbatch
    train.microbatches 4                       the ops up to the end run four times
    %x = train.microbatch %xs                  a slice of the batches: its index in dimension 0
    %y = ...
    %s1 = train.carry %s2, %s                  %s of the next microbatch
    %d = train.accumulate %d_k                 the sum over all microbatches, after the end
    train.end_microbatches

Any other value of the loop is, after the end, that of the last microbatch.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import ClassVar

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import operand_def, prop_def, result_def, traits_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Shape
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import WaitOp, is_started, tensor
from shardir.dialects.nn.base import STRATEGY, Array, Device, Props, TensorOp, Types, factor_names
from shardir.dialects.nn.elementwise import Elementwise, Unary
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train.requests import Mark


@op_definition
class MicrobatchesOp(Mark):
    """The beginning of the ops that run once for each of `count` microbatches"""

    name = "train.microbatches"
    count = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = "$count attr-dict"

    @property
    def runs(self) -> int:
        """The number of times that the ops of the loop run."""
        return self.count.value.data

    @property
    def end(self) -> "EndMicrobatchesOp | None":
        """The end of the loop; None where another loop or the function's end comes first."""
        return next((op for op in _following(self) if isinstance(op, EndMicrobatchesOp)), None)

    def body(self) -> Iterator[Operation]:
        """Yield the ops of the loop, without its marks."""
        for op in _following(self):
            if isinstance(op, EndMicrobatchesOp):
                return
            yield op

    def verify_(self) -> None:
        if self.runs < 1:
            raise VerifyException(coded("G10", f"expected 1 microbatch or more, got {self.runs}"))
        if self.end is None:
            raise VerifyException(
                coded("G12", "expected train.end_microbatches after train.microbatches, got none")
            )
        body, carried = dict.fromkeys(self.body()), set[SSAValue]()
        for op in body:
            if not carried.isdisjoint(op.operands):
                found = f"expected no use of a value that train.carry has set, got {op.name}"
                raise VerifyException(coded("G12", found))
            if isinstance(op, CarryOp):
                carried.add(op.carried)
            if isinstance(op, WaitOp) and op.started not in body:
                found = "expected dist.wait in the loop in which its collective starts, got another"
                raise VerifyException(coded("G12", found))
            users = {use.operation for v in op.results for use in v.uses}
            if isinstance(op, AccumulateOp) and not users.isdisjoint(body):
                found = "expected uses of train.accumulate after its loop, got one inside"
                raise VerifyException(coded("G12", found))
            if is_started(op) and not users <= body.keys():
                found = "expected dist.wait in the loop in which its collective starts, got none"
                raise VerifyException(coded("G12", found))


@op_definition
class EndMicrobatchesOp(Mark):
    """The end of the ops that run once for each microbatch"""

    name = "train.end_microbatches"

    def verify_(self) -> None:
        if loop_of(self) is None:
            found = "expected train.microbatches before train.end_microbatches, got none"
            raise VerifyException(coded("G12", found))


def _following(op: Operation) -> Iterator[Operation]:
    """Yield the ops after one, up to the beginning of the next loop."""
    after = op.next_op
    while after is not None and not isinstance(after, MicrobatchesOp):
        yield after
        after = after.next_op


def loop_of(op: Operation) -> MicrobatchesOp | None:
    """Return the loop that an op is in, or ends."""
    before = op.prev_op
    while before is not None and not isinstance(before, MicrobatchesOp | EndMicrobatchesOp):
        before = before.prev_op
    return before if isinstance(before, MicrobatchesOp) else None


def available_after(op: Operation) -> Operation:
    """Return the op after which the results of an op can be used: of train.accumulate the end of
    its loop, of any other itself."""
    if isinstance(op, AccumulateOp):
        loop = loop_of(op)
        end = loop.end if loop is not None else None
        return end or op
    return op


@op_definition
class MicrobatchOp(TensorOp):
    """The part of a batch that the microbatch reads: its index in dimension 0"""

    name = "train.microbatch"
    x = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x {STRATEGY}"

    @classmethod
    def infer(cls, operands: Types, props: Props) -> list[TensorType]:
        shape = operands[0].get_shape()
        if not shape:
            found = "expected a dimension of microbatches, got a scalar"
            raise ShardirError(coded("T10", found, use="stack the microbatches in dimension 0"))
        return [tensor(operands[0].element_type, shape[1:])]

    @classmethod
    def rule(cls, operands: Types, results: Types, props: Props) -> Factors:
        shape = operands[0].get_shape()
        names = factor_names(len(shape))
        return Factors.of(
            [names], [names[1:]], [shape, shape[1:]], replicate=names[:1], linear="any"
        )

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0][device.microbatch]

    def verify_(self) -> None:
        super().verify_()
        loop, count = loop_of(self), unsharded_type(self.x).get_shape()[0]
        if loop is None or loop.runs != count:
            got = "none" if loop is None else f"one over {loop.runs}"
            found = f"expected a loop over {count} microbatches around {self.name}, got {got}"
            raise VerifyException(coded("G12", found))


@op_definition
class AccumulateOp(Unary):
    """The sum over all microbatches, after the last"""

    name = "train.accumulate"
    LINEAR: ClassVar[str] = "sum"

    @classmethod
    def touched(cls, shapes: Sequence[Shape]) -> Sequence[int]:
        return [prod(shapes[0]), 2 * prod(shapes[1])]

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]

    def verify_(self) -> None:
        super().verify_()
        if loop_of(self) is None:
            raise VerifyException(coded("G12", f"expected a loop around {self.name}, got none"))


@op_definition
class CarriedOp(Unary):
    """A value that a loop over microbatches changes: x in the first"""

    name = "train.carried"
    traits = traits_def()  # not pure: each is another variable

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]


@op_definition
class CarryOp(Elementwise):
    """x, which is the value `carried` of `train.carried` from the next microbatch on"""

    name = "train.carry"
    x = operand_def(TensorType)
    carried = operand_def(TensorType)
    out = result_def(TensorType)
    assembly_format = f"$x `,` $carried {STRATEGY}"
    traits = traits_def()  # not pure: it sets a variable

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]

    def verify_(self) -> None:
        super().verify_()
        loop, owner = loop_of(self), self.carried.owner
        if loop is None or not isinstance(owner, CarriedOp) or loop_of(owner) is loop:
            found = "expected a value of train.carried from before the loop of train.carry"
            raise VerifyException(coded("G12", f"{found}, got another"))


LOOP: list[type[TensorOp]] = [MicrobatchOp, AccumulateOp, CarriedOp, CarryOp]
