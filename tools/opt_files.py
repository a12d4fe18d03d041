"""The input and the output files of `shard-opt`."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from shardir.diagnostics import ShardirError
from shardir.rewriting.options import UsageError
from shardir.syntax.files import write_text

SEPARATOR = "// -----"
"""The line between two programs of one file."""


def read_input(name: str | None) -> tuple[str, str]:
    """Return the name and the text of a file, or of stdin."""
    if name in (None, "-"):
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
    """Return the programs between `// -----` lines, each at its own line numbers."""
    chunks: list[list[str]] = [[]]
    for number, line in enumerate(text.split("\n")):
        if line.strip() == SEPARATOR:
            chunks.append([""] * (number + 1))
        else:
            chunks[-1].append(line)
    return ["\n".join(lines) for lines in chunks]


def write_output(name: str | None, text: str) -> None:
    """Write text to a file, or to stdout."""
    if name in (None, "-"):
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(name)
    if path.is_dir():
        raise UsageError(f"expected a file for -o, got the directory {name}")
    try:
        write_text(path, text)
    except ShardirError as e:
        raise UsageError(str(e)) from None


def write_directory(out: Path, target: str, emit: Callable[[Path], None]) -> None:
    """Emit into a temporary directory beside `out`, and move its files there.

    So an error leaves no incomplete output.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"expected a directory for -o with -t {target}, got the file {out}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as e:
        raise UsageError(f"cannot write {out}: {reason(e)}") from None
    try:
        fresh.chmod(0o755)
        emit(fresh)
        try:
            _move_into(fresh, out)
        except OSError as e:
            raise UsageError(f"cannot write {out}: {reason(e)}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _move_into(fresh: Path, out: Path) -> None:
    if not out.exists():
        os.replace(fresh, out)
        return
    for path in sorted(fresh.rglob("*")):
        target = out / path.relative_to(fresh)
        if path.is_dir():
            target.mkdir(exist_ok=True)
        else:
            os.replace(path, target)


def reason(e: Exception) -> str:
    """Return the system's message of an OSError, or the text of another error."""
    return (e.strerror if isinstance(e, OSError) else None) or str(e)
