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
    make: Callable[[], ModuleOp],
    text: str,
    passes: Sequence[ModulePass],
    done: int,
    context: Context,
    target: str = "mlir",
) -> Path | None:
    """Write a reproducer to the folder of temporary files; return its path, or None if that fails.

    Args:
        error: the description of the internal error.
        make: makes the program before all passes.
        text: the text of the program, used if `make` fails or its program cannot be printed.
        passes, done: the passes of the pipeline, and the number of completed passes. These run
            again.
        target: the emission target.
    """
    with suppress(Exception):
        try:
            module = make()
            for p in passes[:done]:
                p.apply(context, module)
            text, remaining = print_module(module), passes[done:]
        except Exception:
            remaining = passes
        record = {"passes": json.loads(pipelines.recorded(remaining)), "target": target}
        lines = [f"{HEAD}{json.dumps(record)}", f"// {' '.join(error.split())}", f"// {versions()}"]
        number, name = tempfile.mkstemp(prefix="shardir-reproducer-", suffix=".ir")
        with os.fdopen(number, "wb") as file:
            file.write("\n".join([*lines, text]).encode("utf-8", "surrogateescape"))
        return Path(name)
    return None


def read_reproducer(text: str, name: str) -> tuple[list[ModulePass], str]:
    """Return the passes and the target of a reproducer.

    Raises:
        ShardirError: the text is no reproducer.
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
    """Return the versions of shardir, of the packages it depends on, and of Python."""
    texts = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            texts.append(f"{package} {version(package)}")
    return ", ".join([*texts, f"Python {platform.python_version()}"])
