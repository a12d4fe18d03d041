"""Puts its parts in the place of an op: of a composite anywhere, of others where they are split."""

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation

from shardir.algebra.mesh import Mesh
from shardir.dialects.builder import Builder
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import Composite, TensorOp


def replace_by_parts(op: TensorOp, b: Builder) -> None:
    """Replaces an op by what its `decompose` gives, brought to the layouts that its results have.

    The parts have its location and its attributes, such as the mark for `recompute`.
    """
    b.location, b.attributes = op.location, dict(op.attributes)
    parts = op.decompose(b)
    b.attributes = {}
    assert parts is not None
    for v, new in zip(op.results, parts, strict=True):
        layout = layout_of(v)
        out = new if layout is None else b.redistribute(new, layout.complete)
        out.name_hint = out.name_hint or v.name_hint
        v.replace_all_uses_with(out)
    op.detach()
    op.erase()


def expand(block: Block, mesh: Mesh | None) -> None:
    """Replaces the composites of a block; their parts are laid out where there is a mesh."""
    cursor: list[Operation] = []
    b = Builder(mesh, lambda new: block.insert_op_before(new, cursor[0]))
    for op in list(block.ops):
        if isinstance(op, Composite):
            cursor[:] = [op]
            replace_by_parts(op, b)


def expanded(module: ModuleOp) -> ModuleOp:
    """The module without composites: itself, or a copy in which they are plain ops."""
    if not any(isinstance(op, Composite) for op in module.walk()):
        return module
    module = module.clone()
    for f in module.body.ops:
        if isinstance(f, FuncOp):
            for block in f.body.blocks:
                expand(block, None)
    return module
