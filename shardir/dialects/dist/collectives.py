"""The collectives of the local view in which all devices of a group do the same; and the tables of
all of them. See base.py for what they have in common, windows.py for the exchange of halos.
"""

from abc import ABC

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.steps import Step
from shardir.dialects.dist.base import (
    Collective,
    gathered_along,
    more_partial,
    split_along,
    without_partial,
)
from shardir.dialects.dist.positional import (
    BroadcastFromRootOp,
    GatherToRootOp,
    PermuteOp,
    RecvOp,
    ScatterFromRootOp,
    SendOp,
)
from shardir.dialects.dist.types import AxesAttr, ReductionAttr, layout_of
from shardir.dialects.text import word


class FusibleOp(Collective, ABC):
    """A collective whose values travel in one flat buffer. `fusion` asks for one buffer of all that
    have the same index. An `async` one is started, and under way while its device goes on: what it
    gives is there behind the `dist.wait` that takes it."""

    fusion = opt_prop_def(Int.constr(type=i64))
    started = opt_prop_def(UnitAttr)

    def verify_(self) -> None:
        super().verify_()
        users = {u.operation for v in self.outs for u in v.uses}
        if self.started is not None and not (len(users) == 1 and _waits_for(users.pop(), self)):
            raise VerifyException(
                f"[C14] what an async {self.name} gives is not there yet: one dist.wait takes all "
                "of its results, in their order, and nothing else uses them"
            )


def _waits_for(op: Operation, started: FusibleOp) -> bool:
    return isinstance(op, WaitOp) and tuple(op.values) == tuple(started.outs)


_TAIL = (
    "`over` $axes (`fusion` $fusion^)? (`async` $started^)? attr-dict "
    "`:` functional-type(operands, results)"
)


@irdl_op_definition
class WaitOp(IRDLOperation):
    """What an `async` collective gives, once it is there."""

    name = "dist.wait"
    values = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$values attr-dict `:` functional-type(operands, results)"

    @property
    def started(self) -> FusibleOp:
        """The collective that it waits for."""
        (op,) = {v.owner for v in self.values}
        assert isinstance(op, FusibleOp)
        return op

    def verify_(self) -> None:
        if not self.values:
            raise VerifyException("[C15] a dist.wait takes what an async collective gives")
        for v in self.values:
            if not (isinstance(v.owner, FusibleOp) and v.owner.started is not None):
                raise VerifyException(
                    "[C15] a dist.wait takes what an async collective gives; leave it out, or say "
                    "`async` behind the collective's axes"
                )
        if [v.type for v in self.values] != [v.type for v in self.outs]:
            raise VerifyException("[C15] what a dist.wait gives has the types of what it takes")


@irdl_op_definition
class AllReduceOp(FusibleOp):
    """Contributions become the value, on every device."""

    name = "dist.all_reduce"
    reduction = prop_def(ReductionAttr)
    assembly_format = f"$reduction $values {_TAIL}"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return without_partial(layout, self.axes.data, self.reduction.data, mesh)


@irdl_op_definition
class ReduceScatterOp(FusibleOp):
    """Contributions become the value, each device getting its part along `dim`."""

    name = "dist.reduce_scatter"
    reduction = prop_def(ReductionAttr)
    dim = prop_def(Int.constr(type=i64))
    assembly_format = f"$reduction $values `dim` $dim {_TAIL}"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        rest = without_partial(layout, self.axes.data, self.reduction.data, mesh)
        return split_along(rest, self.dim.value.data, self.axes.data, mesh)


class _AlongDim(Collective, ABC):
    """A move of the split of one dimension."""

    dim = prop_def(Int.constr(type=i64))
    assembly_format = (
        "$values `dim` $dim `over` $axes attr-dict `:` functional-type(operands, results)"
    )


@irdl_op_definition
class AllGatherOp(FusibleOp):
    """Every device gets the parts along `dim` of all devices."""

    name = "dist.all_gather"
    dim = prop_def(Int.constr(type=i64))
    assembly_format = f"$values `dim` $dim {_TAIL}"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return gathered_along(layout, self.dim.value.data, self.axes.data, mesh)


@irdl_op_definition
class AllSliceOp(_AlongDim):
    """Each device keeps its part along `dim` of a value that it holds whole. No communication."""

    name = "dist.all_slice"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        return split_along(layout, self.dim.value.data, self.axes.data, mesh)


@irdl_op_definition
class AllToAllOp(FusibleOp):
    """The split moves from `concat` to `split`: each device sends a part to each other one."""

    name = "dist.all_to_all"
    split = prop_def(Int.constr(type=i64))
    concat = prop_def(Int.constr(type=i64))
    assembly_format = f"$values `split` $split `concat` $concat {_TAIL}"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        if self.split.value.data == self.concat.value.data:
            raise ShardirError("[C6] an all-to-all moves the split to another dimension")
        rest = gathered_along(layout, self.concat.value.data, self.axes.data, mesh)
        return split_along(rest, self.split.value.data, self.axes.data, mesh)


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
class ReplicatedToPartialOp(Collective):
    """A complete value becomes partial: the first device of each group keeps it, the others
    contribute nothing (sum) or the same (max, min, mean). No communication."""

    name = "dist.replicated_to_partial"
    reduction = prop_def(ReductionAttr)
    assembly_format = (
        "$reduction $values `over` $axes attr-dict `:` functional-type(operands, results)"
    )

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        for a in self.axes.data:
            if any(mesh.overlap(a, b) for b in layout.used):
                raise ShardirError(f"[C8] axis {a} is in use in the layout [{layout}]")
        return more_partial(layout, self.axes.data, self.reduction.data)


@irdl_op_definition
class ShardedToPartialOp(_AlongDim):
    """Each device puts its part along `dim` where it belongs among zeros: a partial sum. No
    communication."""

    name = "dist.sharded_to_partial"

    def after(self, layout: Layout, mesh: Mesh) -> Layout:
        rest = gathered_along(layout, self.dim.value.data, self.axes.data, mesh)
        return more_partial(rest, self.axes.data, "sum")


COLLECTIVES = (
    AllReduceOp, ReduceScatterOp, AllGatherOp, AllSliceOp, AllToAllOp, ExchangeOp,
    ReplicatedToPartialOp, ShardedToPartialOp, BroadcastFromRootOp, GatherToRootOp,
    ScatterFromRootOp, PermuteOp,
)  # fmt: skip

LOCAL = (AllSliceOp, ReplicatedToPartialOp, ShardedToPartialOp)
"""The collectives that communicate nothing."""

STEPS = (FusibleOp, ExchangeOp)
"""The collectives that are steps of a redistribution."""

OPS = [*COLLECTIVES, WaitOp, SendOp, RecvOp]


def is_started(op: Operation) -> bool:
    """Whether an op is a collective that somebody waits for."""
    return isinstance(op, FusibleOp) and op.started is not None


def step_of(op: Collective, out: SSAValue) -> Step:
    """The step of a redistribution that an op takes for one of its results."""
    layout = layout_of(out)
    assert layout is not None
    match op:
        case ReduceScatterOp() | AllGatherOp():
            dim, concat = op.dim.value.data, -1
        case AllToAllOp():
            dim, concat = op.split.value.data, op.concat.value.data
        case _:
            dim = concat = -1
    return Step(op.name.removeprefix("dist."), op.axes.data, layout, dim, concat)


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
        case "all_slice":
            kind, props = AllSliceOp, axes | dim
        case "sharded_to_partial":
            kind, props = ShardedToPartialOp, axes | dim
        case "all_to_all":
            ends = {"split": Int(step.dim, i64), "concat": Int(step.concat, i64)}
            kind, props = AllToAllOp, axes | ends
        case "exchange":
            kind, props = ExchangeOp, axes
        case "broadcast":
            kind, props = BroadcastFromRootOp, axes | {"root": Int(0, i64)}
        case _:
            given = {"reduction": word(ReductionAttr, step.layout.reduction)}
            kind, props = ReplicatedToPartialOp, axes | given
    return kind.create(operands=[value], result_types=[out], properties=props)
