"""require-layouts: a program that says where every value lies -> the same, or what it leaves open.

    %h = nn.matmul %x, %w : (...) -> tensor<8x6xf32>
 -> error: [A4] %h in @loss has no layout, and manual nothing is decided for it

1. A value is stated by a layout in its type, or by the strategy of the op that makes it; an
   argument also by the strategies of the ops that take it, where they agree. `#dist.sharding` is no
   layout. Afterwards each has its layout.
2. An op without a strategy is computable where its operands lie, so that every redistribution is
   one that the text states: by `dist.redistribute`, by a strategy, or by the layout of a result.
3. All values and ops of which that is not so are named. Nothing is decided.
4. Functions in the local view say everything, and stay as they are; so does a function without a
   mesh, which is for one device.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from xdsl.dialects.builtin import TensorType
from xdsl.ir import Block, BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import named, values
from shardir.diagnostics import Located, ShardirError
from shardir.dialects.dist import layout_of, with_layout
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.bases import Function, GlobalPass, collect_errors
from shardir.rewriting.functions import update_signature
from shardir.rewriting.placement import is_decomposed, strategy_op_sharding, wanted
from shardir.rewriting.rewriter import set_type

Find = Callable[[Block, Mesh, str], Iterator[Located]]
"""What finds the errors of a block on a mesh, of a function of a name."""


@dataclass(frozen=True)
class RequireLayouts(GlobalPass):
    """Refuses a program that leaves open where a value lies or an op is calculated."""

    name = "require-layouts"

    def check_all(self, functions: Sequence[Function]) -> None:
        for find in (_by_strategies, _open_values, _open_ops):
            collect_errors(functions, partial(_at_function, find))

    def rewrite(self, f: Function) -> None:
        update_signature(f.op)


def _at_function(find: Find, f: Function) -> Iterator[Located]:
    """The errors of a function that has a mesh; those of arguments at the function."""
    if f.mesh is not None:
        yield from ((op or f.op, message) for op, message in find(f.block, f.mesh, f.name))


def _by_strategies(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """Writes the layouts that strategies state; what is wrong with them."""
    wished: dict[SSAValue, set[Layout]] = {}
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
                wished.setdefault(v, set()).add(layout.complete)
        for v, layout in zip(op.results, placement.results, strict=True):
            wished[v] = {layout.complete}
    for v, layouts in wished.items():
        if layout_of(v) is None and len(layouts) == 1:
            set_type(v, with_layout(unsharded_type(v), *layouts))


def _open_values(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """The values that nothing states, those of an op together."""
    lacking: dict[Operation | None, list[str]] = {}
    for v in values(block):
        if isinstance(v.type, TensorType) and layout_of(v) is None:
            op = v.owner if isinstance(v.owner, Operation) else None
            lacking.setdefault(op, []).append(named(v))
    for op, names in lacking.items():
        have = "have no layouts" if len(names) > 1 else "has no layout"
        yield (
            op,
            f"[A4] {', '.join(names)} in @{function} {have}, and manual none is made; write it "
            "into the type, or state a strategy, or choose the mode semi_auto",
        )


def _open_ops(block: Block, mesh: Mesh, function: str) -> Iterator[Located]:
    """The ops without a strategy that are not calculated where their operands lie."""
    for op in block.ops:
        if not isinstance(op, TensorOp) or op.strategy is not None or is_decomposed(op, mesh):
            continue
        for i, (v, want) in enumerate(zip(op.operands, wanted(op, mesh).operands, strict=True)):
            if (have := layout_of(v)) is not None and have.simplified(mesh) != want:
                yield (
                    op,
                    f"[A5] {op.name} in @{function} is not computable where its operands lie: "
                    f"operand {i} is [{have}] and goes to [{want}]; redistribute it by hand, or "
                    "state the op's strategy",
                )
                break
