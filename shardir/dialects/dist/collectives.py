"""The op of each collective: properties and text. Layouts, costs and memory are in its record
(shardir/algebra/collectives/).
"""

from abc import ABC

from xdsl.dialects.builtin import IntegerAttr, TensorType, i64
from xdsl.ir import SSAValue
from xdsl.irdl import prop_def

from shardir.algebra.mesh import Axes, Mesh
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.attributes import PairsAttr, ReductionAttr
from shardir.dialects.dist.base import (
    AsyncOp,
    CollectiveOp,
    FusibleOp,
    GroupedOp,
    HeldByOne,
    check_holder,
)
from shardir.dialects.dist.types import global_shape, layout_of

Int = IntegerAttr.constr(type=i64)

_END = "attr-dict `:` functional-type(operands, results)"
_OVER = f"`over` $axes {_END}"
_FUSIBLE = f"`over` $axes (`fusion` $fusion^)? (`async` $started^)? {_END}"

# ---- every device of a group has the same role ----


@op_definition
class AllReduceOp(FusibleOp, GroupedOp):
    """Reduces partial values; every device gets the result."""

    name = "dist.all_reduce"
    reduction = prop_def(ReductionAttr)
    assembly_format = f"$reduction $values {_FUSIBLE}"


@op_definition
class ReduceScatterOp(FusibleOp, GroupedOp):
    """Reduces partial values; each device gets its shard of the result along `dim`."""

    name = "dist.reduce_scatter"
    reduction = prop_def(ReductionAttr)
    dim = prop_def(Int)
    assembly_format = f"$reduction $values `dim` $dim {_FUSIBLE}"


@op_definition
class AllGatherOp(FusibleOp, GroupedOp):
    """Every device gets the shards along `dim` of all devices."""

    name = "dist.all_gather"
    dim = prop_def(Int)
    assembly_format = f"$values `dim` $dim {_FUSIBLE}"


@op_definition
class AllSliceOp(GroupedOp):
    """Each device keeps its shard along `dim` of a replicated value. No communication."""

    name = "dist.all_slice"
    dim = prop_def(Int)
    assembly_format = f"$values `dim` $dim {_OVER}"


@op_definition
class AllToAllOp(FusibleOp, GroupedOp):
    """Moves the split from dimension `concat` to `split`: each device sends a block to every
    other."""

    name = "dist.all_to_all"
    split = prop_def(Int)
    concat = prop_def(Int)
    assembly_format = f"$values `split` $split `concat` $concat {_FUSIBLE}"


@op_definition
class ExchangeOp(GroupedOp):
    """From any split to any other: each device fetches exactly the elements that it lacks, in one
    irregular all-to-all. `axes` split the changing dimensions of the operand."""

    name = "dist.exchange"
    assembly_format = f"$values {_OVER}"


@op_definition
class ReplicatedToPartialOp(GroupedOp):
    """A replicated value becomes partial: the first device of each group keeps it, the others
    replace it by zeros (sum) or keep it too (max, min, mean). No communication."""

    name = "dist.replicated_to_partial"
    reduction = prop_def(ReductionAttr)
    assembly_format = f"$reduction $values {_OVER}"


@op_definition
class ShardedToPartialOp(GroupedOp):
    """Each device places its shard along `dim` among zeros: a partial sum. No communication."""

    name = "dist.sharded_to_partial"
    dim = prop_def(Int)
    assembly_format = f"$values `dim` $dim {_OVER}"


@op_definition
class ReinterpretOp(CollectiveOp):
    """The data of each device, unchanged, as that of another value: one that varies over axes
    (`partial any`), or that is split, partial or replicated over them. To call a varying value
    replicated is to know that it is equal on all devices. No communication."""

    name = "dist.reinterpret"
    assembly_format = f"$values {_END}"

    def check_shapes(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        if (have.get_shape(), have.element_type) != (want.get_shape(), want.element_type):
            message = f"expected a result with the shape and elements of {have}, got {want}"
            raise ShardirError(coded("C4", message))
        for v in (value, out):
            layout = layout_of(v)
            assert layout is not None
            if not layout.even(mesh, global_shape(v.type, mesh)):
                raise ShardirError(coded("C4", f"expected shards of one size, got {v.type}"))


@op_definition
class CopyOp(AsyncOp):
    """Each device's shard moves to the memory of its host, or from there to the device."""

    name = "dist.copy"
    assembly_format = f"$values (`async` $started^)? {_END}"


# ---- some devices of a group have a role of their own, by position (row-major over the axes) ----


class _FromRoot(GroupedOp, ABC):
    """A collective whose result depends on the root's value only."""

    root = prop_def(Int)

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        check_holder(self.name, value, self.root.value.data, self.axes.data, mesh)
        return True


@op_definition
class BroadcastFromRootOp(_FromRoot):
    """Every device gets the root's value."""

    name = "dist.broadcast"
    assembly_format = f"$values `from` $root {_OVER}"


@op_definition
class GatherToRootOp(GroupedOp, HeldByOne):
    """The root gets all shards along `dim`, the other devices zeros: a partial sum."""

    name = "dist.gather"
    root = prop_def(Int)
    dim = prop_def(Int)
    assembly_format = f"$values `dim` $dim `to` $root {_OVER}"

    @property
    def holder(self) -> tuple[Axes, int]:
        return self.axes.data, self.root.value.data


@op_definition
class ScatterFromRootOp(_FromRoot):
    """Each device gets its shard along `dim` of the root's value."""

    name = "dist.scatter"
    dim = prop_def(Int)
    assembly_format = f"$values `dim` $dim `from` $root {_OVER}"


@op_definition
class PermuteOp(GroupedOp):
    """Position `pairs[2 i]` of each group sends to position `pairs[2 i + 1]`; a position that
    receives nothing gets zeros."""

    name = "dist.permute"
    pairs = prop_def(PairsAttr)
    assembly_format = f"$values `pairs` $pairs {_OVER}"

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
        message = (
            f"expected {self.name} of all partial values of [{layout}], got some left out: their "
            "cotangents would differ"
        )
        raise ShardirError(coded("G8", message, use="reduce the value first"))
