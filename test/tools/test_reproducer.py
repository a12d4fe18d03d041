"""Reproducers: an internal error of each pass writes a file that fails, or goes on, as the run."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

import shardir
from shardir import pipelines
from shardir.tools.opt import main

PROGRAM = """dist.mesh @m <dp = 2, tp = 2>
func.func private @loss(
    %x: tensor<8x4xf32> {train.input = #train.init<normal>},
    %w: tensor<4x4xf32> {train.parameter = "w", train.init = #train.init<normal, std = 0.5>}
) -> tensor<f32> {
  %h = nn.matmul %x, %w
  %loss = nn.reduce <mean> %h dims <0, 1>
  func.return %loss
}
train.step @step of @loss <sgd, lr = 0.1>
"""
PASSES = [p.name for p in pipelines.build("train")]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program, in a folder that is that of temporary files too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "net.ir"
    path.write_text(PROGRAM)
    return path


def failing(name: str, m: pytest.MonkeyPatch) -> None:
    """Let a pass change the program and fail."""

    def apply(self: Any, context: Any, module: Any) -> None:
        for op in list(module.body.ops):
            op.detach()
        raise IndexError("no such\nindex")

    m.setattr(pipelines.PASSES[name](), "apply", apply)


def run(capfd: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(w) for w in words])
    return code, *capfd.readouterr()


@pytest.mark.parametrize("name", sorted(set(PASSES)))
def test_the_reproducer_of_a_pass_runs_as_the_program(
    name: str, program: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the error it fails as the program did; without it the result is that of the program."""
    expected = run(capfd, program, "-p", "train", "-t", "torch")
    assert expected[0] == 0
    with pytest.MonkeyPatch.context() as m:
        failing(name, m)
        code, _, err = run(capfd, program, "-p", "train", "-t", "torch")
        (path,) = program.parent.glob("shardir-reproducer-*.ir")
        assert code == 70
        assert f"internal error in pass {name}: IndexError: no such" in err
        assert str(path) in err
        code, _, err = run(capfd, path, "--run-reproducer")
        assert code == 70
        assert f"internal error in pass {name}: IndexError: no such" in err
        lines = path.read_text().split("\n")
        assert name in lines[0]
        assert lines[1].startswith(f"// pass {name}: IndexError: no such")
        for package in ("shardir", "xdsl", "numpy", "torch", "Python"):
            assert f"{package} " in lines[2]
    code, out, _ = run(capfd, path, "--run-reproducer")
    assert code == 0
    assert code_of(out) == code_of(expected[1])


def code_of(program: str) -> list[str]:
    """The lines of a program without its comments, which have names and lines of the source."""
    lines = program[program.index("\ndef ") :].split("\n")
    return [kept for l in lines if (kept := l.partition("#")[0].rstrip())]


def test_a_note_of_the_exception_names_the_file(program: Path) -> None:
    for given in (PROGRAM, shardir.parse(PROGRAM)):
        with pytest.MonkeyPatch.context() as m:
            failing(PASSES[-1], m)
            with pytest.raises(IndexError) as e:
                shardir.compile(given, "train")
        (note,) = e.value.__notes__
        path = Path(note.split()[-2])
        assert main([str(path), "--run-reproducer"]) == 0
        path.unlink()


def test_an_error_is_reported_where_no_reproducer_can_be_written(
    program: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkstemp", full)
    failing(PASSES[0], monkeypatch)
    code, _, err = run(capfd, program, "-p", "train")
    assert code == 70
    assert "IndexError: no such" in err
    assert "report it with the input" in err


def test_another_file_is_no_reproducer(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for text in (PROGRAM, "", "// reproducer: {", '// reproducer: {"passes": [3]}'):
        program.write_text(text)
        code, _, err = run(capfd, program, "--run-reproducer")
        assert code == 2
        assert "expected a reproducer, whose first line begins with // reproducer:" in err
