"""save-strategies: a program with layouts -> a file with its plan.

    %h = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (...) -> tensor<8x6xf32, #dist.layout<...>>
 -> values "h" : [{dp}, {tp}], strategy <((2, 1), (1, 2))>

Runs after propagate-strategies or search-strategies. apply-plan reads the file: it is a plan, which
also works with some of its lines removed.

1. Writes the layout of each argument and value of every function in the global view that has
   layouts, the strategies of ops, marks, and the results of a search. Applying that plan in the
   same pipeline restores the program.
2. The file is written completely or not at all. The program does not change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardir.diagnostics import Failure, Located
from shardir.rewriting.annotated_plan import complete_plan
from shardir.rewriting.bases import Function, GlobalPass
from shardir.syntax.files import write_text


@dataclass(frozen=True)
class SaveStrategies(GlobalPass):
    """Writes the strategies and layouts of a program to a file, as a plan."""

    name = "save-strategies"
    file: str
    """The file, which is replaced."""

    def concerns(self, f: Function) -> bool:
        return super().concerns(f) and f.has_layouts

    def check(self, f: Function) -> Iterable[Located]:
        return f.without_layout()

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        if not functions:
            raise Failure(
                "expected a function with layouts to save, got none; run propagate-strategies or "
                "search-strategies before"
            )
        write_text(Path(self.file), str(complete_plan(functions[0].module)))
