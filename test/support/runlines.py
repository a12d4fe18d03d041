"""RUN lines in this process: `// RUN: shard-opt %s --pass-pipeline "a" | filecheck %s`.

A command is a pipeline of our own tools, the output of one going to the next. It is no shell:
it knows `|`, `&&`, `;`, `not`, `2>&1`, `> file`, `< file`, and the names `%s` (this file), `%S`
(its folder), `%t` (a fresh path) and `%T` (a fresh folder). `lit test` runs the same files.
"""

import io
import os
import re
import runpy
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from filecheck.main import main as filecheck

from support.extent import LONG

RUN = re.compile(r"^\s*//\s*RUN:\s*(.*?)\s*$")
IN_LONG_FORM = re.compile(r"%if long %\{ (.*) %\}")
"""A command of the long form alone (extent.py), as `lit` has it."""


class RunError(Exception):
    """A command that did not end as it should."""


def _shard_opt(argv: list[str]) -> object:
    from shardir.tools.opt import main

    return main(argv[1:])


def _shard_run(argv: list[str]) -> object:
    from shardir.tools.run import main

    return main(argv[1:])


def _shard_lsp(argv: list[str]) -> object:
    from shardir.tools.lsp import main

    return main(argv[1:])


def _shard_report(argv: list[str]) -> object:
    from shardir.tools.report import main

    return main(argv[1:])


def _cat(argv: list[str]) -> object:
    for name in argv[1:]:
        sys.stdout.write(Path(name).read_text())
    if not argv[1:]:
        sys.stdout.write(sys.stdin.read())
    return 0


def _echo(argv: list[str]) -> object:
    print(*argv[1:])
    return 0


def _ls(argv: list[str]) -> object:
    for name in argv[1:]:
        print(*sorted(os.listdir(name)), sep="\n")
    return 0


def _python(argv: list[str]) -> object:
    path = [str(Path(argv[1]).parent), *sys.path]
    with mock.patch.object(sys, "argv", argv[1:]), mock.patch.object(sys, "path", path):
        runpy.run_path(argv[1], run_name="__main__")
    return 0


TOOLS: dict[str, Callable[[list[str]], object]] = {
    "shard-opt": _shard_opt,
    "shard-lsp": _shard_lsp,
    "shard-report": _shard_report,
    "shard-run": _shard_run,
    "filecheck": filecheck,
    "cat": _cat,
    "echo": _echo,
    "ls": _ls,
    "python": _python,
}


def run_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The commands of a file in this form, with their lines."""
    for number, command in _every_run_line(path):
        if m := IN_LONG_FORM.fullmatch(command):
            if LONG:
                yield number, m[1]
        else:
            yield number, command


def _every_run_line(path: Path) -> Iterator[tuple[int, str]]:
    """The commands with their lines; a trailing backslash goes on in the next one."""
    command, first = "", 0
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
        if m := RUN.match(line):
            first = first if command else number
            command += m[1]
            if command.endswith("\\"):
                command = command[:-1]
            else:
                yield first, command
                command = ""
    if command:
        yield first, command


def run_tool(argv: list[str], stdin: bytes) -> tuple[int, str, str]:
    """Exit code, output and errors of one tool."""
    if argv[0] not in TOOLS:
        raise RunError(f"no tool {argv[0]}; there are {', '.join(TOOLS)} and not")
    out, err = io.StringIO(), io.StringIO()
    buffer = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "stdin", buffer),
    ):
        try:
            result = TOOLS[argv[0]](argv)
            code = result if isinstance(result, int) else 0
        except SystemExit as e:
            if isinstance(e.code, str):
                err.write(e.code + "\n")
            code = e.code if isinstance(e.code, int) else int(e.code is not None)
    return code, out.getvalue(), err.getvalue()


def run_stage(words: list[str], stdin: bytes, where: str) -> bytes:
    """One command of a pipeline; its output."""
    argv: list[str] = []
    merge, target = False, None
    rest = iter(words)
    for w in rest:
        if w == "2>&1":
            merge = True
        elif w in (">", "<", "2>"):
            name = next(rest)
            if w == "<":
                stdin = Path(name).read_bytes()
            elif w == ">":
                target = name
        else:
            argv.append(w)
    expect_failure = argv[0] == "not"
    argv = argv[expect_failure:]
    code, out, err = run_tool(argv, stdin)
    if (code != 0) != expect_failure:
        raise RunError(f"{where}\n`{shlex.join(argv)}` exited with {code}\n{err}{out[:4000]}")
    if merge:
        out = err + out
    if target is not None:
        Path(target).write_text(out)
        return b""
    return out.encode()


def run(command: str, path: Path, tmp: Path) -> None:
    """Runs one RUN line of `path`, with fresh files below `tmp`. Raises RunError."""
    names = {"%s": path, "%S": path.parent, "%t": tmp / "t", "%T": tmp}
    text = re.sub(r"%[sStT]\b", lambda m: shlex.quote(str(names[m[0]])), command)
    where = f"{path}\nRUN: {command}"
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words = list(lexer)
    stdin, stage = b"", []
    merged: list[str] = []
    for w in words:  # shlex takes `2>&1` apart
        if w == ">&" and merged and merged[-1] == "2":
            merged[-1] = "2>&"
        elif merged and merged[-1] == "2>&":
            merged[-1] += w
        elif w == ">" and merged and merged[-1] == "2":
            merged[-1] = "2>"
        else:
            merged.append(w)
    with chdir(tmp):
        for w in [*merged, ";"]:
            if w not in ("|", "&&", ";"):
                stage.append(w)
                continue
            if stage:
                stdin = run_stage(stage, stdin, where)
            if w != "|":
                stdin = b""
            stage = []
