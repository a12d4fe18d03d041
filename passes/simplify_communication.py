"""simplify-communication: fewer and smaller collectives for the same values.

    all_reduce, then slice           -> reduce_scatter
    all_gather, then slice           -> nothing, where the slice takes back what was gathered
    all_reduce a + all_reduce b      -> all_reduce (a + b), another summand between them or not
    all_reduce, a view, then a sum   -> the view, all_reduce, then the sum, which meets another
    all_gather (broadcast a)         -> broadcast (all_gather a); so for all_to_all and exchange
    the same collective twice        -> once
    a collective that nobody uses    -> nothing

1. Never more bytes and never more collectives.
2. Running it twice changes nothing the second time.
3. A collective that is `async` stays as it is.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, Operation, SSAValue

from shardir.cost.seconds import size_of
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import TensorOp, axis_of, dims_of, int_attr
from shardir.rewriting.bases import Function, LocalPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import erase, set_type


@dataclass(frozen=True)
class SimplifyCommunication(LocalPass):
    """Merges, shrinks and removes collectives."""

    name = "simplify-communication"

    def rewrite(self, f: Function) -> None:
        while any([rule(f.block) for rule in RULES]):
            pass


def _at_each_op(rule: Callable[[Block, Operation], bool]) -> Callable[[Block], bool]:
    """The rule at each op; it says whether it changed something."""
    return lambda block: any([rule(block, op) for op in list(block.ops)])


def _dead(block: Block) -> bool:
    changed = False
    op = block.last_op
    while op is not None:
        before = op.prev_op
        if isinstance(op, dist.Collective) and all(v.first_use is None for v in op.results):
            erase(op)
            changed = True
        op = before
    return changed


def _equal(block: Block) -> bool:
    """The same collective of the same values: the first one serves, but not where `recompute` has
    made another on purpose."""
    seen: dict[tuple[object, ...], dist.Collective] = {}
    changed = False
    for op in list(block.ops):
        if not isinstance(op, dist.Collective) or RECOMPUTE in op.attributes or dist.is_started(op):
            continue
        props = tuple(sorted((k, str(v)) for k, v in op.properties.items() if k != "fusion"))
        key = (type(op), tuple(op.operands), props, tuple(str(v.type) for v in op.results))
        first = seen.setdefault(key, op)
        if first is not op:
            for old, new in zip(op.results, first.results, strict=True):
                old.replace_all_uses_with(new)
            erase(op)
            changed = True
    return changed


@_at_each_op
def _scatter(block: Block, op: Operation) -> bool:
    """all_reduce + slice over the same axes -> reduce_scatter."""
    if not isinstance(op, dist.AllReduceOp) or len(op.values) != 1:
        return False
    user = op.results[0].get_user_of_unique_use()
    if not isinstance(user, dist.AllSliceOp) or user.axes != op.axes:
        return False
    props = {k: v for k, v in op.properties.items()} | {"dim": user.dim}
    new = dist.ReduceScatterOp.create(
        operands=list(op.values), result_types=[user.results[0].type], properties=props,
        location=op.location,
    )  # fmt: skip
    new.results[0].name_hint = user.results[0].name_hint
    block.insert_op_before(new, user)
    user.results[0].replace_all_uses_with(new.results[0])
    erase(user)
    erase(op)
    return True


@_at_each_op
def _undone(block: Block, op: Operation) -> bool:
    """A slice that takes back what an all-gather brought together."""
    if not isinstance(op, dist.AllSliceOp):
        return False
    source = op.values[0].owner
    if not isinstance(source, dist.AllGatherOp) or len(source.values) != 1:
        return False
    if (source.axes, source.dim) != (op.axes, op.dim):
        return False
    op.results[0].replace_all_uses_with(source.values[0])
    erase(op)
    return True


@_at_each_op
def _sums(block: Block, op: Operation) -> bool:
    """The sum of two reduced values -> the reduced sum of both."""
    if not isinstance(op, nn.AddOp) or not _go_together(op.lhs, op.rhs):
        return False
    a, b, after = op.lhs.owner, op.rhs.owner, op.out.type
    assert isinstance(a, _Summed) and isinstance(b, _Summed)
    if op.lhs.type != after:
        return False
    new = type(a).create(
        operands=[op.out], result_types=[after], properties=dict(a.properties),
        location=op.location,
    )  # fmt: skip
    new.results[0].name_hint = op.out.name_hint
    op.out.replace_all_uses_with(new.results[0])
    op.operands[0], op.operands[1] = a.values[0], b.values[0]
    new.operands[0] = op.out
    set_type(op.out, a.values[0].type)
    block.insert_op_after(new, op)
    erase(a)
    erase(b)
    return True


@_at_each_op
def _next_to_each_other(block: Block, op: Operation) -> bool:
    """(z + x) + y -> (x + y) + z, where x and y go together."""
    if not isinstance(op, nn.AddOp):
        return False
    for sum, y in ((op.lhs, op.rhs), (op.rhs, op.lhs)):
        inner = sum.owner
        if not isinstance(inner, nn.AddOp) or sum.get_user_of_unique_use() is not op:
            continue
        for x, z in ((inner.lhs, inner.rhs), (inner.rhs, inner.lhs)):
            if _go_together(x, y) and x.type == z.type == sum.type == op.out.type:
                inner.detach()
                block.insert_op_before(inner, op)
                inner.operands[0], inner.operands[1] = x, y
                op.operands[0], op.operands[1] = sum, z
                return True
    return False


def _go_together(x: SSAValue, y: SSAValue) -> bool:
    """Whether both are sums over the same devices, each for one user."""
    a, b = x.owner, y.owner
    if a is b or not (isinstance(a, _Summed) and isinstance(b, _Summed)):
        return False
    alike = type(a) is type(b) and a.properties == b.properties and a.reduction.data == "sum"
    if not alike or len(a.values) != 1 or len(b.values) != 1:
        return False
    alone = x.get_user_of_unique_use() is not None and y.get_user_of_unique_use() is not None
    return alone and a.values[0].type == b.values[0].type


@_at_each_op
def _moved(block: Block, op: Operation) -> bool:
    """What only moves elements, of a reduced value -> the reduced value of what is moved: where it
    then meets a sum or a slice."""
    x = _mover(op)
    reduce = x.owner if x is not None else None
    if not isinstance(reduce, dist.AllReduceOp) or len(reduce.values) != 1:
        return False
    end: Operation | None = op
    while end is not None and _mover(end) is not None:
        end = end.results[0].get_user_of_unique_use()
    if not isinstance(end, nn.AddOp | dist.AllSliceOp):
        return False
    y, before = op.results[0], dist.layout_of(reduce.values[0])
    out = dist.layout_of(y)
    assert before is not None and out is not None and isinstance(y.type, TensorType)
    mesh = dist.find_mesh(op, out.mesh)
    if any(mesh.overlap(a, b) for a in before.partial for b in out.used):
        return False  # the devices that have contributions hold different parts afterwards
    new = reduce.clone()
    set_type(new.results[0], y.type)
    new.results[0].name_hint = y.name_hint
    y.replace_all_uses_with(new.results[0])
    op.operands[0], new.operands[0] = reduce.values[0], y
    shape = dist.global_shape(y.type, mesh)
    partial = out.with_partial(before.partial, before.reduction)
    set_type(y, dist.local(y.type.element_type, shape, partial, mesh))
    block.insert_op_after(new, op)
    erase(reduce)
    return True


def _mover(op: Operation) -> SSAValue | None:
    """The operand of an op that only moves its elements, which nothing else uses, and makes no more
    of them."""
    if not isinstance(op, TensorOp) or len(op.operands) != 1 or len(op.results) != 1:
        return None
    x, layout = op.operands[0], dist.layout_of(op.results[0])
    if layout is None or op.factors(dist.find_mesh(op, layout.mesh)).linear != "any":
        return None
    alone = x.get_user_of_unique_use() is op
    return x if alone and size_of(op.results[0]) <= size_of(x) else None


@_at_each_op
def _before_broadcast(block: Block, op: Operation) -> bool:
    """Moves the shards of what is repeated, if any, instead of those of what repeats it, where
    that is less."""
    if not isinstance(op, _Moves) or len(op.values) != 1 or dist.is_started(op):
        return False
    maker = op.values[0].owner
    if not isinstance(maker, nn.BroadcastOp):
        return False
    x, (out,) = maker.x, op.outs
    source, target, given = (dist.layout_of(v) for v in (maker.out, out, x))
    assert source is not None and target is not None and given is not None
    assert isinstance(x.type, TensorType)
    rank = len(target.dims)
    dims = dims_of(maker.properties, "dims", rank)
    moved = {d for d in range(rank) if source.dims[d] != target.dims[d]}
    less = size_of(x) < size_of(maker.out)
    if given.partial or not less or not (moved <= {*dims} or moved.isdisjoint(dims)):
        return False
    if moved & {*dims}:
        mesh = dist.find_mesh(op, target.mesh)
        shape = dist.global_shape(x.type, mesh)
        layout = replace(given, dims=tuple(target.dims[d] for d in dims))
        along = {n: axis_of(op.properties, n, rank) for n in _ALONG if n in op.properties}
        new = type(op).create(
            operands=[x], result_types=[dist.local(x.type.element_type, shape, layout, mesh)],
            properties={**op.properties, **{n: int_attr(dims.index(d)) for n, d in along.items()}},
            attributes=dict(op.attributes), location=op.location,
        )  # fmt: skip
        new.outs[0].name_hint = x.name_hint
        block.insert_op_before(new, op)
        x = new.outs[0]
    repeated = nn.BroadcastOp.create(
        operands=[x], result_types=[out.type], properties=dict(maker.properties),
        attributes=dict(maker.attributes), location=maker.location,
    )  # fmt: skip
    repeated.out.name_hint = out.name_hint
    block.insert_op_before(repeated, op)
    out.replace_all_uses_with(repeated.out)
    erase(op)
    if maker.out.first_use is None:
        erase(maker)
    return True


_Moves = dist.AllGatherOp | dist.AllToAllOp | dist.ExchangeOp
_ALONG = ("dim", "split", "concat")
"""The properties of collectives that are dimensions."""

_Summed = dist.AllReduceOp | dist.ReduceScatterOp

RULES: tuple[Callable[[Block], bool], ...] = (
    _dead, _equal, _undone, _scatter, _sums, _next_to_each_other, _moved, _before_broadcast
)  # fmt: skip
