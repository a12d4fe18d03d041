"""Lowering of values from the global to the local view, and lifting back."""

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Region, SSAValue

from shardir.algebra.cluster import BYTES
from shardir.algebra.mesh import Mesh, axes_text
from shardir.algebra.redistribution import plan
from shardir.analysis.functions import values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Failure, coded
from shardir.dialects import dist
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import element_name
from shardir.rewriting.copying import copied
from shardir.rewriting.free_axes import FreeDimensions
from shardir.rewriting.functions import update_signature
from shardir.rewriting.inlining import inline
from shardir.rewriting.placement import layout_at
from shardir.rewriting.rewriter import Rewriter


def lift(block: Block, mesh: Mesh) -> dict[SSAValue, Attribute]:
    """Give local values global types of the same layout, and return their local types. Collectives
    do not change."""
    types = {v: v.type for v in values(block) if dist.is_local(v.type)}
    for v, t in types.items():
        assert isinstance(t, TensorType)
        set_type(v, dist.laid_out(t.element_type, dist.global_shape(t, mesh), layout_at(v)))
    return types


def lower(block: Block, mesh: Mesh) -> None:
    """Turn redistributions into collectives, and global values into local ones. The functions of
    manual computations are inlined."""
    rewriter = Rewriter()
    for op in of_kind(ops_of(block), ManualOp):
        inline(op, _body(op, mesh))
    for op in ops_of(block):
        if isinstance(op, dist.RedistributeOp):
            _lower_redistribution(op, mesh, rewriter.before(op))
        elif isinstance(op, TensorOp):
            _lower_to_exchange(op, mesh, rewriter.before(op))
    locals: dict[int, tuple[Attribute, Attribute]] = {}
    for v in values(block):
        t = v.type
        if dist.is_local(t):
            continue
        if (pair := locals.get(id(t))) is None:
            assert isinstance(t, TensorType)
            local = dist.local(t.element_type, t.get_shape(), layout_at(v), mesh)
            pair = locals[id(t)] = t, local
        set_type(v, pair[1])


def _body(op: ManualOp, mesh: Mesh) -> Block:
    """Return the body of a manual computation, split over the free axes of its strategy.

    Raises:
        Failure: the body does not map a dimension that a free axis splits.
    """
    manual = [name for name, _ in op.manual_axes.data]
    if all(a.name in manual for side in op.cuts for v in side for axes in v for a in axes):
        return op.function.body.block
    free = free_dimensions(op.function, mesh)
    for what, vs, cuts in zip(("operand", "result"), free.borders, op.cuts, strict=True):
        for i, d in free.grant(vs, cuts, manual):
            axes = axes_text(cuts[i][d])
            message = (
                f"expected a dimension that the body maps, to split it over {axes}, got dimension "
                f"{d} of {what} {i}"
            )
            raise Failure.at(op, coded("T13", message, use="keep it whole over free axes"))
    free.split()
    return free.block


def split_function(op: ManualOp, mesh: Mesh) -> FuncOp:
    """Return a function in the local view with the body of a manual computation, split over free
    axes too.

    Raises:
        Failure: the body does not map a dimension that a free axis splits.
    """
    block = _body(op, mesh)
    if block is op.function.body.block:
        block = copied(op.function).body.block
    else:
        lower(block, mesh)
    if (region := block.parent) is not None:
        region.detach_block(block)
    f = FuncOp(f"{op.callee.string_value()}.split", ((), ()), Region(block), "private")
    update_signature(f)
    return f


def free_dimensions(f: FuncOp, mesh: Mesh) -> FreeDimensions:
    """Return the dimensions that free axes may split in a copy of a function in the local view."""
    block = copied(f).body.block
    lift(block, mesh)
    return FreeDimensions(block, mesh)


def _lower_to_exchange(op: TensorOp, mesh: Mesh, rewriter: Rewriter) -> None:
    """Replace an op by an exchange, if devices need elements of other devices."""
    if (exchange := op.exchange(mesh)) is None:
        return
    kind, properties = exchange
    types = [v.type for v in op.results]
    new = rewriter.create(kind, list(op.operands), types, properties, op.attributes)
    rewriter.replace(op, new.results)


def _lower_redistribution(op: dist.RedistributeOp, mesh: Mesh, rewriter: Rewriter) -> None:
    """Replace a redistribution by the collectives of its plan, whose results have local types."""
    t = op.out.type
    assert isinstance(t, TensorType)
    shape, target = t.get_shape(), layout_at(op.out)
    itemsize = BYTES.get(element_name(t.element_type), 4)
    steps = plan(shape, mesh, layout_at(op.value), target, itemsize)
    value = op.value
    for i, step in enumerate(steps):
        layout = target if i == len(steps) - 1 else step.layout
        new = dist.step_op(step, value, dist.local(t.element_type, shape, layout, mesh))
        if op.fusion is not None and isinstance(new, dist.FusibleOp):
            new.properties["fusion"] = op.fusion
        new.attributes.update(op.attributes)
        new.location = op.location
        new.results[0].name_hint = op.out.name_hint
        rewriter.insert(new)
        value = new.results[0]
    rewriter.replace(op, [value])
