"""An emitted program's directory: the plan and its data; and the Python interface."""

import sys
from typing import Any

import numpy as np
import pytest
from support.emitted import STEP, body_of

import shardir
from shardir.backend.torch.emit.program import program_text
from shardir.syntax.parser import parse

DATA = """
func.func @step(
    %x: tensor<4x3xf32> {train.input = #train.init<file, path = "d.npz", array = "x">},
    %n: tensor<4xi32> {train.input = #train.init<file, path = "d.npz", array = "n">},
    %w: tensor<3x2xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> (tensor<f32>, tensor<3x2xf32> {train.updates = "w"}) attributes {train.step} {
  %y = nn.matmul %x, %w : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
  %l = nn.cross_entropy %y, %n : (tensor<4x2xf32>, tensor<4xi32>) -> tensor<4xf32>
  %loss = nn.reduce <mean> %l dims <0> : (tensor<4xf32>) -> tensor<f32>
  func.return %loss, %w : tensor<f32>, tensor<3x2xf32>
}
"""


def save_data(folder, **arrays):
    good: dict[str, Any] = {"x": np.arange(30.0).reshape(10, 3), "n": np.zeros(10, np.uint16)}
    np.savez(folder / "d.npz", **{**good, **arrays})
    (folder / "p.ir").write_text(DATA)
    return folder / "p.ir"


def test_data_are_beside_the_program(tmp_path):
    out = shardir.compile_file(save_data(tmp_path), "strip-layouts").save(tmp_path / "out")
    assert sorted(p.name for p in (out / "data").iterdir()) == ["d_n.npy", "d_x.npy"]
    assert np.load(out / "data/d_n.npy").dtype == np.uint16
    assert np.load(out / "data/d_x.npy").shape == (10, 3)


@pytest.mark.parametrize(("arrays", "words"), [
    ({"x": np.zeros((10, 4))}, ["%x", "[10, 4]", "at least 1 rows of [3]"]),
    ({"x": np.zeros(3)}, ["%x", "[3]"]),
    ({"x": np.zeros((0, 3))}, ["[0, 3]"]),
    ({"n": np.zeros(10)}, ["%n", "i32", "float64"]),
    ({"n": np.array([0, 2**32 + 1])}, ["%n", "i32", "4294967297 at [1]"]),
    ({"n": np.array([0, 1, -(2**31) - 1, 2**40])}, ["-2147483649 at [2]"]),
    ({"n": np.array([2**31], np.uint32)}, ["2147483648 at [0]"]),
    ({"x": np.array([["a", "b", "c"]])}, ["%x", "numbers"]),
    ({"x": np.array([{}, {}], dtype=object)}, ["%x", "cannot be read"]),
])  # fmt: skip
def test_bad_data_are_errors(tmp_path, arrays, words):
    with pytest.raises(shardir.ShardirError) as error:
        shardir.compile_file(save_data(tmp_path, **arrays), "strip-layouts").save(tmp_path / "out")
    assert all(w in str(error.value) for w in [*words, "p.ir:2"])
    assert not (tmp_path / "out").exists()


def test_a_state_has_one_type(tmp_path):
    """The plan of a program in which two functions have it in two types is not written."""
    first, second = (
        f'func.func @{f}(%w: tensor<4x{element}> {{train.parameter = "w", '
        "train.init = #train.init<normal>}) { func.return }\n"
        for f, element in (("f", "f32"), ("g", "f16"))
    )
    with pytest.raises(shardir.ShardirError, match=r"'w' to be f32 \[4\], as in @f, got f16 \[4\]"):
        shardir.compile(first + second, "strip-layouts").save(tmp_path / "out")


def test_missing_data_are_errors(tmp_path):
    path = save_data(tmp_path)
    for name, other, word in (
        ("d.npz", "e.npz", "expected the file .*e.npz"),
        ('"x"', '"z"', "x, n., got 'z'"),
    ):
        path.write_text(DATA.replace(name, other))
        with pytest.raises(shardir.ShardirError, match=word):
            shardir.compile_file(path, "strip-layouts").save(tmp_path / "out")
    path.write_text(DATA)
    (tmp_path / "d.npz").write_bytes(b"PK nothing")
    with pytest.raises(shardir.ShardirError, match="cannot be read"):
        shardir.compile_file(path, "strip-layouts").save(tmp_path / "out")


def test_a_directory_is_replaced_at_once(tmp_path):
    compiled, out = shardir.compile_file(save_data(tmp_path), "strip-layouts"), tmp_path / "out"
    compiled.save(out)
    (out / "checkpoint").mkdir()
    (out / "program_rank7.py").write_text("old")
    compiled.save(out)
    assert (out / "checkpoint").is_dir()
    assert not (out / "program_rank7.py").exists()
    assert not list(tmp_path.glob(".out*"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    for place in (other, other / "thesis.tex"):
        with pytest.raises(shardir.ShardirError):
            compiled.save(place)
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]


def test_shardir_is_light():
    import subprocess

    code = "import sys, shardir; assert not {'torch', 'xdsl', 'lark', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_shard_opt_imports_what_all_programs_need():
    import subprocess

    later = ["algebra.planner", "algebra.plan", "algebra.schedules.searching", "backend.runs",
             "cost", "passes.inline_calls", "rewriting.rewriter", "search"]  # fmt: skip
    names = {"torch", "lark", "rich", *(f"shardir.{name}" for name in later)}
    code = f"import sys, shardir.tools.opt; assert not (found := {names} & set(sys.modules)), found"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_program_is_written_without_torch(tmp_path):
    import subprocess

    (tmp_path / "step.ir").write_text(STEP)
    code = (
        "import sys; sys.modules['torch'] = None; from shardir.tools.opt import main; "
        "sys.exit(main(['step.ir', '-p', 'train', '-t', 'torch', '-o', 'out']))"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "out" / "program.py").exists()


def test_the_python_interface():
    compiled = shardir.compile(STEP, "", "step.ir")
    again = parse(compiled.text, "again.ir", verify=True)
    assert "return loss, w" in program_text(again)
    assert body_of(compiled.program).splitlines()[-1] == "    return loss, w"
    module = shardir.parse(STEP, "step.ir")
    assert shardir.compile(module, "").program == compiled.program
    for text, pipeline, words in (
        ("func.func @f(", "train", ["step.ir:1"]),
        (STEP, "trian", ["trian", "train"]),
        (STEP.replace("(tensor<4x3", "(tensor<5x3"), "train", ["step.ir"]),
        (STEP.replace("dims <0, 1>", "dims <0, 7>"), "train", ["step.ir:9", "from -2 to 1, got 7"]),
        ("dist.mesh @m <a = 2>", "", ["expected a public function"]),
    ):
        with pytest.raises(shardir.ShardirError) as error:
            _ = shardir.compile(text, pipeline, "step.ir").program
        assert all(w in str(error.value) for w in words), str(error.value)
    with pytest.raises(shardir.ShardirError, match="cannot be read"):
        shardir.compile_file("nowhere.ir")
