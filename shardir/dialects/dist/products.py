"""Ring products: a contraction fused with the all-gather of an operand or the reduce-scatter of its
result, in one step per device of a group. Shards go around a ring while devices compute.

    %y = dist.gathered_product %x, %w "ij,jk->ik" along "i" over <tp>
           : (tensor<4x8xf32, #dist.local<@m, [{tp}, {}]>>,
              tensor<8x6xf32, #dist.local<@m, [{}, {}]>>)
           -> tensor<8x6xf32, #dist.local<@m, [{}, {}]>>

XLA calls them windowed einsums (collective matmul: Wang et al., 2023); torch has
`fused_all_gather_matmul` and `fused_matmul_reduce_scatter`, on symmetric memory.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import SSAValue
from xdsl.irdl import IRDLOperation, operand_def, prop_def, traits_def, var_result_def
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.diagnostics import coded
from shardir.dialects.definition import OpClass, op_definition
from shardir.dialects.dist.attributes import AxesAttr
from shardir.dialects.dist.base import mesh_of_collective
from shardir.dialects.dist.types import check_types, layout_of, verification


class RingProductOp(IRDLOperation, ABC, metaclass=OpClass):
    """A contraction of two values, with a collective over `axes` along the dimension of the letter
    `along`, an index of one operand and of the result."""

    MOST: ClassVar[int]
    """The maximum number of results."""
    GATHERS: ClassVar[bool]
    """Whether an operand is all-gathered; else the product is reduce-scattered."""
    lhs = operand_def(TensorType)
    rhs = operand_def(TensorType)
    outs = var_result_def(TensorType)
    equation = prop_def(StringAttr)
    along = prop_def(StringAttr)
    axes = prop_def(AxesAttr)
    traits = traits_def(Pure())
    assembly_format = (
        "$lhs `,` $rhs $equation `along` $along `over` $axes attr-dict `:` "
        "functional-type(operands, results)"
    )

    @property
    def out(self) -> SSAValue:
        """The product."""
        return self.outs[0]

    @property
    def letters(self) -> tuple[str, str, str]:
        """The letters of the operands and of the result."""
        operands, result = self.equation.data.split("->")
        x, y = operands.split(",")
        return x, y, result

    @property
    def ring(self) -> tuple[int, int, int]:
        """The index of the operand with the letter `along`, and the dimension of that letter in the
        operand and in the result."""
        x, y, z = self.letters
        which = int(self.along.data not in x)
        return which, (x, y)[which].index(self.along.data), z.index(self.along.data)

    @property
    def moved(self) -> SSAValue:
        """The operand with the letter `along`."""
        return self.operands[self.ring[0]]

    def verify_(self) -> None:
        check_types(self)
        mesh = mesh_of_collective(
            self, self.axes.data, *(v.type for v in (*self.operands, self.out))
        )
        terms, letter = self.letters, self.along.data
        if not 0 < len(self.outs) <= self.MOST:
            self._refuse(f"at most {self.MOST} results, and one, got {len(self.outs)}")
        if sum(letter in term for term in terms[:2]) != 1 or letter not in terms[2]:
            self._refuse(f"a letter of one operand and of the result, got {letter!r}")
        sizes: dict[str, set[int]] = {}
        for term, v in zip(terms, (*self.operands, self.out), strict=True):
            assert isinstance(v.type, TensorType)
            if len(term) != len(v.type.get_shape()):
                self._refuse(f"a value with the dimensions {term!r}, got {v.type}")
            for c, n in zip(term, v.type.get_shape(), strict=True):
                sizes.setdefault(c, set()).add(n)
        sizes_along = sizes.pop(letter)
        _, dim, out = self.ring
        moved, result = self.moved.type, self.out.type
        assert isinstance(moved, TensorType) and isinstance(result, TensorType)
        want = self.size_after(moved.get_shape()[dim], mesh.extent(self.axes.data))
        if any(len(values) > 1 for values in sizes.values()) or result.get_shape()[out] != want:
            self._refuse(
                f"equal sizes of each letter and {want} of {letter!r}, got {sorted(sizes_along)}"
            )
        self._check_layouts(mesh)

    def _check_layouts(self, mesh: Mesh) -> None:
        """Raise VerifyException unless the results have the layouts that the collective and the
        product give."""
        (which, dim, out), axes = self.ring, self.axes.data
        operand_layouts = [layout_of(v) for v in self.operands]
        assert all(l is not None for l in operand_layouts)
        layouts: list[Layout] = [l for l in operand_layouts if l is not None]
        with verification():
            if self.GATHERS:
                step = CollectiveStep("all_gather", axes, layouts[which], dim=dim)
                layouts[which] = COLLECTIVES["all_gather"].after(mesh, layouts[which], step)
            axes_of: dict[str, Axes] = {}
            for term, l in zip(self.letters, layouts, strict=False):
                pairs = zip(term, l.dims, strict=True)
                axes_of |= {c: a for c, a in pairs if c not in axes_of or a}
            x, y, z = self.letters
            partial = {a for l in layouts for a in l.partial}
            partial |= {a for c in {*x, *y} - {*z} for a in axes_of[c]}
            product = Layout(layouts[0].mesh, tuple(axes_of[c] for c in z))
            want = product.with_partial(tuple(sorted(partial, key=str)), "sum")
            if not self.GATHERS:
                step = CollectiveStep("reduce_scatter", axes, want, reduction="sum", dim=out)
                want = COLLECTIVES["reduce_scatter"].after(mesh, want, step)
        for v, w in zip(self.outs, (want, layouts[which]), strict=False):
            have = layout_of(v)
            assert have is not None
            if have.dims != w.dims or {*have.partial} != {*w.partial}:
                self._refuse(f"a result with [{w}], got [{have}]")

    def _refuse(self, expected: str) -> None:
        raise VerifyException(coded("C17", f"expected {expected}"))

    @abstractmethod
    def size_after(self, size: int, n: int) -> int:
        """Return the size of the dimension `along` in the result, on n devices; `size` is that of
        the operand."""

    def steps(self, mesh: Mesh) -> int:
        """The number of steps: the devices of a group."""
        return mesh.extent(self.axes.data)


@op_definition
class GatheredProductOp(RingProductOp):
    """The product with the all-gathered operand, shard by shard as they arrive; the second result,
    if any, is the gathered operand."""

    name = "dist.gathered_product"
    MOST: ClassVar[int] = 2
    GATHERS: ClassVar[bool] = True

    def size_after(self, size: int, n: int) -> int:
        return n * size


@op_definition
class ScatteredProductOp(RingProductOp):
    """A shard of the sum of all devices' products. Each device adds its product to the sum that
    arrives, and sends it on."""

    name = "dist.scattered_product"
    MOST: ClassVar[int] = 1
    GATHERS: ClassVar[bool] = False

    def size_after(self, size: int, n: int) -> int:
        return size // n if size % n == 0 else -1


RING_PRODUCTS: tuple[type[RingProductOp], ...] = (GatheredProductOp, ScatteredProductOp)
"""All ring products."""
