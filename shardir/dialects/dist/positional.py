"""What names single devices of a group, by their position in it (row-major over `axes`): broadcast,
gather and scatter, permute, send and recv.
"""

from abc import ABC
from collections import deque
from collections.abc import Iterable, Iterator

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import IRDLOperation, irdl_op_definition, operand_def, prop_def, result_def
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.dialects.dist.base import Collective, gathered_along, more_partial, split_along
from shardir.dialects.dist.types import (
    AxesAttr,
    PairsAttr,
    check_types,
    find_mesh,
    is_local,
    layout_of,
    type_layout,
)


class _Rooted(Collective, ABC):
    """A collective with a root: a position in the group, row-major over `axes`."""

    root = prop_def(Int.constr(type=i64))

    def check_root(self, mesh: Mesh) -> None:
        n = mesh.extent(self.axes.data)
        if not 0 <= self.root.value.data < n:
            raise ShardirError(f"[C9] no position {self.root.value.data} in a group of {n} devices")


def _picked(layout: Layout, axes: Axes, mesh: Mesh) -> Layout:
    """The layout of what a root holds: no longer partial over `axes`, if it was."""
    kept = mesh.without(layout.partial, axes)
    return layout if kept is None else layout.with_partial(kept, layout.reduction)


def _check_source(op: str, value: SSAValue, position: int, axes: Axes, mesh: Mesh) -> None:
    """Raises ShardirError unless what the device at `position` of each group holds is the value:
    all hold it, or it alone holds something else than zeros."""
    layout = layout_of(value)
    assert layout is not None
    if not any(mesh.overlap(a, b) for a in axes for b in layout.used):
        return
    if mesh.without(layout.partial, axes) is not None:
        match value.owner:
            case RecvOp(axes=at, target=holder) | GatherToRootOp(axes=at, root=holder):
                if (at.data, holder.value.data) == (axes, position):
                    return
        if layout.reduction == "any" and position == 0:
            return
    raise ShardirError(
        f"[G8] {op} passes on what position {position} holds, of a value that is [{layout}]; the "
        f"cotangents of the others would differ over {axes_text(axes)}, which no layout says; "
        "reduce or gather the value first"
    )


@irdl_op_definition
class BroadcastFromRootOp(_Rooted):
    """Every device gets the root's value."""

    name = "dist.broadcast"
    assembly_format = (
        "$values `from` $root `over` $axes attr-dict `:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        self.check_root(mesh)
        return _picked(layout, self.axes.data, mesh)

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        _check_source(self.name, value, self.root.value.data, self.axes.data, mesh)
        return True

    def moves(self, n: int) -> Iterator[tuple[int, int]]:
        return ((self.root.value.data, k) for k in range(n))


@irdl_op_definition
class GatherToRootOp(_Rooted):
    """The root gets all parts along `dim`, the other devices zeros: a partial sum."""

    name = "dist.gather"
    dim = prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `to` $root `over` $axes attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        self.check_root(mesh)
        rest = gathered_along(layout, self.dim.value.data, self.axes.data, mesh)
        return more_partial(rest, self.axes.data, "sum")


@irdl_op_definition
class ScatterFromRootOp(_Rooted):
    """Each device gets its part along `dim` of the root's value."""

    name = "dist.scatter"
    dim = prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `from` $root `over` $axes attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        self.check_root(mesh)
        rest = _picked(layout, self.axes.data, mesh)
        return split_along(rest, self.dim.value.data, self.axes.data, mesh)

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        _check_source(self.name, value, self.root.value.data, self.axes.data, mesh)
        return True


@irdl_op_definition
class PermuteOp(Collective):
    """Position `pairs[2 i]` of each group sends to position `pairs[2 i + 1]`; who receives
    nothing gets zeros."""

    name = "dist.permute"
    pairs = prop_def(PairsAttr)
    assembly_format = (
        "$values `pairs` $pairs `over` $axes attr-dict `:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        pairs, n = self.pairs.data, mesh.extent(self.axes.data)
        if len(pairs) % 2 or any(not 0 <= p < n for p in pairs):
            raise ShardirError(f"[C9] pairs of positions from 0 to {n - 1} are wanted")
        for side, verb in ((pairs[::2], "sends"), (pairs[1::2], "receives")):
            if len(set(side)) != len(side):
                raise ShardirError(f"[C10] a position {verb} twice")
        alike = [a for a in self.axes.data if not any(mesh.overlap(a, b) for b in layout.used)]
        zeros = sorted(set(range(n)) - set(pairs[1::2]))
        if zeros and mesh.extent(tuple(alike)) > 1:
            raise ShardirError(
                f"[C3] the value is the same over {axes_text(tuple(alike))}, afterwards it is not: "
                f"position {zeros[0]} receives nothing and has zeros; let each receive something"
            )
        return layout

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        layout, axes = layout_of(value), self.axes.data
        assert layout is not None
        if not any(mesh.overlap(a, b) for a in axes for b in layout.used):
            return True
        if not any(mesh.overlap(a, b) for a in axes for b in layout.partial):
            return False
        everywhere = len(self.pairs.data) == 2 * mesh.extent(axes)
        if everywhere and mesh.without(layout.partial, axes) is not None:
            return True
        raise ShardirError(
            f"[G8] {self.name} takes contributions of a value that is [{layout}] to other devices, "
            "and leaves some out; the cotangents of the contributions would differ, which no "
            "layout says; reduce the value first"
        )

    def reversed(self, value: SSAValue) -> "PermuteOp":
        """The permute of a value back to where the operands of this one were."""
        pairs = tuple(n for source, target in self.source_target() for n in (target, source))
        return PermuteOp.create(
            operands=[value], result_types=[value.type],
            properties={"axes": self.axes, "pairs": PairsAttr(pairs)}, location=self.location,
        )  # fmt: skip

    def moves(self, n: int) -> Iterator[tuple[int, int]]:
        return self.source_target()

    def source_target(self) -> Iterator[tuple[int, int]]:
        return zip(self.pairs.data[::2], self.pairs.data[1::2], strict=True)


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
class RecvOp(_PointToPoint):
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

    def check_keeps(self, sent: SSAValue, mesh: Mesh) -> None:
        """Raises ShardirError unless the whole value that arrives is that which was sent."""
        _check_source("dist.send", sent, self.source.value.data, self.axes.data, mesh)


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
