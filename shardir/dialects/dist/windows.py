"""Halo exchanges: each device fetches exactly the elements of its windows that it lacks. The
transpose adds windows back onto their elements.

    %w = dist.halo_unfold %x dim 0 step 2 offset -1 over <d>
           : (tensor<4x6xf32, #dist.local<@m, [{d}, {}]>>)
           -> tensor<2x3x6xf32, #dist.local<@m, [{d}, {}, {}]>>
"""

from abc import ABC, abstractmethod
from dataclasses import replace

from xdsl.dialects.builtin import IntegerAttr as Int
from xdsl.dialects.builtin import UnitAttr, i64
from xdsl.ir import Attribute, SSAValue
from xdsl.irdl import opt_prop_def, prop_def

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.mesh import Mesh
from shardir.algebra.windows import Windows
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import op_definition
from shardir.dialects.dist.base import GroupedOp
from shardir.dialects.dist.types import global_shape, global_type


class HaloOp(GroupedOp, ABC):
    """An op between a value with a dimension `dim`, and a value with its windows in `dim` and their
    elements in `dim` + 1. The dimension and its windows are split over the same axes."""

    dim = prop_def(Int.constr(type=i64))
    step = prop_def(Int.constr(type=i64))
    offset = prop_def(Int.constr(type=i64))

    @abstractmethod
    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        """Return the value with the dimension, then the value with its windows."""

    def windows(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> Windows:
        x, cut = (global_shape(v.type, mesh) for v in self.ends(value, out))
        d = self.dim.value.data
        return Windows(x[d], cut[d], cut[d + 1], self.step.value.data, self.offset.value.data)

    def step_for(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> CollectiveStep:
        return replace(self.as_step(out), windows=self.windows(value, out, mesh))

    @classmethod
    def properties_of(cls, step: CollectiveStep) -> dict[str, Attribute]:
        w = step.windows
        assert w is not None
        window = {"step": Int(w.step, i64), "offset": Int(w.offset, i64)}
        return {**super().properties_of(step), **window}

    def check_shapes(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        d, step = self.dim.value.data, self.step.value.data
        x, cut = (global_type(v.type, mesh) for v in self.ends(value, out))
        if step < 1:
            raise ShardirError(coded("T10", f"expected a step of at least 1, got {step}"))
        have, want = x.get_shape(), cut.get_shape()
        unchanged = have[:d] + have[d + 1 :], want[:d] + want[d + 2 :]
        if x.element_type != cut.element_type or unchanged[0] != unchanged[1]:
            message = (
                f"expected windows of {x} with two dimensions instead of dimension {d}, got {cut}"
            )
            raise ShardirError(coded("C4", message))


@op_definition
class HaloUnfoldOp(HaloOp):
    """The windows of a split dimension: each device fetches the missing elements of its windows.
    Elements outside of the dimension are zeros, or the `lowest` number."""

    name = "dist.halo_unfold"
    lowest = opt_prop_def(UnitAttr)
    assembly_format = (
        "$values `dim` $dim `step` $step `offset` $offset (`lowest` $lowest^)? `over` $axes "
        "attr-dict `:` functional-type(operands, results)"
    )

    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        return value, out


@op_definition
class HaloFoldOp(HaloOp):
    """Adds windows onto their elements: each device sends the elements that other devices own.
    Elements outside of the dimension are dropped."""

    name = "dist.halo_fold"
    assembly_format = (
        "$values `dim` $dim `step` $step `offset` $offset `over` $axes "
        "attr-dict `:` functional-type(operands, results)"
    )

    def ends(self, value: SSAValue, out: SSAValue) -> tuple[SSAValue, SSAValue]:
        return out, value
