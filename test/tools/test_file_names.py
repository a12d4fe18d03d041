"""Names and lines of input files: any bytes in a name, any characters in a line."""

import os
from pathlib import Path

import pytest

from shardir.tools.opt import main

PROGRAM = (
    "dist.mesh @m <dp = 2>\n"
    "func.func @f(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {\n"
    "  %y = nn.relu %x : (tensor<8x4xf32>) -> tensor<8x4xf32>\n"
    "  func.return %y : tensor<8x4xf32>\n"
    "}\n"
)
SEPARATORS = "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""What ends a line for str.splitlines; for MLIR and Python's own parser a newline does."""


@pytest.mark.parametrize("c", SEPARATORS, ids=ascii)
def test_a_line_ends_with_a_newline(
    c: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In plans and in programs: an error is at its line, and no error is lost."""
    program, plan = tmp_path / "f.ir", tmp_path / "f.plan"
    program.write_text(PROGRAM, newline="")
    plan.write_text(f"# a{c}b\n\n%", newline="")
    assert main([str(program), "--plan", str(plan), "-p", "train"]) == 1
    assert f"{plan}:3:1: error: " in capsys.readouterr().err
    plan.write_text(f"x{c}\\u00e9", newline="")
    assert main([str(program), "--plan", str(plan), "-p", "train"]) == 1
    assert f"{plan}:1:" in capsys.readouterr().err
    program.write_text(f"// a{c}b\n\n{PROGRAM}wrong", newline="")
    assert main([str(program)]) == 1
    assert f"{program}:8:1: error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [b"\xff.ir", b"a\nimport os\n#.ir", b"a\rb.ir", b'a"""b\'.ir', b"a\\\\n{x}%s.ir", b"a\x85.ir",
     "a\u2028\u202e.ir".encode(), b"a\x0c\x1b[1m.ir"],
    ids=ascii,
)  # fmt: skip
def test_a_program_of_any_name_is_emitted(name: bytes, tmp_path: Path) -> None:
    """To a directory, whose program is the same but for the name in its comments."""
    programs = []
    for path in (tmp_path / "f.ir", tmp_path / os.fsdecode(name)):
        path.write_text(PROGRAM)
        out = tmp_path / f"out{len(programs)}"
        arguments = [str(path), "-p", "propagate-strategies,lower-to-spmd", "-t", "torch"]
        assert main([*arguments, "-o", str(out), "--traceback"]) == 0
        programs.append((out / "program.py").read_text())
        compile(programs[-1], "program.py", "exec")
    plain, named = (
        [l.partition("#")[0] for l in p.split("def f")[1].split("\n")] for p in programs
    )
    assert plain == named
