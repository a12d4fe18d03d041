"""Loops: two marks around the ops that run several times, and the values carried between runs.

    %s = train.carried %s0                     a state, before the first run
    train.microbatches 4                       the ops up to the end run four times
    %s2 = ...
    %s1 = train.carry %s2, %s                  %s of the next run
    train.end_microbatches

After the end, a value of the loop is its value in the last run.
"""

from abc import ABC
from collections.abc import Iterator
from typing import ClassVar

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import Operation, SSAValue
from xdsl.irdl import operand_def, prop_def, result_def, traits_def
from xdsl.utils.exceptions import VerifyException

from shardir.diagnostics import coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist import HandsOn
from shardir.dialects.nn.base import STRATEGY, Array, Device
from shardir.dialects.nn.elementwise import Elementwise, Unary
from shardir.dialects.train.requests import Mark


class Loop(Mark, ABC):
    """The beginning of ops that run several times."""

    count = prop_def(IntegerAttr.constr(type=i64))
    assembly_format = "$count attr-dict"
    END: ClassVar[type["EndLoop"]]

    @property
    def runs(self) -> int:
        """The number of runs of the loop's ops."""
        return self.count.value.data

    @property
    def end(self) -> "EndLoop | None":
        """The end of the loop; None if the function ends first."""
        depth = 0
        op = self.next_op
        while op is not None:
            if isinstance(op, EndLoop):
                if depth == 0:
                    return op if isinstance(op, self.END) else None
                depth -= 1
            depth += isinstance(op, Loop)
            op = op.next_op
        return None

    def body(self) -> Iterator[Operation]:
        """Yield the ops of the loop, without its marks."""
        end, op = self.end, self.next_op
        while op is not end and op is not None:
            yield op
            op = op.next_op

    def verify_(self) -> None:
        if self.runs < 1:
            raise VerifyException(coded("G10", f"expected 1 run or more, got {self.runs}"))
        if self.end is None:
            message = f"expected {self.END.name} after {self.name}, got none"
            raise VerifyException(coded("G12", message))
        body, carried = dict.fromkeys(self.body()), set[SSAValue]()
        for op in body:
            if not carried.isdisjoint(op.operands):
                message = f"expected no use of a value that train.carry has set, got {op.name}"
                raise VerifyException(coded("G12", message))
            if isinstance(op, CarryOp):
                carried.add(op.carried)
            if isinstance(op, AfterLoop) and loop_of(op) is self:
                users = {use.operation for v in op.results for use in v.uses}
                if not users.isdisjoint(body):
                    message = f"expected uses of {op.name} after its loop, got one inside"
                    raise VerifyException(coded("G12", message))


class EndLoop(Mark, ABC):
    """The end of a loop."""

    def verify_(self) -> None:
        if (loop := loop_of(self)) is None or not isinstance(self, loop.END):
            raise VerifyException(
                coded("G12", f"expected the beginning of a loop before {self.name}, got none")
            )


class AfterLoop(HandsOn, ABC):
    """An op in a loop whose results are available after the loop only."""


def loop_of(op: Operation) -> Loop | None:
    """Return the innermost loop that contains an op, or that it ends."""
    depth, before = 0, op.prev_op
    while before is not None:
        if isinstance(before, Loop):
            if depth == 0:
                return before
            depth -= 1
        depth += isinstance(before, EndLoop)
        before = before.prev_op
    return None


def available_after(op: Operation) -> Operation:
    """Return the op after which the results of an op are available: the end of the loop for
    `AfterLoop`, else the op itself."""
    if isinstance(op, AfterLoop):
        loop = loop_of(op)
        end = loop.end if loop is not None else None
        return end or op
    return op


@op_definition
class CarriedOp(Unary, HandsOn):
    """A variable of a loop, with the value x in the first run"""

    name = "train.carried"
    LINEAR: ClassVar[str] = "any"
    traits = traits_def()  # not pure: each is another variable

    def evaluate(self, device: Device, *arrays: Array) -> Array:
        return arrays[0]


@op_definition
class CarryOp(Elementwise, HandsOn):
    """x, which becomes the value of the variable `carried` (`train.carried`) in the next run"""

    name = "train.carry"
    LINEAR: ClassVar[str] = "any"
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
            message = "expected a value of train.carried from before the loop of train.carry"
            raise VerifyException(coded("G12", f"{message}, got another"))
