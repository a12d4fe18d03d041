"""Replacements of ops: composites and sharded ops by their decomposition, ops without a definition
by `nn.custom`."""

from collections.abc import Sequence
from functools import cache

from xdsl.dialects.builtin import DictionaryAttr, ModuleOp, StringAttr, TensorType, UnregisteredOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.compat.xdsl import set_type
from shardir.dialects.blocks import ops_in, ops_of
from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.base import Composite, TensorOp
from shardir.dialects.nn.custom import CustomOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.copying import copied
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.rewriter import Rewriter
from shardir.syntax.source import warn

DESCRIBED = ("builtin", "func", "dist", "nn", "train")
"""The dialects whose ops have definitions."""


def decompose(op: TensorOp, rewriter: Rewriter) -> list[SSAValue]:
    """Replace an op by its decomposition, with results in the same layouts; return the new values.

    The new ops get the op's location and attributes, such as the mark `recompute`. New ops that
    serve only unused results are erased.
    """
    first, end = op.prev_op, op.next_op
    rewriter.before(op).attributes = dict(op.attributes)
    values = op.parts(rewriter)
    rewriter.attributes = {}
    assert values is not None
    outs = []
    for v, new in zip(op.results, values, strict=True):
        layout = layout_of(v) if v.first_use is not None else None
        if layout is not None and rewriter.mesh is None and new not in op.operands:
            set_type(new, with_layout(unsharded_type(new), layout))
        outs.append(new if layout is None else rewriter.redistribute(new, layout))
    rewriter.replace(op, outs)
    rewriter.erase_unused(first, end)
    return outs


def expand(block: Block, mesh: Mesh | None, kind: type[Composite] = Composite) -> None:
    """Decompose the composites of a kind in a block, laid out if there is a mesh, and turn ops
    without a definition into custom ops."""
    rewriter = Rewriter(mesh)
    for op in adopt_unknown(block):
        if isinstance(op, kind):
            decompose(op, rewriter)
        for region in op.regions:
            expand(region.block, None, kind)


def warn_of_lost_strategies(block: Block) -> None:
    """Warn of strategies of composites that will be decomposed without a mesh."""
    for op in block.ops:
        if isinstance(op, Composite) and op.strategy is not None:
            warn(
                op,
                f"the strategy of {op.name} is lost, since it is decomposed; annotate the layouts "
                "of its operands and results instead",
            )


def expand_module(module: ModuleOp) -> ModuleOp:
    """Return a copy of the module without composites and ops without a definition; the module
    itself if it has neither."""
    if not any(isinstance(op, Composite) or is_unknown(op) for op in ops_in(module)):
        return module
    module = copied(module)
    for f in module.body.ops:
        if isinstance(f, FuncOp):
            for block in f.body.blocks:
                expand(block, None)
    return module


@cache
def _may_be_unknown(kind: type[Operation]) -> bool:
    """Whether ops of a kind may have no definition; computed once for each kind."""
    described = issubclass(kind, TensorOp) or kind.name.split(".")[0] in DESCRIBED
    return not described or issubclass(kind, UnregisteredOp)


def is_unknown(op: Operation) -> bool:
    """Whether an op on tensors has no definition: it is of a foreign dialect, or of none."""
    return (
        _may_be_unknown(type(op))
        and name_of(op).split(".")[0] not in DESCRIBED
        and not op.regions
        and not op.successors
        and bool(op.results)
        and all(isinstance(v.type, TensorType) for v in (*op.operands, *op.results))
    )


def name_of(op: Operation) -> str:
    """Return the name of an op in the text."""
    return op.op_name.data if isinstance(op, UnregisteredOp) else op.name


def adopt_unknown(block: Block) -> Sequence[Operation]:
    """Replace the ops of a block that have no definition by custom ops of their names, and return
    the block's ops. The options of a custom op are the op's properties, and its attributes without
    a dialect's prefix."""
    rewriter, ops = Rewriter(), ops_of(block)
    if not any(map(_may_be_unknown, {*map(type, ops)})):
        return ops
    for op in filter(is_unknown, ops):
        attributes = {k: a for k, a in op.attributes.items() if k == RECOMPUTE or "." in k}
        options = {k: a for k, a in op.attributes.items() if k not in (*attributes, "op_name__")}
        props: dict[str, Attribute] = {"callee": StringAttr(name_of(op))}
        if options := {**op.properties, **options}:
            props["options"] = DictionaryAttr(options)
        new = rewriter.before(op).create(
            CustomOp, list(op.operands), [v.type for v in op.results], props, attributes
        )
        rewriter.replace(op, new.results)
    return ops_of(block)
