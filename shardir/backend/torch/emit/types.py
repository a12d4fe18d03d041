"""The types of a function's values on a rank: shapes, shards, and their texts."""

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh
from shardir.backend.torch.emit.names import Names, axes_text
from shardir.diagnostics import Failure
from shardir.dialects.dist import global_shape, layout_of
from shardir.dialects.nn.types import element_name

DTYPES = {
    "f32": "torch.float32",
    "f64": "torch.float64",
    "bf16": "torch.bfloat16",
    "f16": "torch.float16",
    "i64": "torch.int64",
    "i32": "torch.int32",
    "i1": "torch.bool",
}


class LocalTypes:
    """The types of a function's values, for all ranks or for one rank with folded constants.

    The text of a size is a number if all ranks have the same size, else a variable that
    `head_lines` define at the beginning of the function."""

    def __init__(
        self, f: FuncOp, mesh: Mesh | None, rank: int | None, names: Names, used: set[str]
    ):
        self.f, self.mesh, self.rank, self.names, self.used = f, mesh, rank, names, used
        self.head_lines: list[str] = []
        self._parts: dict[tuple[int, Axes], tuple[str, str]] = {}

    def use(self, name: str) -> None:
        """Make the program define a name of imports.py."""
        self.used.add(name)

    def type(self, v: SSAValue) -> TensorType:
        assert isinstance(v.type, TensorType)
        return v.type

    def element(self, v: SSAValue) -> str:
        return element_name(self.type(v).element_type)

    def dtype(self, v: SSAValue) -> str:
        element = self.element(v)
        if element not in DTYPES:
            owner = v.owner if isinstance(v.owner, Operation) else self.f
            kinds = ", ".join(DTYPES)
            raise Failure.at(owner, f"expected an element type of {kinds}, got {element}")
        return DTYPES[element]

    def is_float(self, v: SSAValue) -> bool:
        return "f" in self.element(v)

    def shape_of(self, v: SSAValue) -> Shape:
        """Return the local shape in the type: the shape of the largest shard."""
        return self.type(v).get_shape()

    def global_shape(self, v: SSAValue) -> Shape:
        return global_shape(self.type(v), self.mesh)

    def axes(self, v: SSAValue, dim: int) -> Axes:
        """The axes that split a dimension."""
        layout = layout_of(v)
        return layout.dims[dim] if layout is not None else ()

    def parts(self, v: SSAValue, dim: int) -> int:
        """The number of shards of a dimension."""
        return self.mesh.extent(self.axes(v, dim)) if self.mesh is not None else 1

    def is_even(self, v: SSAValue, dim: int) -> bool:
        return self.mesh is None or self.mesh.even(self.global_shape(v)[dim], self.axes(v, dim))

    def may_be_empty(self, v: SSAValue, dim: int) -> bool:
        """Whether the shard of some rank has no elements along a dimension."""
        total, axes = self.global_shape(v)[dim], self.axes(v, dim)
        if self.mesh is None or not axes:
            return total == 0
        ends = (self.mesh.bounds(total, axes, k) for k in range(self.mesh.extent(axes)))
        return any(start == stop for start, stop in ends)

    def bounds(self, v: SSAValue, dim: int) -> tuple[int, int]:
        """The range of a dimension on the folded rank."""
        assert self.mesh is not None and self.rank is not None
        axes = self.axes(v, dim)
        return self.mesh.bounds(self.global_shape(v)[dim], axes, self.mesh.index(self.rank, axes))

    def size(self, v: SSAValue, dim: int) -> str:
        """The text of the local size of a dimension."""
        if self.is_even(v, dim):
            return str(self.shape_of(v)[dim])
        return self.rows(self.global_shape(v)[dim], self.axes(v, dim))

    def rows(self, total: int, axes: Axes) -> str:
        """The text of the local size of a dimension of `total` elements split over `axes`."""
        if self.mesh is None or not axes:
            return str(total)
        if self.mesh.even(total, axes):
            return str(self.mesh.largest(total, axes))
        return self.part(total, axes)[1]

    def part(self, total: int, axes: Axes) -> tuple[str, str]:
        """The texts of the start and the size of this rank's shard of `total` elements: literals
        for a folded rank, else two variables of `head_lines`."""
        assert self.mesh is not None
        if self.rank is not None:
            start, stop = self.mesh.bounds(total, axes, self.mesh.index(self.rank, axes))
            return str(start), str(stop - start)
        if (total, axes) not in self._parts:
            self.use("ops")
            about = f"{total}_{'_'.join(a.name for a in axes)}"
            start, rows = (self.names.new(f"{word}_{about}") for word in ("start", "rows"))
            self.head_lines.append(
                f"    {start}, {rows} = ops.part(mesh, {total}, {axes_text(axes)})"
            )
            self._parts[total, axes] = start, rows
        return self._parts[total, axes]

    def sizes(self, v: SSAValue) -> list[str]:
        return [self.size(v, d) for d in range(len(self.shape_of(v)))]

    def start(self, v: SSAValue, dim: int) -> str:
        """The text of the global index of the first element of the local shard."""
        if self.parts(v, dim) == 1:
            return "0"
        if self.is_even(v, dim) and self.rank is None:
            return f"mesh.index({axes_text(self.axes(v, dim))}) * {self.shape_of(v)[dim]}"
        return self.part(self.global_shape(v)[dim], self.axes(v, dim))[0]

    def describe(self, v: SSAValue) -> str:
        """The type of an argument: f32 [4, 8] of [8, 8], split {dp}, {}."""
        shape, layout = list(self.shape_of(v)), layout_of(v)
        text = f"{self.element(v)} {shape}"
        if layout is None or not layout.used:
            return text
        return f"{text} of {list(self.global_shape(v))}, {layout_text(layout)}"


def layout_text(layout: Layout) -> str:
    """The layout without its mesh: [{dp}, {tp}], partial sum {x}."""
    return str(layout).partition(", ")[2]
