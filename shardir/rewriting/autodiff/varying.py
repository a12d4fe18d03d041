"""Transposed collectives of values that vary: each device holds a value of its own.

%y = dist.all_reduce <sum> %x over <d>     d_x is d_y, on each device
%y = dist.all_reduce <max> %x over <d>     d_x is d_y where x = y; equal maxima share it
%y = dist.permute %x pairs <0, 1>          d_x is d_y by the pairs <1, 0>
%y = dist.reinterpret %x                   replicated x: d_x is the sum of the devices' d_y
                                           replicated y: each device has its share of d_y
"""

from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.diagnostics import ShardirError, coded
from shardir.dialects import dist
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.autodiff.cotangents import cotangent_layout
from shardir.rewriting.rewriter import Rewriter
from shardir.rewriting.varying import insert_step, reduce_over, reinterpret


def concerns_varying(op: dist.CollectiveOp, v: SSAValue, mesh: Mesh) -> bool:
    """Whether a collective takes values that are the devices' own."""
    layout = dist.layout_of(v)
    assert layout is not None
    return isinstance(op, dist.ReinterpretOp) or any(
        mesh.overlap(a, b) for a in op.axes.data for b in layout.varying
    )


def transposed(
    b: Rewriter, op: dist.CollectiveOp, v: SSAValue, out: SSAValue, d: SSAValue
) -> SSAValue:
    """Return the cotangent of the operand `v` of a collective of values that vary, from the
    cotangent `d` of its result.

    Raises:
        ShardirError: no layout expresses it.
    """
    assert b.mesh is not None
    have, axes = b.layout(v), op.axes.data
    if isinstance(op, dist.ReinterpretOp):
        return _reinterpreted(b, v, out, d)
    rest = b.mesh.without(have.varying, axes)
    if rest is None:
        message = f"expected {op.name} over axes over which its value varies, got [{have}]"
        raise ShardirError(coded("G8", message, use="let it vary over all of them"))
    reduced = have.with_partial(rest, "any")
    if isinstance(op, dist.AllReduceOp | dist.ReduceScatterOp):
        d = b.redistribute(d, reduced)
        if op.reduction.data == "mean":
            d = b.scale(d, 1 / b.mesh.extent(axes))
        elif op.reduction.data in ("max", "min"):
            is_extreme = b.compare("eq", v, b.redistribute(out, reduced))
            ones = b.convert(is_extreme, unsharded_type(v).element_type)
            return b.mul(ones, b.div(d, reduce_over(b, ones, axes)))
        elif op.reduction.data != "sum":
            message = f"expected a sum, mean, max or min, got {op.reduction.data} of {op.name}"
            raise ShardirError(coded("G8", message, use="put nn.stop_gradient before it"))
        return reinterpret(b, d, have)
    if isinstance(op, dist.PermuteOp):
        return insert_step(b, op.record.transpose(op.step_for(v, out, b.mesh), have), d)
    message = f"expected {op.name} of a value that does not vary over its axes, got [{have}]"
    raise ShardirError(coded("G8", message, use="put nn.stop_gradient before it"))


def _reinterpreted(b: Rewriter, v: SSAValue, out: SSAValue, d: SSAValue) -> SSAValue:
    """Return the cotangent of a value whose data are taken as those of another one."""
    mesh, before, after = b.mesh, b.layout(v), b.layout(out)
    assert mesh is not None
    pending = _partial(before) != _partial(after) and (
        _partial(before) is not None or after.reduction in ("max", "min")
    )
    if pending:
        message = f"expected no partial values taken as others, got [{before}] as [{after}]"
        raise ShardirError(coded("G8", message, use="reduce them first"))
    own, taken = _own_axes(before, mesh), _own_axes(after, mesh)
    used_alike = _difference(taken, own, mesh)  # of one value, over which the cotangents add up
    equal = _difference(own, (*taken, *_partial_axes(after)), mesh)  # of a value known to be equal
    if after.reduction == "mean" and _partial(before) is None:
        equal = mesh.union(equal, after.partial)
    if used_alike or equal:
        local = after.local_shape(mesh, unsharded_type(out).get_shape())
        whole = Layout(mesh.name, ((),) * len(local))
        d = reinterpret(b, d, whole.with_partial(mesh.union(taken, ()), "any"))
        if used_alike:
            d = reduce_over(b, d, mesh.union(used_alike, ()))
        if equal:
            d = b.scale(d, 1 / mesh.extent(equal))
    return reinterpret(b, d, cotangent_layout(before))


def _own_axes(layout: Layout, mesh: Mesh) -> Axes:
    """Return the axes along which devices hold shards or values of their own."""
    return (*(a for dim in layout.dims for a in dim), *layout.varying)


def _partial_axes(layout: Layout) -> Axes:
    return () if layout.varying else layout.partial


def _partial(layout: Layout) -> tuple[Axes, str] | None:
    """Return the axes and the reduction of a value that a reduction makes complete."""
    return (layout.partial, layout.reduction) if _partial_axes(layout) else None


def _difference(axes: Axes, others: Axes, mesh: Mesh) -> Axes:
    """Return the axes that are not among others."""
    kept = mesh.cut(others, axes)
    return tuple(a for a in mesh.cut(axes, others) if a not in kept)
