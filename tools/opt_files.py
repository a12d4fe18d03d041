"""The input and the output files of `shard-opt`."""

import os
import sys
from pathlib import Path

from shardir.diagnostics import ShardirError
from shardir.rewriting.options import UsageError
from shardir.syntax.files import reason, write_text

SEPARATOR = "// -----"
"""The line between two programs of one file."""


def read_input(name: str | None) -> tuple[str, str]:
    """Read a file or stdin; return its name and text. Raises UsageError."""
    if name in (None, "-"):
        if sys.stdin is None:
            raise UsageError("expected a program on the standard input, which is closed")
        name, data = "<stdin>", sys.stdin.buffer.read()
    else:
        try:
            data = Path(name).read_bytes()
        except IsADirectoryError:
            raise UsageError(f"expected a program, got the directory {name}") from None
        except (OSError, ValueError) as e:
            raise UsageError(f"cannot read {name}: {reason(e)}") from None
    try:
        return name, data.decode()
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise UsageError(
            f"{name}:{line}: expected UTF-8 text, got the byte 0x{data[e.start]:02x}"
        ) from None


def split_chunks(text: str) -> list[str]:
    """Split a text at `// -----` lines. Leading empty lines keep each program's line numbers."""
    chunks: list[list[str]] = [[]]
    for number, line in enumerate(text.split("\n")):
        if line.strip() == SEPARATOR:
            chunks.append([""] * (number + 1))
        else:
            chunks[-1].append(line)
    return ["\n".join(lines) for lines in chunks]


def write_output(name: str | None, text: str) -> None:
    """Write text to a file or stdout. Raises UsageError."""
    if name in (None, "-"):
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    if os.path.isdir(name):
        raise UsageError(f"expected a file for -o, got the directory {name}")
    try:
        write_text(Path(name), text)
    except ShardirError as e:
        raise UsageError(str(e)) from None
