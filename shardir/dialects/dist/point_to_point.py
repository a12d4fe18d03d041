"""Messages from one device of each group to another, by their positions in it (row-major over
`axes`): send and recv.
"""

from abc import ABC
from collections import deque
from collections.abc import Iterable

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, prop_def, result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.diagnostics import ShardirError
from shardir.dialects.dist.base import HeldByOne, check_holder
from shardir.dialects.dist.types import (
    AxesAttr,
    check_types,
    find_mesh,
    is_local,
    layout_of,
    type_layout,
)


class _PointToPoint(IRDLOperation, ABC):
    """One position of each group sends to another; the other devices take no part."""

    source = prop_def(Int.constr(type=i64))
    target = prop_def(Int.constr(type=i64))
    axes = prop_def(AxesAttr)

    def check_ends(self, type: Attribute) -> None:
        check_types(self)
        layout = type_layout(type)
        if layout is None or not is_local(type):
            raise VerifyException(
                "[C2] a collective works on local values; give them a #dist.local layout"
            )
        mesh = find_mesh(self, layout.mesh)
        try:
            for a in self.axes.data:
                mesh.check_axis(a)
        except ShardirError as e:
            raise VerifyException(str(e)) from None
        n = mesh.extent(self.axes.data)
        for p in (self.source.value.data, self.target.value.data):
            if not 0 <= p < n:
                raise VerifyException(f"[C9] no position {p} in a group of {n} devices")
        if self.source.value.data == self.target.value.data:
            raise VerifyException("[C9] a device does not send to itself")


@irdl_op_definition
class SendOp(_PointToPoint):
    """The device at `from` sends its value to the one at `to`, which runs the matching recv."""

    name = "dist.send"
    value = operand_def(TensorType)
    assembly_format = "$value `from` $source `to` $target `over` $axes attr-dict `:` type($value)"

    def verify_(self) -> None:
        self.check_ends(self.value.type)


@irdl_op_definition
class RecvOp(_PointToPoint, HeldByOne):
    """The device at `to` gets what the one at `from` sent; the others have zeros. Sends and
    receives between the same two devices match in program order."""

    name = "dist.recv"
    out = result_def(TensorType)
    assembly_format = "`from` $source `to` $target `over` $axes attr-dict `:` type($out)"

    def verify_(self) -> None:
        self.check_ends(self.out.type)
        layout = layout_of(self.out)
        assert layout is not None
        found = find_mesh(self, layout.mesh).without(layout.partial, self.axes.data)
        if found is None or layout.reduction not in ("sum", "any"):
            raise VerifyException(
                f"[C3] what is received differs over {axes_text(self.axes.data)}: "
                f"its layout is partial sum (or any) over them"
            )

    @property
    def holder(self) -> tuple[Axes, int]:
        return self.axes.data, self.target.value.data

    def check_keeps(self, sent: SSAValue, mesh: Mesh) -> None:
        """Raises ShardirError unless the whole value that arrives is that which was sent."""
        check_holder("dist.send", sent, self.source.value.data, self.axes.data, mesh)


def mail(ops: Iterable[Operation]) -> dict[RecvOp, SendOp]:
    """The send of each recv: those between the same two devices match in order."""
    waiting: dict[tuple[int, int, Axes], deque[SendOp]] = {}
    found: dict[RecvOp, SendOp] = {}
    for op in ops:
        if isinstance(op, SendOp | RecvOp):
            ends = op.source.value.data, op.target.value.data, op.axes.data
            queue = waiting.setdefault(ends, deque())
            if isinstance(op, SendOp):
                queue.append(op)
            elif queue:
                found[op] = queue.popleft()
    return found
