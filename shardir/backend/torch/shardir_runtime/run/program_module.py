"""program.py as a module of a process that already has a runtime."""

import linecache
import re
from pathlib import Path
from types import ModuleType

from ..plan.program import PlanError

ROOT = __name__.removesuffix(".run.program_module")
"""The name of the runtime in this process: `shardir_runtime`, or its name within shardir."""

IMPORTS = re.compile(rb"^from shardir_runtime\b", re.MULTILINE)
OLDER = re.compile(rb"^import runtime as rt$", re.MULTILINE)


PROGRAM = "program.py"
"""The file that every rank runs."""


def with_this_runtime(text: bytes) -> bytes:
    """Return the text of a program that imports the runtime of this process."""
    return IMPORTS.sub(f"from {ROOT}".encode(), text)


def program_module(directory: Path) -> ModuleType:
    """Return program.py of a directory as a new module, with the runtime of this process.

    Raises:
        PlanError: the program is of an earlier version, whose runtime was not a package.
    """
    path = directory / PROGRAM
    text = path.read_bytes()
    if OLDER.search(text):
        raise PlanError(
            f"{path}: expected a program that imports shardir_runtime, got one of an earlier "
            "version; compile it again"
        )
    # For tracebacks, also where the directory is removed.
    lines = text.decode(errors="replace").splitlines(keepends=True)
    linecache.cache[str(path)] = len(text), None, lines, str(path)
    module = ModuleType(f"program_{directory.name}")
    module.__file__ = str(path)
    exec(compile(with_this_runtime(text), str(path), "exec"), vars(module))
    return module
