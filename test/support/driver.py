"""Passes, pipelines and a target for tests of shard-opt, and a call of it in this process."""

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp, StringAttr
from xdsl.dialects.func import FuncOp
from xdsl.passes import ModulePass
from xdsl.utils.exceptions import VerifyException
from xdsl.utils.target import Target

from shardir.diagnostics import Failure
from shardir.rewriting.options import Bytes, PassOptions
from shardir.syntax.source import warn
from shardir.tools import opt

PROGRAM = "func.func @f() {\n  func.return\n}\n"


@dataclass(frozen=True)
class Rename(PassOptions):
    """Give every function another name.

    More about it.
    """

    name = "rename"
    to: str = "g"
    times: int = 1
    loud: bool = False
    only: tuple[str, ...] | None = None
    size: Bytes = 0

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for f in op.ops:
            if isinstance(f, FuncOp):
                f.sym_name = StringAttr(self.to * self.times)


@dataclass(frozen=True)
class Complain(ModulePass):
    """Report an error for every function."""

    name = "complain"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for f in op.ops:
            warn(f, "this will not do")
        raise Failure(
            [(f, f"@{f.sym_name.data} is wrong") for f in op.ops if isinstance(f, FuncOp)]
        )


@dataclass(frozen=True)
class Crash(ModulePass):
    """Raise an internal error."""

    name = "crash"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        raise KeyError("oops")


@dataclass(frozen=True)
class Break(ModulePass):
    """Leave a module that does not verify."""

    name = "break"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        for f in op.ops:
            if isinstance(f, FuncOp):
                end = f.body.block.last_op
                assert end is not None
                f.body.block.erase_op(end)


@dataclass(frozen=True)
class Refuse(ModulePass):
    """Raise the errors of xDSL's passes."""

    name = "refuse"

    def apply(self, ctx: Context, op: ModuleOp) -> None:
        raise VerifyException("no such thing\nand a module of notes")


@dataclass(frozen=True)
class Folder(Target):
    """Write a directory, or fail."""

    name = "folder"
    fail: bool = False

    def emit(self, ctx: Context, module: ModuleOp, output: IO[str]) -> None:
        print("text", file=output)

    def emit_directory(self, ctx: Context, module: ModuleOp, original: ModuleOp, out: Path) -> None:
        if self.fail:
            raise Failure("this cannot be emitted")
        out.mkdir(parents=True, exist_ok=True)
        for name, m in (("now", module), ("before", original)):
            (f,) = (f for f in m.ops if isinstance(f, FuncOp))
            (out / name).write_text(f.sym_name.data)


NAMED = {
    "twice": "rename{to=a},rename{to=b}",
    "all": "twice,cse",
    "renames": "cse,rename{to=a},rename{only=f}",
}


def run(*args: str, text: str = PROGRAM, tmp: Path | None = None) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(text.encode()))
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as m:
        m.setattr("sys.stdin", stdin)
        try:
            code = opt.main(args)
        except SystemExit as e:
            code = int(e.code or 0)
    assert "Traceback" not in err.getvalue()
    return code, out.getvalue(), err.getvalue()
