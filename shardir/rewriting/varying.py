"""Collectives on values that vary: each device holds a value of its own (`partial any`)."""

from xdsl.ir import SSAValue

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes
from shardir.dialects.dist import laid_out, step_op
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.rewriter import Rewriter


def reduce_over(b: Rewriter, x: SSAValue, axes: Axes, reduction: str = "sum") -> SSAValue:
    """Return the reduction over axes of a value that varies over them."""
    assert b.mesh is not None
    rest = b.mesh.without(b.layout(x).varying, axes)
    assert rest is not None
    layout = b.layout(x).with_partial(rest, "any")
    return insert_step(b, CollectiveStep("all_reduce", axes, layout, reduction=reduction), x)


def reinterpret(b: Rewriter, x: SSAValue, layout: Layout) -> SSAValue:
    """Return the data of each device as that of a value with another layout."""
    if b.layout(x) == layout:
        return x
    return insert_step(b, CollectiveStep("reinterpret", (), layout), x)


def insert_step(b: Rewriter, step: CollectiveStep, x: SSAValue) -> SSAValue:
    """Return the result of a collective that keeps the shapes of shards."""
    t, mesh, layout = unsharded_type(x), b.mesh, step.layout
    assert mesh is not None
    local = b.layout(x).local_shape(mesh, t.get_shape())
    shape = layout.global_shape(mesh, local)
    new = step_op(step, x, laid_out(t.element_type, shape, layout))
    new.results[0].name_hint = x.name_hint
    new.attributes.update(b.attributes)
    if b.location is not None:
        new.location = b.location
    b.insert(new)
    return new.results[0]
