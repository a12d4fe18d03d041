"""decompose-collective-products: run a collective and its product in steps around a ring.

    %w1 = dist.all_gather %x dim 0 over <tp>
    %y = nn.matmul %w1, %w
 -> %y = dist.gathered_product %x, %w "ij,jk->ik" along "i" over <tp>

    %p = nn.matmul %h, %w
    %y = dist.reduce_scatter <sum> %p dim 0 over <tp>
 -> %y = dist.scattered_product %h, %w "ij,jk->ik" along "i" over <tp>

1. A scattered product has no other use. The product is the first use of a gathered value; for the
   value's further uses, the gathered value is a second result. The dimension is in the product's
   result and in one of its operands, and is not summed over.
2. The shards have one size. A collective that is `async` or has several values does not change: a
   pass has hidden or fused it.
3. A product is decomposed where that is faster by the time model of the mesh's cluster: each of n
   steps takes the longer of the transfer of a shard and a part of the product
   (cost/ring_products.py). With `always` every product is decomposed.
4. Without `always`, neither the estimated time of the function nor its peak memory increases.
5. The sums of a reduce-scatter are in another order: results differ by rounding.

No pipeline has it. It runs on the local view, forward and backward part, after
overlap-communication: `-p train,decompose-collective-products`.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from xdsl.dialects.builtin import StringAttr, TensorType
from xdsl.ir import Operation, SSAValue

from shardir.algebra.estimates import IMPROVEMENT
from shardir.algebra.mesh import Mesh
from shardir.cost.memory import memory_of
from shardir.cost.schedule import seconds_in_order
from shardir.cost.seconds import cost_of, works_of
from shardir.dialects import dist, nn
from shardir.dialects.blocks import ops_of
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import allowed_memory
from shardir.rewriting.rewriter import Rewriter, erase


@dataclass(frozen=True)
class DecomposeCollectiveProducts(LocalPass):
    """Computes products in steps, while the shards of an all-gather or a reduce-scatter move."""

    name = "decompose-collective-products"
    always: bool = False
    """Whether every product is decomposed that can be; otherwise only where the time model
    gains."""

    def rewrite(self, f: Function) -> None:
        if f.mesh is None:
            return
        before = _estimate(f, f.mesh)
        decomposed = list[ProductPair]()
        for op in ops_of(f.block):
            pair = _find_pair(op, f.mesh)
            if pair is not None and (self.always or pair.gains(f.mesh)):
                pair.write()
                decomposed.append(pair)
        if decomposed and not self.always:
            now, limit = _estimate(f, f.mesh), allowed_memory(f.op, f.mesh)
            if now.seconds >= before.seconds * IMPROVEMENT or now.peak > max(limit, before.peak):
                for pair in reversed(decomposed):
                    pair.take_back()
                decomposed = []
        for pair in decomposed:
            for op in reversed(pair.ends):
                op.erase()


class FunctionEstimate(NamedTuple):
    """The estimated seconds and the peak bytes of a function."""

    seconds: float
    peak: int


def _estimate(f: Function, mesh: Mesh) -> FunctionEstimate:
    seconds = seconds_in_order((w.cost(mesh) for w in works_of(ops_of(f.block), mesh)), mesh)
    return FunctionEstimate(seconds, memory_of(f.op, mesh).peak)


class ProductPair(NamedTuple):
    """A collective and its product, and the ring product that replaces both."""

    collective: dist.AllGatherOp | dist.ReduceScatterOp
    product: nn.Contraction
    ring: dist.RingProductOp

    @property
    def ends(self) -> tuple[Operation, Operation]:
        """Both ops in their order."""
        if isinstance(self.collective, dist.AllGatherOp):
            return self.collective, self.product
        return self.product, self.collective

    @property
    def results(self) -> tuple[SSAValue, ...]:
        """The results of both ops: the product and the gathered value, or the scattered product."""
        if isinstance(self.collective, dist.AllGatherOp):
            return self.product.out, self.collective.outs[0]
        return (self.collective.outs[0],)

    def gains(self, mesh: Mesh) -> bool:
        """Whether the ring product is faster than the two ops in sequence."""
        collective, product, ring = (cost_of(op, mesh) for op in self)
        assert collective is not None and product is not None and ring is not None
        return ring.seconds < (collective.seconds + product.seconds) * IMPROVEMENT

    def write(self) -> None:
        """Put the ring product in the place of the product."""
        Rewriter().before(self.product).insert(self.ring)
        for old, new in zip(self.results, self.ring.outs, strict=False):
            old.replace_uses_with_if(new, lambda use: use.operation is not self.product)
        for op in reversed(self.ends):
            op.detach()

    def take_back(self) -> None:
        """Put both ops back, in sequence."""
        for op in self.ends:
            Rewriter().before(self.ring).insert(op)
        for old, new in zip(self.results, self.ring.outs, strict=False):
            new.replace_all_uses_with(old)
        erase(self.ring)


def _find_pair(op: Operation, mesh: Mesh) -> ProductPair | None:
    """Return a collective with the product that can run in steps with it; None if there is no such
    product."""
    if not isinstance(op, dist.AllGatherOp | dist.ReduceScatterOp) or len(op.values) != 1:
        return None
    if dist.is_started(op) or op.fusion is not None or not op.moves(mesh):
        return None
    gathers = isinstance(op, dist.AllGatherOp)
    exchanged = op.outs[0] if gathers else op.values[0]
    users = {use.operation for use in exchanged.uses}
    product = _first_user(op, users) if gathers else exchanged.owner
    if not gathers and len(users) != 1:
        return None
    if not isinstance(product, nn.Contraction) or product.parent is not op.parent:
        return None
    if not gathers and op.reduction.data != "sum":
        return None
    x, y, z = product.letters
    dim, terms = op.dim.value.data, (x, y)
    if gathers:
        if product.lhs is product.rhs:
            return None
        letter = terms[0 if product.lhs is exchanged else 1][dim]
    else:
        letter = z[dim]
    if letter not in z or sum(letter in term for term in terms) != 1:
        return None
    if not _is_even(op, dim, mesh):
        return None
    operands = [op.values[0] if v is exchanged else v for v in product.operands]
    properties = {
        "equation": StringAttr(f"{x},{y}->{z}"), "along": StringAttr(letter), "axes": op.axes,
    }  # fmt: skip
    kind = dist.GatheredProductOp if gathers else dist.ScatteredProductOp
    results: list[SSAValue] = [product.out if gathers else op.outs[0]]
    if gathers and len(users) > 1:
        results.append(exchanged)
    ring = kind.create(
        operands=operands, result_types=[v.type for v in results], properties=properties,
        location=product.location,
    )  # fmt: skip
    for v, new in zip(results, ring.outs, strict=True):
        new.name_hint = v.name_hint
    return ProductPair(op, product, ring)


def _first_user(op: Operation, users: Collection[Operation]) -> Operation | None:
    """Return the first user that follows an op."""
    following = op.next_op
    while following is not None and following not in users:
        following = following.next_op
    return following


def _is_even(op: dist.AllGatherOp | dist.ReduceScatterOp, dim: int, mesh: Mesh) -> bool:
    """Whether shards of all devices have one size."""
    n = mesh.extent(op.axes.data)
    ends = (op.values[0], op.outs[0])
    for v in ends:
        layout = dist.layout_of(v)
        if layout is None or not layout.even(mesh, dist.global_shape(v.type, mesh)):
            return False
    sizes = [v.type.get_shape()[dim] for v in ends if isinstance(v.type, TensorType)]
    return max(sizes) == n * min(sizes)
