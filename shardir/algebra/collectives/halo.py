"""Halo exchanges: windows of a split dimension whose elements are partly on neighbours."""

from dataclasses import replace
from math import prod
from typing import ClassVar

from shardir.algebra import forms
from shardir.algebra.collectives.base import Collective, CollectiveStep, Transfer, record
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.transitions import check_dim, check_kind, check_no_sizes
from shardir.diagnostics import ShardirError, coded


class Halo(Collective):
    """The collective between a dimension `dim` and its windows, with their elements in dimension
    `dim` + 1. The dimension and the windows are split over the same axes."""

    planned = False
    keeps_value = False
    forms = staticmethod(forms.direct)
    width: ClassVar[int]
    """The number of the operand's dimensions that take part: 1, or 2 for windows."""

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        check_dim(before, step.dim)
        check_no_sizes(before, step.dim, mesh)
        if mesh.simplify(before.dims[step.dim]) != mesh.simplify(step.axes):
            have = axes_text(before.dims[step.dim])
            found = f"expected the axes of dimension {step.dim}, {have}, got {axes_text(step.axes)}"
            raise ShardirError(coded("C12", found))
        return before

    def received(self, t: Transfer) -> int:
        assert t.step.windows is not None
        d = t.step.dim
        others = prod((*t.local[:d], *t.local[d + self.width :]))
        return t.step.windows.halo(t.n) * others

    def size(self, t: Transfer) -> float:
        return self.received(t)

    def buffers(self, t: Transfer) -> int:
        return 0


@record
class HaloUnfold(Halo):
    """The windows of a split dimension: each device fetches missing elements of its windows."""

    name = "halo_unfold"
    transposed = "halo_fold"
    result = "operand"
    width = 1

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        super().after(mesh, before, step)
        d = step.dim
        dims = (*before.dims[: d + 1], (), *before.dims[d + 1 :])
        return replace(before, dims=dims)


@record
class HaloFold(Halo):
    """Windows added onto their elements: each device sends the elements of its windows that lie on
    other devices."""

    name = "halo_fold"
    transposed = "halo_unfold"
    width = 2

    def after(self, mesh: Mesh, before: Layout, step: CollectiveStep) -> Layout:
        super().after(mesh, before, step)
        d = step.dim
        check_dim(before, d + 1)
        if before.dims[d + 1]:
            found = (
                f"expected dimension {d + 1}, the elements of a window, unsharded, got "
                f"{axes_text(before.dims[d + 1])}"
            )
            raise ShardirError(coded("C3", found, use="gather it first"))
        check_kind(before, "sum")
        dims = (*before.dims[: d + 1], *before.dims[d + 2 :])
        return replace(before, dims=dims)
