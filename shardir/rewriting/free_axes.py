"""The free axes of manual computations: those over which a body is global.

    dist.manual @body(%x) over <tp = 4> strategy<(({dp}, {}),) -> (({dp}, {tp}),)>

The function of the body has values that are equal along free axes. A free axis may split dimensions
that the body maps: those that ops take to dimensions of the same factor, or sum up. All of these
dimensions are one class; a sum over a split one is followed by an all-reduce.
"""

from collections.abc import Hashable, Sequence

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.slices import SlicedDim
from shardir.compat.xdsl import operands_of, set_type
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.nn import EinsumOp, MatmulOp, ReduceOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.placement import layout_at
from shardir.rewriting.rewriter import Rewriter
from shardir.rewriting.varying import reduce_over, reinterpret

Dim = tuple[SSAValue, int]
"""A dimension of a value."""

REDUCTIONS = {"sum": "sum", "mean": "mean", "max": "max", "min": "min"}
"""The reductions of `nn.reduce` of which partial results are reduced by a collective."""


class FreeDimensions:
    """The classes of dimensions of a body that free axes may split.

    Attributes:
        axes: the free axes of each class.
    """

    def __init__(self, block: Block, mesh: Mesh):
        """`block`: a body, its values with global types and layouts over the other axes."""
        self.block, self.mesh = block, mesh
        self.axes: dict[Hashable, Axes] = {}
        self._parent: dict[Hashable, Hashable] = {}
        self._sizes: dict[Hashable, list[int]] = {}
        self._whole = set[Hashable]()
        self._used = set[str]()
        distinct: list[list[Hashable]] = []
        values = [*block.args, *(v for op in block.ops for v in op.results)]
        for v in values:
            self._used.update(a.name for a in layout_at(v).used)
            shape = unsharded_type(v).get_shape()
            dims = [(v, d) for d, n in enumerate(shape) if n > 1]
            distinct.append([*dims])
            local = layout_at(v).local_shape(mesh, shape)
            for v, d in dims:
                self._sizes.setdefault((v, d), []).append(local[d])
        for op in block.ops:
            if isinstance(op, TensorOp):
                distinct.append(self._op(op))
            elif isinstance(op, dist.CollectiveOp):
                self._collective(op)
        self._whole_classes = {self._find(n) for n in self._whole}
        for group in distinct:  # one axis cannot split two dimensions of a value
            roots = [self._find(n) for n in group]
            self._whole_classes.update(r for r in roots if roots.count(r) > 1)
        self._class_sizes: dict[Hashable, list[int]] = {}
        for node, sizes in self._sizes.items():
            self._class_sizes.setdefault(self._find(node), []).extend(sizes)

    @property
    def borders(self) -> tuple[Sequence[SSAValue], Sequence[SSAValue]]:
        """The arguments, and the values that the body returns."""
        last = self.block.last_op
        assert isinstance(last, ReturnOp)
        return self.block.args, last.operands

    def grant(
        self, values: Sequence[SSAValue], cuts: Sequence[Sequence[Axes]], manual: Sequence[str]
    ) -> list[tuple[int, int]]:
        """Split classes by the free axes among those of the dimensions of values; return the
        values and dimensions, by index, whose class cannot be split so."""
        refused = []
        for i, (v, dims) in enumerate(zip(values, cuts, strict=True)):
            for d, axes in enumerate(dims):
                free = tuple(a for a in axes if a.name not in manual)
                root = self._find((v, d))
                taken = {a for other in self.axes.values() for a in other}
                if not free or self.axes.get(root) == free:
                    continue
                if root in self.axes or taken & {*free} or not self._allows(root, free):
                    refused.append((i, d))
                else:
                    self.axes[root] = free
        return refused

    def grant_rest(self, free: Axes) -> Axes:
        """Split the first dimension of an argument that may be split by the free axes that nothing
        uses yet; return the axes that split no dimension."""
        taken = {a for axes in self.axes.values() for a in axes}
        rest = tuple(a for a in free if a not in taken and a.name not in self._used)
        for v in self.block.args:
            for d in range(len(unsharded_type(v).get_shape())):
                root = self._find((v, d))
                if rest and root not in self.axes and self._allows(root, rest):
                    self.axes[root] = rest
                    rest = ()
        taken = {a for axes in self.axes.values() for a in axes}
        return tuple(a for a in free if a not in taken)

    def cuts(self, v: SSAValue) -> tuple[Axes, ...]:
        """Return the axes of each dimension of a value, the free ones last."""
        dims = layout_at(v).dims
        return tuple(axes + self._axes(v, d) for d, axes in enumerate(dims))

    def split(self) -> None:
        """Give the values of the body layouts over the free axes, and reduce partial results."""
        summed = [(op, axes) for op in of_kind(ops_of(self.block), TensorOp)
                  if (axes := self._reduced_axes(op))]  # fmt: skip
        cuts = {
            v: self.cuts(v)
            for v in (*self.block.args, *(v for op in self.block.ops for v in op.results))
        }
        for v, dims in cuts.items():
            t, layout = unsharded_type(v), layout_at(v)
            new = Layout(layout.mesh, dims).with_partial(layout.partial, layout.reduction)
            set_type(v, dist.laid_out(t.element_type, t.get_shape(), new))
        b = Rewriter(self.mesh)
        for op, axes in summed:
            self._reduce(op, axes, b.before(op))

    # ---- classes ----

    def _find(self, node: Hashable) -> Hashable:
        root = node
        while (above := self._parent.get(root, root)) != root:
            root = above
        while node != root:
            self._parent[node], node = root, self._parent.get(node, root)
        return root

    def _link(self, a: Hashable, b: Hashable) -> None:
        self._parent[self._find(a)] = self._find(b)

    def _allows(self, root: Hashable, axes: Axes) -> bool:
        n, sizes = self.mesh.extent(axes), self._class_sizes.get(root, [])
        return bool(
            sizes
            and root not in self._whole_classes
            and not any(a.size or a.name in self._used for a in axes)
            and all(size % n == 0 for size in sizes)
        )

    def _axes(self, v: SSAValue, d: int) -> Axes:
        return self.axes.get(self._find((v, d)), ())

    def _op(self, op: TensorOp) -> list[Hashable]:
        """Link the dimensions of an op that have one factor; return its factors."""
        factors, leads = op.factors(self.mesh), dict[str, Hashable]()
        sizes = dict(factors.sizes)
        whole = {*factors.replicate, *factors.moved, *factors.sliding, *factors.repeated,
                 *factors.sparse}  # fmt: skip
        if not _reduces(op):
            whole.update(factors.reduced)
        sides = zip((*operands_of(op), *op.results), (*factors.operands, *factors.results),
                    strict=True)  # fmt: skip
        for v, dims in sides:
            for d, dim in enumerate(dims):
                names = [f for f in dim if sizes[f] != 1]
                if isinstance(dim, SlicedDim) or not names:
                    self._whole.add((v, d))
                    whole.update(names)
                    continue
                lead, *minor = names
                whole.update(minor)
                node = leads.setdefault(lead, (op, lead))
                self._sizes.setdefault(node, []).append(sizes[lead])
                self._link((v, d), node)
        self._whole.update((op, f) for f in whole)
        return list(leads.values())

    def _collective(self, op: dist.CollectiveOp) -> None:
        """Link the dimensions of the values of a collective, except those that it splits."""
        self._used.update(a.name for a in op.axes.data)
        step = op.as_step(op.outs[0])
        for v, out in zip(op.values, op.outs, strict=True):
            same = isinstance(v.type, TensorType) and isinstance(out.type, TensorType) and (
                len(v.type.get_shape()) == len(out.type.get_shape())
            )  # fmt: skip
            for x in (v, out):
                for d in range(len(unsharded_type(x).get_shape())):
                    if not same or d in (step.dim, step.concat) or step.windows is not None:
                        self._whole.add((x, d))
            if same:
                for d in range(len(unsharded_type(v).get_shape())):
                    self._link((v, d), (out, d))

    # ---- reductions ----

    def _reduced_axes(self, op: TensorOp) -> Axes:
        """Return the free axes that split factors which the results of an op lack."""
        factors = op.factors(self.mesh)
        roots = dict.fromkeys(self._find((op, f)) for f, _ in factors.sizes if f in factors.reduced)
        return tuple(a for root in roots for a in self.axes.get(root, ()))

    def _reduce(self, op: TensorOp, axes: Axes, b: Rewriter) -> None:
        """Let each device reduce its own elements, and reduce the results over axes."""
        mesh, operands = self.mesh, list[SSAValue]()
        for v in op.operands:
            layout = layout_at(v)
            dims = tuple(tuple(a for a in dim if a not in axes) for dim in layout.dims)
            if dims != layout.dims:
                own = Layout(layout.mesh, dims).with_partial(
                    mesh.union(layout.varying, axes), "any"
                )
                v = reinterpret(b, v, own)
            operands.append(v)
        (out,) = op.results
        layout = layout_at(out)
        varying = layout.with_partial(mesh.union(layout.varying, axes), "any")
        new = b.copy(op, operands, [dist.with_layout(unsharded_type(out), varying)])
        b.replace(op, [reduce_over(b, new.results[0], axes, _reduces(op))])


def _reduces(op: TensorOp) -> str:
    """Return the reduction by which results over parts of a factor become the whole result; "" if
    there is none."""
    if isinstance(op, EinsumOp | MatmulOp):
        return "sum"
    return REDUCTIONS.get(op.kind.data, "") if isinstance(op, ReduceOp) else ""


def free_axes(mesh: Mesh, manual: Sequence[str]) -> Axes:
    """Return the axes of several devices over which a body is global."""
    return tuple(Axis(name) for name, n in mesh.axes if n > 1 and name not in manual)
