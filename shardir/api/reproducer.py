"""Reproducers of internal errors: the program before the failing pass, and the remaining pipeline.

    // reproducer: {"passes": ["lower-to-spmd"], "target": "mlir"}
    // pass lower-to-spmd: AssertionError:
    // shardir 1.0, xdsl 0.74.0, numpy 2.3.0, torch 2.13.0, Python 3.11.7
    dist.mesh @m <dp = 2>
    ...

`shard-opt FILE --run-reproducer` runs it.
"""

import json
import os
import platform
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass

from shardir import pipelines
from shardir.diagnostics import ShardirError
from shardir.syntax.printer import print_module

HEAD = "// reproducer: "
PACKAGES = ("shardir", "xdsl", "numpy", "torch")


def write_reproducer(
    error: str,
    given: Callable[[], ModuleOp],
    text: str,
    passes: Sequence[ModulePass],
    done: int,
    context: Context,
    target: str = "mlir",
) -> Path | None:
    """Write a reproducer to the folder of temporary files, and return its path; None if that fails.

    Args:
        error: the internal error.
        given: makes the program before all passes.
        text: the program, if `given` fails or its program cannot be printed.
        passes, done: the passes of the pipeline, and the number of passes that have run. They run
            again.
        target: the target of the emission.
    """
    with suppress(Exception):
        try:
            module = given()
            for p in passes[:done]:
                p.apply(context, module)
            text, left = print_module(module), passes[done:]
        except Exception:
            left = passes
        record = {"passes": json.loads(pipelines.recorded(left)), "target": target}
        lines = [f"{HEAD}{json.dumps(record)}", f"// {' '.join(error.split())}", f"// {versions()}"]
        number, name = tempfile.mkstemp(prefix="shardir-reproducer-", suffix=".ir")
        with os.fdopen(number, "wb") as file:
            file.write("\n".join([*lines, text]).encode("utf-8", "surrogateescape"))
        return Path(name)
    return None


def read_reproducer(text: str, name: str) -> tuple[list[ModulePass], str]:
    """Return the passes and the target of a reproducer.

    Raises:
        ShardirError: the text is none.
    """
    head = text.partition("\n")[0]
    try:
        record: Any = json.loads(head.removeprefix(HEAD))
        return pipelines.of_record(json.dumps(record["passes"])), str(record["target"])
    except (ValueError, KeyError, TypeError):
        raise ShardirError(
            f"expected a reproducer, whose first line begins with {HEAD.strip()}, got {name}; use "
            "the file that an internal error names"
        ) from None


def versions() -> str:
    """Return the versions of Python, ours, and of packages that a compilation depends on."""
    found = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join([*found, f"Python {platform.python_version()}"])
