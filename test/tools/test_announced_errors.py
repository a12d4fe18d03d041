"""`shard-opt --split-input-file` and `--verify-diagnostics`: programs with announced errors."""

import re
from pathlib import Path

import pytest
from support.driver import PROGRAM, run

from shardir.diagnostics import Diagnostic
from shardir.tools.expected import compare, expected_messages

pytestmark = pytest.mark.usefixtures("sample_passes")

SPLIT = """func.func @f() {
  func.return
}
// -----
func.func @g(%x: i33x) { // expected-error {{expected a type, got i33x}}
  func.return
}
// -----
// expected-error@+1 {{expected a registered operation, got func.fun}}
func.fun @h() {
// -----
func.func @i() {
  func.return
}
"""


def test_split_input() -> None:
    code, out, err = run("--split-input-file", text=SPLIT)
    assert code == 1
    assert re.findall(r"<stdin>:(\d+):(\d+): error", err) == [("5", "18"), ("10", "1")]
    code, out, err = run("--split-input-file", "--verify-diagnostics", text=SPLIT)
    assert (code, err) == (0, "")
    assert re.findall(r"@\w", out) == ["@f", "@i"]
    assert out.count("// -----\n") == 1


def test_announced_errors() -> None:
    text = SPLIT.replace("i33x}}", "i34x}}").replace("func.fun}}", "func.funny}}")
    code, _, err = run("--split-input-file", "--verify-diagnostics", text=text)
    assert code == 1
    assert [line for line in err.splitlines() if line.startswith(("unexpected", "<stdin>"))] == [
        "unexpected error: <stdin>:5:18: error: expected a type, got i33x; did you mean i32?",
        "<stdin>:5: expected error was not produced: expected a type, got i34x",
        "unexpected error: <stdin>:10:1: error: expected a registered operation, got func.fun; "
        "did you mean func.func?",
        "<stdin>:9: expected error was not produced: "
        "expected a registered operation, got func.funny",
    ]
    code, _, err = run("--verify-diagnostics", text=PROGRAM + "// expected-error@-1 {{x}}")
    assert (code, err) == (1, "<stdin>:4: expected error was not produced: x\n")
    text = "func.func @f() { // expected-error {{@f is wrong}} expected-warning {{will not}}\n"
    code, _, err = run("-p", "complain", "--verify-diagnostics", text=text + "  func.return\n}")
    assert (code, err) == (0, "")
    code, _, err = run(
        "-p", "refuse", "--verify-diagnostics",
        text="// expected-error@unknown {{no such thing}}\n" + PROGRAM,
    )  # fmt: skip
    assert (code, err) == (0, "")


@pytest.mark.parametrize("line", [0, 1, 2, 3])
@pytest.mark.parametrize("severity", ["error", "warning"])
@pytest.mark.parametrize("message", ["type i33x is unknown", "no type"])
def test_an_announced_error_has_its_line_severity_and_text(
    line: int, severity: str, message: str
) -> None:
    found = Diagnostic(message, line=line, severity=severity)
    fits = (line, severity, message) == (2, "error", "type i33x is unknown")
    assert len(compare("x.ir", "\n// expected-error {{i33x}}\n", [found])) == (0 if fits else 2)


def test_lines_of_announced_errors() -> None:
    text = (
        "x // expected-error {{a}}\n// expected-warning@+1 {{b}}\n\n// expected-error@above {{c}}\n"
        "// expected-error @ below {{d}} expected-error@unknown {{e}}\nexpected-error {{no}}"
    )
    assert [(e.severity, e.line, e.text) for e in expected_messages(text)] == [
        ("error", 1, "a"), ("warning", 3, "b"), ("error", 3, "c"), ("error", 6, "d"),
        ("error", 0, "e"),
    ]  # fmt: skip


def test_verify_diagnostics_writes_nothing_unexpected(tmp_path: Path) -> None:
    path = tmp_path / "out.ir"
    text = "x.y // expected-error {{of a registered dialect}}"
    assert run("-o", str(path), "--verify-diagnostics", text=text)[0] == 0
