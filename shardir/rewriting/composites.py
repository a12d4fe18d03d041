"""Replacements of ops: by their decomposition, for composites anywhere and for others where
sharded; and by `nn.custom`, for ops without a definition."""

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
    """Replace an op by its decomposition, with results in the same layouts; return their values.

    The new ops have its location and its attributes, such as the mark for `recompute`. Those that
    only unused results need are erased.
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
    """Decompose the composites of a kind in a block, laid out where there is a mesh, and make
    custom ops of those without a definition."""
    rewriter = Rewriter(mesh)
    for op in adopt(block):
        if isinstance(op, kind):
            decompose(op, rewriter)


def warn_of_lost_strategies(block: Block) -> None:
    """Warn of the strategies of composites that are to be decomposed without a mesh."""
    for op in block.ops:
        if isinstance(op, Composite) and op.strategy is not None:
            warn(
                op,
                f"the strategy of {op.name} is lost, since it is decomposed; annotate the layouts "
                "of its operands and results instead",
            )


def expanded(module: ModuleOp) -> ModuleOp:
    """Return the module, or a copy of it without composites and ops that have no definition."""
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
    """Whether ops of a kind may have no definition, asked once for each kind."""
    described = issubclass(kind, TensorOp) or kind.name.split(".")[0] in DESCRIBED
    return not described or issubclass(kind, UnregisteredOp)


def is_unknown(op: Operation) -> bool:
    """Whether an op is one on tensors that has no definition: of another dialect, or of none."""
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


def adopt(block: Block) -> Sequence[Operation]:
    """Replace the ops of a block that have no definition by custom ops of their names, and return
    its ops. The options are an op's properties, and its attributes but those of other dialects."""
    rewriter, ops = Rewriter(), ops_of(block)
    if not any(map(_may_be_unknown, {*map(type, ops)})):
        return ops
    for op in filter(is_unknown, ops):
        kept = {k: a for k, a in op.attributes.items() if k == RECOMPUTE or "." in k}
        options = {k: a for k, a in op.attributes.items() if k not in (*kept, "op_name__")}
        props: dict[str, Attribute] = {"callee": StringAttr(name_of(op))}
        if options := {**op.properties, **options}:
            props["options"] = DictionaryAttr(options)
        new = rewriter.before(op).create(
            CustomOp, list(op.operands), [v.type for v in op.results], props, kept
        )
        rewriter.replace(op, new.results)
    return ops_of(block)
