"""The local view: what the devices of a group do together.

    %b = dist.all_gather %a dim 0 over <dp> : (tensor<4x8xf32, #dist.local<@m, [{dp}, {}]>>)
                                            -> tensor<8x8xf32, #dist.local<@m, [{}, {}]>>

From the layout of its operand follows that of its result (`after`), which the verifier holds
against the type.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import IRDLOperation, prop_def, traits_def, var_operand_def, var_result_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.errors import ShardirError
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, axes_text, sizes_of
from shardir.dialects.dist.types import (
    AxesAttr,
    check_types,
    find_mesh,
    global_shape,
    is_local,
    type_layout,
)


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


def without_partial(layout: Layout, axes: Axes, reduction: str, mesh: Mesh) -> Layout:
    """A layout whose contributions over these axes are brought together. Raises ShardirError."""
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


def more_partial(layout: Layout, axes: Axes, reduction: str) -> Layout:
    """A layout that is partial over these axes too. Raises ShardirError."""
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


def gathered_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """A layout whose dimension is no longer split over these axes. Raises ShardirError."""
    check_dim(layout, dim)
    check_plain(layout, dim)
    rest = mesh.without_minor(layout.dims[dim], axes) if axes else None
    if rest is None:
        raise ShardirError(
            f"[C7] dimension {dim} is split over {axes_text(layout.dims[dim])}, "
            f"whose minor end is not {axes_text(axes)}"
        )
    return layout.with_dim(dim, rest)


def split_along(layout: Layout, dim: int, axes: Axes, mesh: Mesh) -> Layout:
    """A layout whose dimension is split over these axes too. Raises ShardirError."""
    check_dim(layout, dim)
    check_plain(layout, dim)
    for a in axes:
        if any(mesh.overlap(a, b) for b in layout.used):
            raise ShardirError(f"[C8] axis {a} is in use in the layout [{layout}]")
    return layout.with_dim(dim, layout.dims[dim] + axes)
