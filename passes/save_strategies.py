"""save-strategies: a program that is laid out -> the same, and a file that says how.

    %h = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (...) -> tensor<8x6xf32, #dist.layout<...>>
 -> @loss %h = nn.matmul strategy <((2, 1), (1, 2))> : <@m, [{dp}, {tp}]>  // net.ir:9

Behind propagate-strategies or search-strategies; load-strategies takes the file in their place.

1. A line for each argument and each op with results, of every function in the global view that is
   laid out: its strategy, where it has one, whether it is done again (`recompute`), and the
   layouts. Names are those of the printed text.
2. What a search found (`search`), and the meshes, are in it too.
3. The file is written whole or not at all. The program stays as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation
from xdsl.passes import ModulePass

from shardir.algebra.saved import ARGUMENT, Line, Saved
from shardir.analysis.functions import has_layouts, is_local_body, makers, mesh_of, name_of, unlaid
from shardir.diagnostics import Failure
from shardir.dialects.dist import layout_of
from shardir.dialects.locations import short_location
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE, SEARCHED
from shardir.syntax.files import write_text
from shardir.syntax.printer import value_names


@dataclass(frozen=True)
class SaveStrategies(ModulePass):
    """Writes the strategies and layouts of a program to a file."""

    name = "save-strategies"
    file: str

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        saved = Saved()
        for f, block in bodies(op):
            mesh = mesh_of(f, op)
            if mesh is None or is_local_body(block) or not has_layouts(block):
                continue
            if (lacking := unlaid(block)) is not None:
                message = f"a value in @{name_of(f)} has no layout; run propagate-strategies"
                raise Failure([(lacking, message)])
            saved.meshes[mesh.name] = mesh
            saved.lines += _lines(f, block)
            if (found := f.attributes.get(SEARCHED)) is not None:
                saved.found[name_of(f)] = str(found)
        if not saved.lines:
            raise Failure(
                "no function is laid out, so there are no strategies to save; run "
                "propagate-strategies or search-strategies before"
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
