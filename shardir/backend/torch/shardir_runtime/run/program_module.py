"""program.py as a module of a process that has a runtime already."""

import re
from pathlib import Path
from types import ModuleType

from ..plan.program import PlanError

ROOT = __name__.removesuffix(".run.program_module")
"""The name of the runtime in this process: `shardir_runtime`, or that within shardir."""

IMPORTS = re.compile(rb"^from shardir_runtime\b", re.MULTILINE)
OLDER = re.compile(rb"^import runtime as rt$", re.MULTILINE)


def with_this_runtime(text: bytes) -> bytes:
    """Return the text of a program with imports of the runtime of this process."""
    return IMPORTS.sub(f"from {ROOT}".encode(), text)


def program_module(directory: Path) -> ModuleType:
    """Return program.py of a directory, under a name of its own, with the runtime of this process.

    Raises:
        PlanError: it is of a version whose runtime was no package.
    """
    path = directory / "program.py"
    text = path.read_bytes()
    if OLDER.search(text):
        raise PlanError(
            f"{path}: expected a program that imports shardir_runtime, got one of an earlier "
            "version; compile it again"
        )
    module = ModuleType(f"program_{directory.name}")
    module.__file__ = str(path)
    exec(compile(with_this_runtime(text), str(path), "exec"), vars(module))
    return module
