"""Windows of a split dimension, in the local view: each device gets the rows of its windows that
others hold, and no more (a halo exchange); and back, added to whose they are.

    %w = dist.halo_unfold %x dim 0 step 2 offset -1 over <d>
           : (tensor<4x6xf32, #dist.local<@m, [{d}, {}]>>)
           -> tensor<2x3x6xf32, #dist.local<@m, [{d}, {}, {}]>>
"""

from abc import ABC, abstractmethod

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import TensorType, UnitAttr, i64
from xdsl.ir import SSAValue
from xdsl.irdl import irdl_op_definition, opt_prop_def, prop_def

from shardir.algebra.mesh import Mesh
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError
from shardir.dialects.dist.base import CollectiveOp
from shardir.dialects.dist.types import global_shape


class HaloOp(CollectiveOp, ABC):
    """A dimension of rows on one side; on the other `dim`, the windows, and `dim` + 1, the rows of
    each. Rows and windows are split over the same axes."""

    dim = prop_def(Int.constr(type=i64))
    step = prop_def(Int.constr(type=i64))
    offset = prop_def(Int.constr(type=i64))

    @abstractmethod
    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        """Which of the two has the rows, and which the windows."""

    def windows(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> Windows:
        rows, cut = (global_shape(_tensor(v), mesh) for v in self.ends(value, out))
        d = self.dim.value.data
        return Windows(rows[d], cut[d], cut[d + 1], self.step.value.data, self.offset.value.data)

    def check_shapes(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        d = self.dim.value.data
        rows, cut = (global_shape(_tensor(v), mesh) for v in self.ends(value, out))
        if self.step.value.data < 1:
            raise ShardirError("[T10] a step of windows is at least 1")
        alike = _tensor(value).element_type == _tensor(out).element_type
        if not alike or rows[:d] + rows[d + 1 :] != cut[:d] + cut[d + 2 :]:
            raise ShardirError(
                f"[C4] the whole values are {list(rows)} and {list(cut)}: windows of dimension {d} "
                "keep the other dimensions and the element type"
            )


@irdl_op_definition
class HaloUnfoldOp(HaloOp):
    """The windows of a split dimension: each device fetches the rows of its windows that it lacks.
    Rows outside of the dimension are zeros, or the `lowest` number."""

    name = "dist.halo_unfold"
    lowest = opt_prop_def(UnitAttr)
    assembly_format = (
        "$values `dim` $dim `step` $step `offset` $offset (`lowest` $lowest^)? `over` $axes "
        "attr-dict `:` functional-type(operands, results)"
    )

    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        return value, out


@irdl_op_definition
class HaloFoldOp(HaloOp):
    """Windows laid where their rows are, and added: each device sends the rows of its windows that
    others hold. Rows outside of the dimension are dropped."""

    name = "dist.halo_fold"
    assembly_format = (
        "$values `dim` $dim `step` $step `offset` $offset `over` $axes "
        "attr-dict `:` functional-type(operands, results)"
    )

    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        return out, value


def _tensor(v: SSAValue) -> TensorType:
    assert isinstance(v.type, TensorType)
    return v.type
