"""Puts ops in the place of an op: its parts, for a composite anywhere and for others where they are
split; and `nn.custom` in the place of an op that nobody described."""

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, StringAttr, TensorType, UnregisteredOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.builder import Builder
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import Composite, TensorOp
from shardir.dialects.nn.custom import CustomOp

DESCRIBED = ("builtin", "func", "dist", "nn", "train")
"""The dialects whose ops the compiler knows."""
MARKS = ("recompute",)
"""The attributes of an op that are for the passes."""


def replace_by_parts(op: TensorOp, b: Builder) -> list[SSAValue]:
    """Replaces an op by what its `decompose` gives, brought to the layouts that its results have;
    the values that take their places.

    The parts have its location and its attributes, such as the mark for `recompute`.
    """
    b.location, b.attributes = op.location, dict(op.attributes)
    parts = op.decompose(b)
    b.attributes = {}
    assert parts is not None
    outs = []
    for v, new in zip(op.results, parts, strict=True):
        layout = layout_of(v)
        out = new if layout is None else b.redistribute(new, layout.complete)
        out.name_hint = out.name_hint or v.name_hint
        v.replace_all_uses_with(out)
        outs.append(out)
    op.detach()
    op.erase()
    return outs


def expand(block: Block, mesh: Mesh | None) -> None:
    """Replaces what is no plain op in a block: composites, whose parts are laid out where there is
    a mesh, and what nobody described."""
    adopt(block)
    cursor: list[Operation] = []
    b = Builder(mesh, lambda new: block.insert_op_before(new, cursor[0]))
    for op in list(block.ops):
        if isinstance(op, Composite):
            cursor[:] = [op]
            replace_by_parts(op, b)


def expanded(module: ModuleOp) -> ModuleOp:
    """The module in plain ops: itself, or a copy without composites and what nobody described."""
    if not any(isinstance(op, Composite) or is_unknown(op) for op in module.walk()):
        return module
    module = module.clone()
    for f in module.body.ops:
        if isinstance(f, FuncOp):
            for block in f.body.blocks:
                expand(block, None)
    return module


def is_unknown(op: Operation) -> bool:
    """Whether an op is one on tensors that nobody described: of another dialect, or of none."""
    values = (*op.operands, *op.results)
    return (
        not isinstance(op, TensorOp)
        and name_of(op).split(".")[0] not in DESCRIBED
        and not op.regions
        and not op.successors
        and bool(op.results)
        and all(isinstance(v.type, TensorType) for v in values)
    )


def name_of(op: Operation) -> str:
    """What the text calls an op."""
    return op.op_name.data if isinstance(op, UnregisteredOp) else op.name


def adopt(block: Block) -> None:
    """Replaces what nobody described in a block by custom ops of its name. Their options are its
    properties, and its attributes but those of other dialects."""
    for op in list(block.ops):
        if not is_unknown(op):
            continue
        kept = {k: a for k, a in op.attributes.items() if k in MARKS or "." in k}
        options = {k: a for k, a in op.attributes.items() if k not in (*kept, "op_name__")}
        props: dict[str, Attribute] = {"callee": StringAttr(name_of(op))}
        if options := {**op.properties, **options}:
            props["options"] = DictionaryAttr(options)
        new = CustomOp.create(
            operands=list(op.operands), result_types=[v.type for v in op.results],
            properties=props, attributes=kept, location=op.location,
        )  # fmt: skip
        block.insert_op_before(new, op)
        for v, result in zip(op.results, new.results, strict=True):
            result.name_hint = v.name_hint
            v.replace_all_uses_with(result)
        op.detach()
        op.erase()
