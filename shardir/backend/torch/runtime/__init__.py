"""The files that are copied beside an emitted program. They import Python, torch and each other.

A program gets those that it imports, and those that they import.
"""

import ast
import sys
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from shardir.diagnostics import ShardirError

FOLDER = Path(__file__).parent
if str(FOLDER) not in sys.path:  # the launcher imports some of them, which import each other
    sys.path.append(str(FOLDER))

RUNTIME_FILES = tuple(sorted(p.name for p in FOLDER.glob("*.py") if p.name != "__init__.py"))

MEASURING = "measure_main"
"""The module that measures programs; copied only where they are measured."""


def files_for(modules: Iterable[str]) -> tuple[str, ...]:
    """The files of these modules of the runtime and of all that they import; modules that are not
    of the runtime are left out."""
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        name = f"{waiting.pop()}.py"
        if name in RUNTIME_FILES and name not in found:
            found.add(name)
            waiting += _imported(name)
    return tuple(sorted(found))


def runtime_module(name: str) -> ModuleType:
    """A module of the runtime in this process, by the name that programs import it by.

    Raises:
        ShardirError: another module has that name.
    """
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    module = import_module(name)
    if Path(module.__file__ or "").parent != FOLDER:
        raise ShardirError(
            f"expected the module {name} of shardir, got {module.__file__}; rename the other one"
        )
    return module


@cache
def _imported(name: str) -> frozenset[str]:
    """The modules that a file of the runtime imports, within its functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / name).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return frozenset(found)
