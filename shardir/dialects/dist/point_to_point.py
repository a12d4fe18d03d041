"""send and recv: from one device of each group to another. Positions in a group are row-major over
`axes`.
"""

from abc import ABC
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, operand_def, prop_def, result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.collectives import check_position
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.diagnostics import Failure, Located, coded
from shardir.dialects.blocks import of_kind
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.attributes import AxesAttr
from shardir.dialects.dist.base import HeldByOne, check_holder, mesh_of_collective
from shardir.dialects.dist.types import check_types, find_mesh, is_local, layout_of, verification


class _PointToPoint(IRDLOperation, ABC):
    """One position of each group sends to another; the other devices do nothing."""

    source = prop_def(Int.constr(type=i64))
    target = prop_def(Int.constr(type=i64))
    axes = prop_def(AxesAttr)

    @property
    def ends(self) -> tuple[int, int, Axes]:
        """The positions of sender and receiver, and the axes of their group."""
        return self.source.value.data, self.target.value.data, self.axes.data

    def check_ends(self, type: Attribute) -> None:
        check_types(self)
        source, target, axes = self.ends
        n = mesh_of_collective(self, axes, type).extent(axes)
        with verification():
            check_position(source, n)
            check_position(target, n)
        if source == target:
            message = f"expected two different positions, got {source} twice"
            raise VerifyException(coded("C9", message, use="send to another device"))


@op_definition
class SendOp(_PointToPoint):
    """The device at `from` sends its value to the one at `to`, which runs the matching recv."""

    name = "dist.send"
    value = operand_def(TensorType)
    assembly_format = "$value `from` $source `to` $target `over` $axes attr-dict `:` type($value)"

    def verify_(self) -> None:
        self.check_ends(self.value.type)


@op_definition
class RecvOp(_PointToPoint, HeldByOne):
    """The device at `to` receives a value from the device at `from`; the others have zeros. Sends
    and receives between two devices match in program order."""

    name = "dist.recv"
    out = result_def(TensorType)
    assembly_format = "`from` $source `to` $target `over` $axes attr-dict `:` type($out)"

    def verify_(self) -> None:
        self.check_ends(self.out.type)
        layout = layout_of(self.out)
        assert layout is not None
        rest = find_mesh(self, layout.mesh).without(layout.partial, self.axes.data)
        if rest is None or layout.reduction not in ("sum", "any"):
            want = f"a result that is partial sum (or any) over {axes_text(self.axes.data)}"
            raise VerifyException(coded("C3", f"expected {want}, got [{layout}]"))

    @property
    def holder(self) -> tuple[Axes, int]:
        return self.axes.data, self.target.value.data

    def check_keeps(self, sent: SSAValue, mesh: Mesh) -> None:
        """Raise ShardirError unless the global values that are sent and received are equal."""
        check_holder("dist.send", sent, self.source.value.data, self.axes.data, mesh)


def matching_sends(ops: Iterable[Operation]) -> dict[RecvOp, SendOp]:
    """Return the send of each recv. Between two devices they match in program order.

    Raises:
        Failure: a send or a recv has no match, or the local types of a match differ.
    """
    pending: dict[tuple[int, int, Axes], deque[SendOp]] = {}
    matched: dict[RecvOp, SendOp] = {}
    for op in of_kind(ops, SendOp, RecvOp):
        if isinstance(op, SendOp):
            pending.setdefault(op.ends, deque()).append(op)
        else:
            if not (queue := pending.get(op.ends)):
                message = "expected a dist.send before each dist.recv, got none: a deadlock"
                raise Failure.at(op, coded("C11", message))
            matched[op] = sent = queue.popleft()
            have, want = sent.value.type, op.out.type
            assert isinstance(have, TensorType) and isinstance(want, TensorType)
            same = (have.get_shape(), have.element_type) == (want.get_shape(), want.element_type)
            if is_local(have) and not same:
                raise Failure.at(op, coded("C11", f"expected a dist.recv of {have}, got {want}"))
    for queue in pending.values():
        for op in queue:
            message = "expected a dist.recv after each dist.send, got none"
            raise Failure.at(op, coded("C11", message))
    return matched


def check_transfers(ops: Sequence[Operation]) -> None:
    """Check that the sends and receives of a function terminate, and deliver the right values.

    All devices run one program, and a send does not wait: if each receive follows its send, no
    device waits for a later op. But between two devices values arrive in the order of the sends,
    whatever their axes.

    Raises:
        Failure: a send or a recv has no match, or the local types of a match differ, or a device
            receives from another one in another order than that of the sends.
    """
    matched = matching_sends(ops)
    if len({op.axes.data for op in matched}) < 2:  # no two groups have the same pair of devices
        return
    sent: dict[tuple[int, int], list[SendOp]] = {}
    for op in ops:
        if isinstance(op, SendOp):
            for pair in _devices(op):
                sent.setdefault(pair, []).append(op)
    errors: list[Located] = []
    for op, send in matched.items():
        for source, target in _devices(op):
            queue = sent[source, target]
            if queue[0] is not send:
                message = (
                    f"expected a dist.recv over {axes_text(queue[0].axes.data)} first: device "
                    f"{source} sends that first to device {target}, got one over "
                    f"{axes_text(op.axes.data)}"
                )
                errors.append((op, coded("C11", message, use="receive in the order of the sends")))
                break
        for pair in _devices(op):
            sent[pair].remove(send)
    if errors:
        raise Failure(errors)


def _devices(op: SendOp | RecvOp) -> Iterator[tuple[int, int]]:
    """Yield the sender and the receiver of each group."""
    source, target, axes = op.ends
    type = op.value.type if isinstance(op, SendOp) else op.out.type
    for group in mesh_of_collective(op, axes, type).groups(axes):
        if max(source, target) < len(group):  # else an error of the op
            yield group[source], group[target]
