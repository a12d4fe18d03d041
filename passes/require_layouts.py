"""require-layouts: a program with every value annotated -> a layout on every value, or errors.

    %h = nn.matmul %x, %w : (...) -> tensor<8x6xf32>
 -> error: [A4] expected a layout of %h in @loss, got none; annotate its type or its op, ...

1. A value is annotated by a layout in its type, or by the strategy of the op that makes it; an
   argument also by the strategies of the ops that use it, where they agree. `#dist.sharding` is no
   layout. Afterwards each value has its layout.
2. An op without a strategy is computable with the layouts of its operands. So every redistribution
   is annotated: by `dist.redistribute`, by a strategy, or by the layout of a result.
3. Every value and op that violates this is an error. No layout is chosen.
4. Functions in the local view, and functions without a mesh, are not changed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import named, values
from shardir.compat.xdsl import set_type
from shardir.diagnostics import Located, ShardirError, coded
from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, GlobalPass, collect_errors
from shardir.rewriting.functions import update_signature
from shardir.rewriting.placement import is_decomposed, placement_of, strategy_op_sharding

Check = Callable[[Block, Mesh, str], Iterator[Located]]
"""A check of a block, with its mesh and the name of its function."""


@dataclass(frozen=True)
class RequireLayouts(GlobalPass):
    """Refuses a program in which the layout of a value or the placement of an op is open."""

    name = "require-layouts"

    def check_all(self, functions: Sequence[Function]) -> None:
        for check in (_apply_strategies, _values_without_layout, _not_computable):
            collect_errors(functions, partial(_at_function, check))

    def rewrite(self, f: Function) -> None:
        update_signature(f.op)


def _at_function(check: Check, f: Function) -> Iterator[Located]:
    """Yield the errors of a function that has a mesh; errors of arguments are located at the
    function."""
    if f.mesh is not None:
        yield from ((op or f.op, message) for op, message in check(f.block, f.mesh, f.name))


def _apply_strategies(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """Set the layouts that strategies determine; yield an error for each invalid strategy."""
    determined: dict[SSAValue, set[Layout]] = {}
    for op in block.ops:
        if not isinstance(op, TensorOp) or op.strategy is None:
            continue
        try:
            placement = strategy_op_sharding(op, mesh)
        except ShardirError as e:
            yield op, f"{op.name} in @{function}: {e}"
            continue
        for v, layout in zip(op.operands, placement.operands, strict=True):
            if isinstance(v, BlockArgument):
                determined.setdefault(v, set()).add(layout.complete)
        for v, layout in zip(op.results, placement.results, strict=True):
            determined[v] = {layout.complete}
    for v, layouts in determined.items():
        if layout_of(v) is None and len(layouts) == 1:
            set_type(v, with_layout(unsharded_type(v), *layouts))


def _values_without_layout(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """Yield an error for each op with results without layouts, and one for the arguments."""
    lacking: dict[Operation | None, list[str]] = {}
    for v in values(block):
        if isinstance(v.type, TensorType) and layout_of(v) is None:
            op = v.owner if isinstance(v.owner, Operation) else None
            lacking.setdefault(op, []).append(named(v))
    for op, names in lacking.items():
        layouts = "layouts" if len(names) > 1 else "a layout"
        message = f"expected {layouts} of {', '.join(names)} in @{function}, got none"
        yield op, coded("A4", message)


def _not_computable(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """Yield an error for each op without a strategy that is not computable with the layouts of its
    operands."""
    for op in block.ops:
        if not isinstance(op, TensorOp) or op.strategy is not None or is_decomposed(op, mesh):
            continue
        for i, (v, layout) in enumerate(
            zip(op.operands, placement_of(op, mesh).operands, strict=True)
        ):
            if (assigned := layout_of(v)) is not None and assigned.simplified(mesh) != layout:
                operand = f"operand {i} of {op.name} in @{function}"
                yield op, coded("A5", f"expected [{layout}] for {operand}, got [{assigned}]")
                break
