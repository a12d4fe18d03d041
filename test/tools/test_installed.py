"""Another package's dialect and pass, found by its entry point, in all tools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.extent import sampled

ACME = '''
from dataclasses import dataclass

from xdsl.dialects.func import FuncOp
from xdsl.ir import Dialect
from xdsl.irdl import AnyAttr, IRDLOperation, irdl_op_definition, operand_def
from xdsl.passes import ModulePass
from xdsl.universe import Universe

@irdl_op_definition
class WatchOp(IRDLOperation):
    name = "acme.watch"
    value = operand_def(AnyAttr())
    assembly_format = "$value attr-dict `:` type($value)"

@dataclass(frozen=True)
class Watch(ModulePass):
    """Watches the first argument of each function."""
    name = "acme-watch"

    def apply(self, ctx, op):
        for f in op.ops:
            if isinstance(f, FuncOp):
                watch = WatchOp(operands=[f.args[0]])
                f.body.block.insert_op_before(watch, f.body.block.first_op)

DIALECTS = {"acme": lambda: Dialect("acme", [WatchOp])}
UNIVERSE = Universe(all_dialects=DIALECTS, all_passes={"acme-watch": lambda: Watch})
'''
PROGRAM = "func.func @f(%x: tensor<4xf32>) {\n  func.return\n}\n"
USE = f"""
import io
from contextlib import redirect_stdout

import shardir
from shardir.tools import opt

text = shardir.compile({PROGRAM!r}, "acme-watch").text
assert '"acme.watch"(%x)' in text, text
assert shardir.compile(text, "inline-calls").text == text
for arguments, expected in (
    (["--list-passes"], "acme-watch\\n    Watches the first argument of each function."),
    (["acme.ir", "-p", "acme-watch"], text),
):
    with redirect_stdout(io.StringIO()) as out:
        assert opt.main(arguments) == 0
    assert expected in out.getvalue(), out.getvalue()
"""


def run_beside(folder: Path, *words: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python where a package of the folder is installed."""
    information = folder / "acme-1.0.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text("Name: acme\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[xdsl.universe]\nacme = acme:UNIVERSE\n")
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, *words], env={**os.environ, "PYTHONPATH": path}, cwd=folder,
        input=input, capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_package_is_known_to_all_tools(tmp_path: Path) -> None:
    (tmp_path / "acme.py").write_text(ACME)
    (tmp_path / "acme.ir").write_text(PROGRAM)
    done = run_beside(tmp_path, "-c", USE)
    assert (done.returncode, done.stderr) == (0, "")


BROKEN = """
from xdsl.universe import Universe

def broken():
    import no_such_module

UNIVERSE = Universe(all_dialects={"acme": broken}, all_passes={"acme-watch": broken})
"""
NAMED_AS_OURS = "from shardir.universe import UNIVERSE\n"


LEFT_OUT = "the plugin acme (acme:UNIVERSE) is left out: "
NOT_LOADED = [
    (None, f"{LEFT_OUT}ModuleNotFoundError: No module named"),
    ("UNIVERSE = 3\n", f"{LEFT_OUT}TypeError: expected"),
    (NAMED_AS_OURS, f"{LEFT_OUT}ValueError: expected new"),
    (BROKEN, ""),
]


@pytest.mark.parametrize(("module", "message"), sampled(NOT_LOADED, 1))
def test_a_package_that_does_not_load_is_left_out(
    module: str | None, message: str, tmp_path: Path
) -> None:
    """A warning names it, and what does not need it works."""
    if module is not None:
        (tmp_path / "acme.py").write_text(module)
    done = run_beside(tmp_path, "-m", "shardir.tools.opt", "--list-passes")
    assert done.returncode == 0, done.stderr
    assert "lower-to-spmd" in done.stdout
    assert done.stderr.startswith(f"shard-opt: warning: {message}") if message else not done.stderr
    if module == BROKEN:
        why = "of the plugin acme cannot be loaded: ModuleNotFoundError: No module named"
        assert f"acme-watch\n    acme-watch {why}" in done.stdout
        for words, text in (
            (("-p", "acme-watch"), "func.func private @f()"),
            ((), '"acme.watch"() : () -> ()'),
        ):
            done = run_beside(tmp_path, "-m", "shardir.tools.opt", *words, input=text)
            assert done.returncode in (1, 2), done.stderr
            assert why in done.stderr
            assert "Traceback" not in done.stderr
