"""Bodies of manual computations: functions of the local view, built value by value.

A value of a body varies over the axes along which devices may have different numbers
(`partial any`), and so does the result of an op on it. While a body is built, its values have the
shapes of the local view, and layouts; `finish` gives them local types.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.build import Value, nn
from shardir.build.attributes import element_type
from shardir.compat.xdsl import set_type
from shardir.dialects import dist
from shardir.dialects.nn import ConvertOp, IotaOp
from shardir.dialects.nn.base import Array, TensorOp
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.frontends.stablehlo.bounds import IndexBounds
from shardir.frontends.stablehlo.folding import FoldingBuilder, known
from shardir.interpret.evaluator import GlobalView
from shardir.interpret.values import round_to_element
from shardir.rewriting.free_axes import FreeDimensions
from shardir.rewriting.lowering import lift, lower
from shardir.rewriting.rewriter import Rewriter

MAX_DEVICES = 1024
"""Bounds the devices for each of which a scalar is computed at import."""


class ManualBuilder(FoldingBuilder):
    """The body of a manual computation: its values may vary over manual axes, and are equal along
    free ones."""

    mesh: Mesh

    def on(
        self, mesh: Mesh, bounds: dict[SSAValue, IndexBounds | None],
        device_ids: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Set the mesh.

        Args:
            bounds: of integers, to which the builder adds those of indices of devices.
            device_ids: the device at each place of the mesh, where it is not the place.
        """
        self.mesh, self._bounds = mesh, bounds
        self.wanted: list[tuple[SSAValue, tuple[Axes, ...]]] = []
        """Values with the free axes that constraints ask for."""
        self.device_ids = [*range(mesh.size)] if device_ids is None else [*device_ids]
        self._rewriter = Rewriter(mesh, self.block)
        self._indices: dict[tuple[Axes, str], Value] = {}
        self._numbers: dict[SSAValue, Array] = {}

    def place(self, device: int) -> int:
        """Return the rank of a device: its place on the mesh. Raises ValueError without one."""
        return self.device_ids.index(device)

    # ---- borders ----

    def shard(self, name: str, shape: Shape, dtype: str, layout: Layout) -> Value:
        """Add an argument, a shard of a value; return it as a value that varies over its axes."""
        local = self.input(name, layout.local_shape(self.mesh, shape), dtype)
        set_type(local.ssa, dist.local(element_type(dtype), shape, layout, self.mesh))
        return self._reinterpret(local.ssa, self._varying(local.shape, layout.used))

    def assemble(self, x: Value, layout: Layout) -> Value:
        """Return a value as the shard of a result."""
        return self._reinterpret(x.ssa, layout)

    def enter(self, x: Value, layout: Layout) -> Value:
        """Return the device's shard of a value, in a manual computation over further axes."""
        for d, axes in enumerate(layout.dims):
            if axes:
                split = self._layout(x).with_dim(d, axes)
                ssa = x.ssa
                x = self._collective(dist.AllSliceOp, ssa, split, x.shape, axes=axes, dim=d)
                x = self._reinterpret(
                    x.ssa,
                    self._varying(
                        split.local_shape(self.mesh, x.shape),
                        self.mesh.union(split.varying, axes),
                    ),
                )
        return x

    def leave(self, x: Value, layout: Layout, manual: Sequence[str]) -> Value:
        """Return the whole of a value, of which devices have shards in a manual computation over
        further axes."""
        rest = tuple(a for a in self.varies_over(x) if a.name not in manual)
        parts = Layout(self.mesh.name, layout.dims).with_partial(rest, "any")
        x = self._reinterpret(x.ssa, parts)
        for d, axes in enumerate(layout.dims):
            if axes:
                parts = self._layout(x)
                whole, shape = parts.with_dim(d, ()), parts.global_shape(self.mesh, x.shape)
                x = self._collective(dist.AllGatherOp, x.ssa, whole, shape, axes=axes, dim=d)
        return x

    def _layout(self, x: Value) -> Layout:
        return dist.layout_of(x.ssa) or self._varying(x.shape, ())

    def free_dimensions(self) -> FreeDimensions:
        """Return the dimensions that free axes may split."""
        lift(self.block, self.mesh)
        return FreeDimensions(self.block, self.mesh)

    def finish(self) -> None:
        """Give all values their local types."""
        lower(self.block, self.mesh)

    # ---- values that vary ----

    def varies_over(self, x: Value) -> Axes:
        """Return the axes over which a value varies."""
        layout = dist.layout_of(x.ssa)
        return () if layout is None else layout.varying

    def _vary(self, x: Value, axes: Axes) -> Value:
        """Return a value as one that varies over more axes."""
        axes = self.mesh.union(self.varies_over(x), axes)
        return self._reinterpret(x.ssa, self._varying(x.shape, axes))

    def _varying(self, shape: Shape, axes: Axes) -> Layout:
        axes = self.mesh.union(axes, ())
        return Layout(self.mesh.name, ((),) * len(shape)).with_partial(axes, "any")

    def _without(self, x: Value, axes: Axes) -> Layout:
        """Return the layout of a value that varies, without some of its axes."""
        rest = self.mesh.without(self.varies_over(x), axes)
        assert rest is not None
        return self._varying(x.shape, rest)

    def _reinterpret(self, ssa: SSAValue, layout: Layout) -> Value:
        if dist.layout_of(ssa) == layout:
            return Value(self, ssa)
        t = ssa.type
        assert isinstance(t, TensorType)
        shape = layout.global_shape(self.mesh, t.get_shape())
        return self._collective(dist.ReinterpretOp, ssa, layout, shape)

    def _collective(
        self, kind: type[dist.CollectiveOp], ssa: SSAValue, layout: Layout, shape: Shape,
        **parameters: Any,
    ) -> Value:  # fmt: skip
        """Add a collective whose result has a layout and a global shape."""
        name = kind.name.removeprefix("dist.")
        step = CollectiveStep(name, parameters.pop("axes", ()), layout, **parameters)
        t = ssa.type
        assert isinstance(t, TensorType)
        op = kind.create(
            operands=[ssa], result_types=[dist.local(t.element_type, shape, layout, self.mesh)],
            properties=kind.properties_of(step), location=self.location(),
        )  # fmt: skip
        op.results[0].name_hint = ssa.name_hint if kind is dist.ReinterpretOp else name
        self.block.add_op(op)
        return Value(self, op.results[0])

    # ---- numbers of devices ----

    def index(self, axes: Axes, dtype: str) -> Value:
        """Return the index of the device along axes, a scalar."""
        if (axes, dtype) not in self._indices:
            n, element = self.mesh.extent(axes), element_type(dtype)
            layout = Layout(self.mesh.name, (axes,))
            ids = IotaOp.create(
                result_types=[dist.local(element, (n,), layout, self.mesh)],
                properties={"dim": int_attr(0)}, location=self.location(),
            )  # fmt: skip
            ids.out.name_hint = "index"
            self.block.add_op(ids)
            number = nn.reshape(self._reinterpret(ids.out, self._varying((1,), axes)), shape=())
            self._indices[axes, dtype] = number
            ranks = range(self.mesh.size)
            self._numbers[number.ssa] = np.array([self.mesh.index(r, axes) for r in ranks])
            self._bounds[number.ssa] = 0, n - 1
        return self._indices[axes, dtype]

    def device_id(self, dtype: str) -> Value:
        """Return the number of the device, a scalar."""
        rank = self.index(self.mesh.names, dtype)
        if self.device_ids == [*range(self.mesh.size)]:
            return rank
        return nn.gather(self.constant(self.device_ids, dtype=dtype), rank, axis=0)

    def op(self, kind: type[TensorOp], operands: Sequence[Value], *args: Any, **options: Any):
        """Add an op. A scalar integer that follows from the number of the device depends on the
        axes along which it differs: `partition_id / 4 % 2` is the index along one of them."""
        results = super().op(kind, operands, *args, **options)
        op, out = results[0].ssa.owner, results[0]
        if not isinstance(op, TensorOp) or not op.operands or out.shape or len(results) > 1:
            return results
        if (numbers := self._on_each_device(op)) is None:
            return results
        self._numbers[out.ssa] = numbers
        if out.dtype not in ("i32", "i64"):
            return results
        self._bounds[out.ssa] = int(numbers.min()), int(numbers.max())
        sizes = [n for _, n in self.mesh.axes]
        table = numbers.reshape(sizes)
        axes = tuple(
            a for d, a in enumerate(self.mesh.names)
            if sizes[d] > 1 and (table != table.take([0], axis=d)).any()
        )  # fmt: skip
        index = self.index(axes, out.dtype) if axes else None
        if index is not None and np.array_equal(self._numbers[index.ssa], numbers):
            return (index,)
        return results

    def _on_each_device(self, op: TensorOp) -> Array | None:
        """Return the scalar result of an op on each device, if its operands are known there."""
        inputs = [self._numbers_of(v) for v in op.operands]
        arrays = [x for x in inputs if x is not None]
        if len(arrays) < len(inputs) or self.mesh.size > MAX_DEVICES:
            return None
        rows = zip(*(np.broadcast_to(x, self.mesh.size) for x in arrays), strict=True)
        return np.array([op.evaluate(GlobalView(), *row) for row in rows])

    def _numbers_of(self, v: SSAValue) -> Array | None:
        """Return the number of a scalar on each device, or on all; None if it is not known."""
        if isinstance(v.owner, ConvertOp):
            numbers, element = self._numbers_of(v.owner.x), unsharded_type(v).element_type
            return None if numbers is None else round_to_element(numbers, element)
        constant = known(v)
        return constant if constant is not None and not constant.ndim else self._numbers.get(v)

    # ---- collectives ----

    def all_reduce(self, x: Value, reduction: str, axes: Axes) -> Value:
        """Return the reduction of the values of each group."""
        x = self._vary(x, axes)
        layout = self._without(x, axes)
        return self._collective(
            dist.AllReduceOp, x.ssa, layout, x.shape, axes=axes, reduction=reduction
        )

    def all_gather(self, x: Value, dim: int, axes: Axes) -> Value:
        """Return the values of each group, one after the other along `dim`."""
        x = self._vary(x, axes)
        rest = self._without(x, axes)
        parts = self._reinterpret(x.ssa, rest.with_dim(dim, axes))
        shape = rest.with_dim(dim, axes).global_shape(self.mesh, x.shape)
        return self._collective(dist.AllGatherOp, parts.ssa, rest, shape, axes=axes, dim=dim)

    def reduce_scatter(self, x: Value, reduction: str, dim: int, axes: Axes) -> Value:
        """Return the device's part, along `dim`, of the reduction of the values of its group."""
        x = self._vary(x, axes)
        layout = self._without(x, axes).with_dim(dim, axes)
        part = self._collective(
            dist.ReduceScatterOp, x.ssa, layout, x.shape, axes=axes, dim=dim, reduction=reduction
        )
        return self._reinterpret(part.ssa, self._varying(part.shape, self.varies_over(x)))

    def all_to_all(self, x: Value, split: int, concat: int, axes: Axes) -> Value:
        """Return the device's parts, along `split`, of the values of its group, one after the other
        along `concat`."""
        x = self._vary(x, axes)
        before = self._without(x, axes).with_dim(concat, axes)
        after = self._without(x, axes).with_dim(split, axes)
        parts = self._reinterpret(x.ssa, before)
        moved = self._collective(
            dist.AllToAllOp, parts.ssa, after, before.global_shape(self.mesh, x.shape),
            axes=axes, dim=split, concat=concat,
        )  # fmt: skip
        return self._reinterpret(moved.ssa, self._varying(moved.shape, self.varies_over(x)))

    def permute(self, x: Value, pairs: Sequence[int], axes: Axes) -> Value:
        """Return the value of the device that sends to this one, zeros where none does."""
        x = self._vary(x, axes)
        layout = self._varying(x.shape, self.varies_over(x))
        return self._collective(
            dist.PermuteOp, x.ssa, layout, x.shape, axes=axes, pairs=tuple(pairs)
        )

    def broadcast(self, x: Value, root: int, axes: Axes) -> Value:
        """Return the value of the device at the position `root` of each group."""
        x = self._vary(x, axes)
        layout = self._without(x, axes)
        return self._collective(
            dist.BroadcastFromRootOp, x.ssa, layout, x.shape, axes=axes, root=root
        )
