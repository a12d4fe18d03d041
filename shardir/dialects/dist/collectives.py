"""The local view: what the devices of a group do together.

    %b = dist.all_gather %a dim 0 over <dp> : (tensor<4x8xf32, #dist.local<@m, [{dp}, {}]>>)
                                            -> tensor<8x8xf32, #dist.local<@m, [{}, {}]>>

From the layout of its operand follows that of its result (`after`), which the verifier holds
against the type.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    operand_def,
    opt_prop_def,
    prop_def,
    result_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.algebra.steps import Step
from shardir.dialects.dist.types import (
    AxesAttr,
    PairsAttr,
    ReductionAttr,
    check_types,
    find_mesh,
    global_shape,
    is_local,
    layout_of,
    type_layout,
)
from shardir.dialects.text import word


class Collective(IRDLOperation, ABC):
    """What the devices of each group of `axes` do together, or one does for itself.

    Several values in one collective travel in one flat buffer.
    """

    values = var_operand_def(TensorType)
    axes = prop_def(AxesAttr)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())

    @abstractmethod
    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        """The layout of a result, from that of its value. Raises ShardirError."""

    def check_move(self, layout: Layout, got: Layout, mesh: Mesh) -> None:
        """Raises ShardirError when a result's layout does not follow from its value's."""
        expected = self.after(layout, mesh)
        if got.simplified(mesh) != expected.simplified(mesh):
            raise ShardirError(f"[C3] the result's layout is [{expected}], not [{got}]")

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        """Whether the whole value is the same afterwards, and its cotangent that of the result.

        Raises:
            ShardirError: what comes out depends on what single devices hold of the value, so that
                the cotangents of their contributions differ.
        """
        return True

    def verify_(self) -> None:
        check_types(self)
        if len(self.values) != len(self.outs) or not self.values:
            raise VerifyException("[C1] a collective has a result for each value, and one at least")
        for value, out in zip(self.values, self.outs, strict=True):
            self._verify_one(value, out)

    def _verify_one(self, value: SSAValue, out: SSAValue) -> None:
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        if not (is_local(have) and is_local(want)):
            raise VerifyException(
                "[C2] a collective works on local values; give them a #dist.local layout"
            )
        layout, got = type_layout(have), type_layout(want)
        assert layout is not None and got is not None
        mesh = find_mesh(self, layout.mesh)
        try:
            for a in self.axes.data:
                mesh.check_axis(a)
            self.check_move(layout, got, mesh)
            self.check_whole(value, out, mesh)
        except ShardirError as e:
            raise VerifyException(str(e)) from None
        shape = global_shape(have, mesh)
        if not layout.even(mesh, shape):
            self._check_shards(layout, mesh, shape)

    def check_whole(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        """Raises ShardirError when the whole value is not what it was."""
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        shapes = global_shape(have, mesh), global_shape(want, mesh)
        if shapes[0] != shapes[1] or have.element_type != want.element_type:
            raise ShardirError(
                f"[C4] the whole value is {list(shapes[0])} of {have.element_type} before, "
                f"{list(shapes[1])} of {want.element_type} after"
            )

    def moves(self, n: int) -> Iterator[tuple[int, int]]:
        """Which positions of a group of n give their shard as it is to which others."""
        return iter(())

    def _check_shards(self, layout: Layout, mesh: Mesh, shape: Shape) -> None:
        moves = tuple(self.moves(mesh.extent(self.axes.data)))
        for group in mesh.groups(self.axes.data) if moves else ():
            shards = [layout.slices(mesh, shape, r) for r in group]
            sizes = [[s.stop - s.start for s in shard] for shard in shards]
            for source, target in moves:
                if sizes[source] != sizes[target]:
                    raise VerifyException(
                        f"[C4] rank {group[source]} holds {sizes[source]} of {list(shape)}, "
                        f"rank {group[target]} {sizes[target]}: the one does not take the "
                        "other's place"
                    )


def _drop_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    kept = mesh.without(layout.partial, axes)
    if kept is None:
        raise ShardirError(
            f"[C5] the value is partial over {axes_text(layout.partial)}, "
            f"not over {axes_text(axes)}: there is nothing to reduce"
        )
    if layout.reduction != reduction:
        raise ShardirError(
            f"[C5] the value is a partial {layout.reduction}, the collective takes the {reduction}"
        )
    return layout.with_partial(kept, layout.reduction)


def _more_partial(layout: Layout, axes: Axes, reduction: str) -> Layout:
    if layout.partial and layout.reduction != reduction:
        raise ShardirError(
            f"[C5] the value is a partial {layout.reduction} already, it can't be a partial "
            f"{reduction} as well; reduce it first"
        )
    return layout.with_partial(layout.partial + axes, reduction)


def check_dim(layout: Layout, dim: int) -> None:
    """Raises ShardirError when there is no such dimension."""
    if not 0 <= dim < len(layout.dims):
        raise ShardirError(f"[C6] no dimension {dim} in a tensor of {len(layout.dims)}")


def check_plain(layout: Layout, dim: int) -> None:
    """Raises ShardirError where a dimension is split into shards of stated sizes."""
    if sizes_of(layout.dims[dim]):
        raise ShardirError(
            f"[C13] dimension {dim} is split as {axes_text(layout.dims[dim])}; only a "
            "dist.exchange moves shards of stated sizes"
        )


def _gathered(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    check_dim(layout, dim)
    check_plain(layout, dim)
    rest = mesh.without_minor(layout.dims[dim], axes) if axes else None
    if rest is None:
        raise ShardirError(
            f"[C7] dimension {dim} is split over {axes_text(layout.dims[dim])}, "
            f"whose minor end is not {axes_text(axes)}"
        )
    return layout.with_dim(dim, rest)


def _split(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    check_dim(layout, dim)
    check_plain(layout, dim)
    for a in axes:
        if any(mesh.overlap(a, b) for b in layout.used):
            raise ShardirError(f"[C8] axis {a} is in use in the layout [{layout}]")
    return layout.with_dim(dim, layout.dims[dim] + axes)


@irdl_op_definition
class AllReduceOp(Collective):
    """Contributions become the value, on every device."""

    name = "dist.all_reduce"
    reduction = prop_def(ReductionAttr)
    fusion = opt_prop_def(Int.constr(type=i64))
    assembly_format = (
        "$reduction $values `over` $axes (`fusion` $fusion^)? attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return _drop_partial(layout, self.axes.data, self.reduction.data, mesh)


@irdl_op_definition
class ReduceScatterOp(Collective):
    """Contributions become the value, each device getting its part along `dim`."""

    name = "dist.reduce_scatter"
    reduction = prop_def(ReductionAttr)
    dim = prop_def(Int.constr(type=i64))
    fusion = opt_prop_def(Int.constr(type=i64))
    assembly_format = (
        "$reduction $values `dim` $dim `over` $axes (`fusion` $fusion^)? attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        rest = _drop_partial(layout, self.axes.data, self.reduction.data, mesh)
        return _split(rest, self.dim.value.data, self.axes.data, mesh)


class _AlongDim(Collective, ABC):
    """A move of the split of one dimension."""

    dim = prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `over` $axes attr-dict `:` functional-type(operands, results)"
    )


@irdl_op_definition
class AllGatherOp(Collective):
    """Every device gets the parts along `dim` of all devices."""

    name = "dist.all_gather"
    dim = prop_def(Int.constr(type=i64))
    fusion = opt_prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `over` $axes (`fusion` $fusion^)? attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return _gathered(layout, self.dim.value.data, self.axes.data, mesh)


@irdl_op_definition
class SliceOp(_AlongDim):
    """Each device keeps its part along `dim` of a value that it holds whole. No communication."""

    name = "dist.slice"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return _split(layout, self.dim.value.data, self.axes.data, mesh)


@irdl_op_definition
class AllToAllOp(Collective):
    """The split moves from `concat` to `split`: each device sends a part to each other one."""

    name = "dist.all_to_all"
    split = prop_def(Int.constr(type=i64))
    concat = prop_def(Int.constr(type=i64))
    fusion = opt_prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `split` $split `concat` $concat `over` $axes (`fusion` $fusion^)? attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        if self.split.value.data == self.concat.value.data:
            raise ShardirError("[C6] an all-to-all moves the split to another dimension")
        rest = _gathered(layout, self.concat.value.data, self.axes.data, mesh)
        return _split(rest, self.split.value.data, self.axes.data, mesh)


@irdl_op_definition
class ExchangeOp(Collective):
    """From any split to any other: each device fetches exactly what it lacks, in one exchange with
    the devices of its group. The axes are those that split, before it, what changes."""

    name = "dist.exchange"
    assembly_format = "$values `over` $axes attr-dict `:` functional-type(operands, results)"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return layout  # the split is what the result's type says

    def check_move(self, layout: Layout, got: Layout, mesh: Mesh) -> None:
        have, want = layout.simplified(mesh), got.simplified(mesh)
        if (have.partial, have.reduction) != (want.partial, want.reduction):
            raise ShardirError(f"[C3] the result's layout is partial as [{layout}] is, not [{got}]")
        axes = exchange_axes(have, want)
        if mesh.without(axes, self.axes.data) != ():
            raise ShardirError(
                f"[C12] this exchange goes over {axes_text(axes)}, which split what changes, "
                f"not over {axes_text(self.axes.data)}"
            )


@irdl_op_definition
class ContributeOp(Collective):
    """A complete value becomes partial: the first device of each group keeps it, the others
    contribute nothing (sum) or the same (max, min, mean). No communication."""

    name = "dist.contribute"
    reduction = prop_def(ReductionAttr)
    assembly_format = (
        "$reduction $values `over` $axes attr-dict `:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        for a in self.axes.data:
            if any(mesh.overlap(a, b) for b in layout.used):
                raise ShardirError(f"[C8] axis {a} is in use in the layout [{layout}]")
        return _more_partial(layout, self.axes.data, self.reduction.data)


@irdl_op_definition
class PadOp(_AlongDim):
    """Each device puts its part along `dim` where it belongs among zeros: a partial sum. No
    communication."""

    name = "dist.pad"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        rest = _gathered(layout, self.dim.value.data, self.axes.data, mesh)
        return _more_partial(rest, self.axes.data, "sum")


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
    made = value.owner
    if mesh.without(layout.partial, axes) is not None:
        if isinstance(made, RecvOp) and (made.axes.data, made.target.value.data) == (axes, position):
            return
        if isinstance(made, GatherOp) and (made.axes.data, made.root.value.data) == (axes, position):
            return
        if layout.reduction == "any" and position == 0:
            return
    raise ShardirError(
        f"[G8] {op} passes on what position {position} holds, of a value that is [{layout}]; the "
        f"cotangents of the others would differ over {axes_text(axes)}, which no layout says; "
        "reduce or gather the value first"
    )


@irdl_op_definition
class BroadcastOp(_Rooted):
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
class GatherOp(_Rooted):
    """The root gets all parts along `dim`, the other devices zeros: a partial sum."""

    name = "dist.gather"
    dim = prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `to` $root `over` $axes attr-dict "
        "`:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        self.check_root(mesh)
        rest = _gathered(layout, self.dim.value.data, self.axes.data, mesh)
        return _more_partial(rest, self.axes.data, "sum")


@irdl_op_definition
class ScatterOp(_Rooted):
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
        return _split(rest, self.dim.value.data, self.axes.data, mesh)

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
        """Raises ShardirError unless the whole value that arrives is the whole one that was sent."""
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


COLLECTIVES = (
    AllReduceOp, ReduceScatterOp, AllGatherOp, SliceOp, AllToAllOp, ExchangeOp, ContributeOp,
    PadOp, BroadcastOp, GatherOp, ScatterOp, PermuteOp,
)  # fmt: skip

LOCAL = (SliceOp, ContributeOp, PadOp)
"""The collectives that communicate nothing."""

FUSIBLE = (AllReduceOp, ReduceScatterOp, AllGatherOp, AllToAllOp)
"""The collectives that have a `fusion` index, and whose values travel in one buffer."""

OPS = [*COLLECTIVES, SendOp, RecvOp]


def step_op(step: Step, value: SSAValue, out: Attribute) -> Collective:
    """The op of one step of a redistribution, on a value that has the layout before it."""
    layout = layout_of(value)
    assert layout is not None
    axes: dict[str, Attribute] = {"axes": AxesAttr(step.axes)}
    reduction: dict[str, Attribute] = {}
    if layout.partial and layout.reduction != "any":
        reduction["reduction"] = word(ReductionAttr, layout.reduction)
    dim: dict[str, Attribute] = {"dim": Int(step.dim, i64)}
    kind: type[Collective]
    match step.kind:
        case "all_reduce":
            kind, props = AllReduceOp, axes | reduction
        case "reduce_scatter":
            kind, props = ReduceScatterOp, axes | reduction | dim
        case "all_gather":
            kind, props = AllGatherOp, axes | dim
        case "slice":
            kind, props = SliceOp, axes | dim
        case "pad":
            kind, props = PadOp, axes | dim
        case "all_to_all":
            ends = {"split": Int(step.dim, i64), "concat": Int(step.concat, i64)}
            kind, props = AllToAllOp, axes | ends
        case "exchange":
            kind, props = ExchangeOp, axes
        case "broadcast":
            kind, props = BroadcastOp, axes | {"root": Int(0, i64)}
        case _:
            given = {"reduction": word(ReductionAttr, step.layout.reduction)}
            kind, props = ContributeOp, axes | given
    return kind.create(operands=[value], result_types=[out], properties=props)
