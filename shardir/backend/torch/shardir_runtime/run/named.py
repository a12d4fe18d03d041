"""Functions of a program whose statements have names in a profiler of torch.

    with torch.profiler.profile() as profile:
        trainer.step(x, labels)                     # ranges such as `h = x @ w1  # model.py:9`

They are compiled from program.py again when a profiler first sees a call, with a mark before each
statement (trace.py): a call without a profiler is as it was.
"""

import ast
import linecache
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from torch.autograd.profiler import record_function

from .anomalies import source_of
from .program_module import PROGRAM, with_this_runtime
from .trace import MARK, Marks

NAME_LENGTH = 100
"""The number of characters of a statement in its name."""


def named_functions(functions: Mapping[str, Callable]) -> dict[str, Callable]:
    """Return functions of a program file with names of their statements; others, such as steps in
    stages, and functions that torch.compile has made, as they are."""
    made: dict[str, dict[str, Any]] = {}
    found = dict(functions)
    for name, f in functions.items():
        if type(f) is not FunctionType or Path(f.__code__.co_filename).name != PROGRAM:
            continue
        path = f.__code__.co_filename
        if path not in made:
            made[path] = _named_module(path)
        if type(named := made[path].get(f.__name__)) is FunctionType:
            found[name] = named
    return found


class StatementRanges:
    """The range of the current statement. A `return` has a mark too, which ends the last range.

    Args:
        names: the names of statements by their lines.
    """

    def __init__(self, names: Mapping[int, str]):
        self.names = names
        self._open: record_function | None = None

    def __call__(self, line: int) -> None:
        """End the range of the statement before, and begin that of a line, if it has a name."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
        if line in self.names:
            self._open = record_function(self.names[line])
            self._open.__enter__()


def _named_module(path: str) -> dict[str, Any]:
    lines = linecache.getlines(path)
    tree = ast.parse(with_this_runtime("".join(lines).encode()))
    names = dict[int, str]()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Assign | ast.AugAssign | ast.Expr):
            text = ast.unparse(statement)[:NAME_LENGTH]
            source = source_of(lines, statement.lineno)
            names[statement.lineno] = f"{text}  # {source}" if source else text
    marked = ast.fix_missing_locations(Marks().visit(tree))
    made: dict[str, Any] = {"__name__": "program", "__file__": path, MARK: StatementRanges(names)}
    exec(compile(marked, path, "exec"), made)
    return made
