"""program.py as a module of this process: its runtime is that of shardir."""

import sys
from pathlib import Path

import pytest

import shardir

pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan
from shardir.backend.torch.shardir_runtime.run.program_module import program_module

PROGRAM = """
func.func @f(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = nn.relu %x : (tensor<4xf32>) -> tensor<4xf32>
  func.return %y : tensor<4xf32>
}
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return shardir.compile(PROGRAM).save(tmp_path / "out")


def test_a_process_has_one_runtime(program: Path) -> None:
    before = list(sys.path)
    assert program_module(program).rt is rt
    assert sys.path == before
    assert not [name for name in sys.modules if name.partition(".")[0] == "shardir_runtime"]


def test_a_program_of_another_runtime_is_an_error(program: Path) -> None:
    path = program / "program.py"
    text = path.read_text().replace("from shardir_runtime import runtime", "import runtime")
    path.write_text(text)
    with pytest.raises(PlanError, match="expected a program that imports shardir_runtime, got one"):
        program_module(program)


def test_a_program_is_its_functions(program: Path) -> None:
    """A checkpoint of it is resumed whatever it imports from where."""
    digest, path = load_plan(program).digest, program / "single.py"
    text = path.read_text()
    path.write_text(text.replace("from shardir_runtime import runtime", "import runtime"))
    assert load_plan(program).digest == digest
    path.write_text(text.replace("relu", "tanh"))
    assert load_plan(program).digest != digest
