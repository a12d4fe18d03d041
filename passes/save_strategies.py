"""save-strategies: a program with layouts -> the same, and a file with its strategies and layouts.

    %h = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (...) -> tensor<8x6xf32, #dist.layout<...>>
 -> @loss %h = nn.matmul strategy <((2, 1), (1, 2))> : <@m, [{dp}, {tp}]>  // net.ir:9

Runs after propagate-strategies or search-strategies; load-strategies reads the file in their stead.

1. Writes a line for each argument and each op with results, of every function in the global view
   that has layouts: its strategy, if it has one, its mark for `recompute`, and the layouts. Names
   are those of the printed text.
2. Writes the meshes and the results of a search (`search`) too.
3. The file is written completely or not at all. The program does not change.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation

from shardir.algebra.saved import ARGUMENT, Line, Saved
from shardir.analysis.functions import makers, name_of
from shardir.diagnostics import Failure, Located
from shardir.dialects.dist import layout_of
from shardir.dialects.locations import short_location
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.marks import RECOMPUTE, SEARCHED
from shardir.syntax.files import write_text
from shardir.syntax.printer import value_names


@dataclass(frozen=True)
class SaveStrategies(GlobalPass):
    """Writes the strategies and layouts of a program to a file."""

    name = "save-strategies"
    file: str
    """The file, which is replaced."""

    def concerns(self, f: Function) -> bool:
        return super().concerns(f) and f.has_layouts

    def check(self, f: Function) -> Iterable[Located]:
        return f.without_layout()

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        saved = Saved()
        for f in functions:
            assert f.mesh is not None
            saved.meshes[f.mesh.name] = f.mesh
            saved.lines += _lines(f.op, f.block)
            if (found := f.op.attributes.get(SEARCHED)) is not None:
                saved.found[f.name] = str(found)
        if not saved.lines:
            raise Failure(
                "expected a function with layouts to save, got none; run propagate-strategies or "
                "search-strategies before"
            )
        write_text(Path(self.file), str(saved))


def _lines(f: FuncOp, block: Block) -> Iterator[Line]:
    names = value_names(block)
    for by, values in makers(block):
        strategy = by.strategy if isinstance(by, TensorOp) else None
        layouts = tuple([layout for v in values if (layout := layout_of(v)) is not None])
        yield Line(
            name_of(f),
            tuple([names[v] for v in values]),
            by.name if isinstance(by, Operation) else ARGUMENT,
            None if strategy is None else strategy.data,
            layouts,
            short_location(by),
            recompute=isinstance(by, Operation) and RECOMPUTE in by.attributes,
        )
