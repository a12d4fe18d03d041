"""--save-strategies and --plan: the program of a saved plan has the same text."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.extent import extent
from support.runlines import run_tool
from torch.nn.functional import cross_entropy

import shardir
from shardir.diagnostics import ShardirError
from shardir.passes import search_strategies

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROPAGATED = extent(
    ["matmul_strategies", "operator_parallel_trained"],
    sorted(path.stem for path in EXAMPLES.glob("*.ir")),
)  # fmt: skip
SEARCHED = extent(["matmul_rows_then_columns", "mixed_precision"],
                  PROPAGATED)  # fmt: skip


def refuse(*_: object) -> None:
    raise AssertionError("what is saved is searched for again")


def assert_comes_back(
    compile: Callable[..., shardir.Compiled], file: Path, **given: object
) -> None:
    """Check that the program of the saved plan has the same text after all passes, and that its own
    saved plan is the same."""
    try:
        made = compile(save_strategies=file)
    except ShardirError as e:  # nothing to decide on, or a program that no search takes
        if "expected a function with layouts" in str(e) or "expected no communication" in str(e):
            return
        raise
    again = compile(plan=file, save_strategies=file.with_suffix(".2"))
    assert again.text == made.text
    assert file.with_suffix(".2").read_text() == file.read_text()


@pytest.mark.parametrize("name", PROPAGATED)
def test_propagated_strategies_come_back(name: str, tmp_path: Path) -> None:
    def compile(**given: Any) -> shardir.Compiled:
        return shardir.compile_file(EXAMPLES / f"{name}.ir", **given)

    assert_comes_back(compile, tmp_path / "plan.txt")


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_strategies_come_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After differentiation: gradients and updates are in the file too, and nothing is searched."""

    def compile(**given: Any) -> shardir.Compiled:
        if "plan" in given:
            monkeypatch.setattr(search_strategies, "search_plan", refuse)
        return shardir.compile_file(EXAMPLES / f"{name}.ir", mode="auto", **given)

    assert_comes_back(compile, tmp_path / "plan.txt")


class Attention(torch.nn.Module):
    """A product that makes queries, keys and values, which plans cut in `parts`."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = torch.nn.Linear(8, 32)
        self.attention = torch.nn.MultiheadAttention(32, 4, batch_first=True)
        self.head = torch.nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.rows(x)
        return self.head(self.attention(h, h, h, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("plan", extent(["2d"], [None, "fsdp", "zero1", "2d", "megatron+sequence"]))
def test_the_saved_plan_of_a_module_comes_back(plan: str | None, tmp_path: Path) -> None:
    """A plan with `uses` and `parts` is saved as one: names are those before it is applied."""
    model, x, labels = Attention(), torch.zeros(8, 16, 8), torch.zeros(8, dtype=torch.int64)

    def compile(**given: Any) -> shardir.Compiled:
        given.setdefault("plan", plan)
        return shardir.compile(
            model, x, labels=labels, loss=cross_entropy, optimizer="adamw, lr = 1e-3",
            mesh="dp = 2, tp = 2", **given,
        )  # fmt: skip

    assert_comes_back(compile, tmp_path / "plan.txt")


def test_a_search_decomposes_composites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no pass before has decomposed them, the file has their parts."""
    text = """
dist.mesh @m <d = 2>
func.func @f(%x: tensor<8x4xf32>, %y: tensor<8x4xf32>) -> tensor<f32> {
  %mse = nn.mse_loss <mean> %x, %y : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<f32>
  func.return %mse : tensor<f32>
}
"""
    file = tmp_path / "plan.txt"
    made = shardir.compile(text, mode="auto", save_strategies=file).text
    assert "@f : search<" in file.read_text() and '"mse"' not in file.read_text()
    monkeypatch.setattr(search_strategies, "search_plan", refuse)
    assert shardir.compile(text, mode="auto", plan=file).text == made
    composite = tmp_path / "composite.txt"
    made = shardir.compile(text, save_strategies=composite).text
    assert 'values "mse"' in composite.read_text()
    assert shardir.compile(text, plan=composite).text == made


def test_a_search_removes_barriers(tmp_path: Path) -> None:
    text = """
dist.mesh @m <d = 2>
func.func @f(%x: tensor<8x4xf32>, %y: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %z = dist.propagation_barrier <forward> %x : (tensor<8x4xf32>) -> tensor<8x4xf32>
  %r = nn.add %z, %y : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  func.return %r : tensor<8x4xf32>
}
"""
    for mode in ("auto", "semi_auto"):
        made = shardir.compile(text, mode=mode, save_strategies=tmp_path / mode).text
        assert shardir.compile(text, mode=mode, plan=tmp_path / mode).text == made


NET = """
dist.mesh @m <dp = 2, tp = 2>
func.func @net(
    %x: tensor<8x4xf32>, %w: tensor<4x6xf32> {train.parameter = "w"}
) -> tensor<8x6xf32> {
  %h = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
  %y = nn.relu %h : (tensor<8x6xf32>) -> tensor<8x6xf32>
  func.return %y : tensor<8x6xf32>
}
"""


def test_a_line_is_edited_by_hand(tmp_path: Path) -> None:
    """Another layout in the file is another program; lines that are dropped are decided again."""
    file = tmp_path / "plan.txt"
    shardir.compile(NET, save_strategies=file)
    assert file.read_text().splitlines() == [
        "inputs : [{dp, tp}]", '"w" : []', 'values "*" : [{dp, tp}]'
    ]  # fmt: skip
    file.write_text(
        'inputs : [{dp}]\n"w" : [{}, {tp}]\n'
        'values "h" : [{dp}, {tp}], strategy <((2, 1), (1, 2))>  // mine\nvalues "y" : [{dp}]\n'
    )
    text = shardir.compile(NET, plan=file).text
    assert "dist.all_gather" in text and "%w: tensor<4x3xf32," in text
    file.write_text('"w" : []\n')
    assert shardir.compile(NET, plan=file).text == shardir.compile(NET).text


SAME = """
func.func @other(%x: tensor<8x4xf32>, %h: tensor<8x4xf32>) -> tensor<8x4xf32> {
  %y = nn.add %x, %h : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<8x4xf32>
  func.return %y : tensor<8x4xf32>
}
"""


def test_functions_that_differ_in_a_name_have_lines_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    text = NET.replace("tensor<8x4xf32>", "tensor<8x4xf32, #dist.layout<@m, [{dp}, {}]>>")
    made = shardir.compile(text + SAME, save_strategies=file)
    assert file.read_text().splitlines() == [
        'inputs "h" : [{dp, tp}]', '"w" : []', 'values "h" : [{dp}]',
        "@net inputs : [{dp}]", '@net values "y" : [{dp}]',
        '@other inputs "x" : [{dp, tp}]', '@other values "y" : [{dp, tp}]',
    ]  # fmt: skip
    assert shardir.compile(text + SAME, plan=file).text == made.text


def test_a_plan_serves_another_batch(tmp_path: Path) -> None:
    """Sizes are not compared."""
    file = tmp_path / "plan.txt"
    shardir.compile(NET, save_strategies=file)
    larger = NET.replace("tensor<8x", "tensor<32x")
    assert shardir.compile(larger, plan=file).text == shardir.compile(larger).text


def test_lines_of_a_step_are_for_the_mode_that_saved_them(tmp_path: Path) -> None:
    file, path = tmp_path / "plan.txt", EXAMPLES / "operator_parallel_trained.ir"
    shardir.compile_file(path, mode="auto", save_strategies=file)
    with pytest.raises(
        ShardirError, match=r"\[N2\] expected a function of the program, got @\w+, which "
        r"differentiation makes after layouts are decided on; use the mode auto"
    ):  # fmt: skip
        shardir.compile_file(path, plan=file)


def test_a_search_is_of_a_function_that_is_there_after_differentiation() -> None:
    """Its layouts would be lost without a word: those of one function are for the searched one."""
    plan = '@loss : search<objective = 1.0, bound = 1.0, gap = 0.0>\n@loss values "*" : []'
    with pytest.raises(
        ShardirError, match=r"plan:1:1: .*\[N2\] expected a function of the program, got @loss, "
        r"which differentiation removes before the search; drop the line with search"
    ):  # fmt: skip
        shardir.compile_file(EXAMPLES / "operator_parallel_trained.ir", mode="auto", plan=plan)


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "plan.txt"
    file.write_text("mine")
    with pytest.raises(ShardirError, match="expected a function with layouts to save, got none"):
        shardir.compile(NET.replace("dist.mesh @m <dp = 2, tp = 2>", ""), save_strategies=file)
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(
        ShardirError, match="expected a function with layouts to save, got none"
    ):  # the program is in the local view
        shardir.compile_file(EXAMPLES / "mlp_by_hand.ir", save_strategies=file)
    with pytest.raises(ShardirError, match=r"cannot write .*: Is a directory"):
        shardir.compile(NET, save_strategies=tmp_path)
    with pytest.raises(ShardirError, match=r"cannot write .*: No such file or directory"):
        shardir.compile(NET, save_strategies=tmp_path / "no" / "where")


def test_all_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    file, path = tmp_path / "plan.txt", tmp_path / "net.ir"
    shardir.compile(NET, save_strategies=file)
    path.write_text(NET.replace('"w"', '"v"').replace("dp = 2", "d = 2"))
    code, _, err = run_tool(["shard-run", str(path), "--plan", str(file)], b"")
    locations = [line.split(": error: ")[0] for line in err.splitlines() if ": error: " in line]
    assert code == 2
    assert locations == [f"{file}:{n}:1" for n in (1, 2, 3)], err
    code, _, err = run_tool(["shard-run", str(tmp_path), "--save-strategies=x"], b"")
    assert code == 2 and "--save-strategies is for an .ir file" in err


def test_a_file_is_of_one_program(tmp_path: Path) -> None:
    path = tmp_path / "two.ir"
    path.write_text(f"{NET}// -----\n{NET}")
    for option in ("--save-strategies", "--cost-graph"):
        words = ["shard-opt", str(path), "--mode=auto", "--split-input-file", option, "x.dot"]
        code, _, err = run_tool(words, b"")
        assert code == 2 and f"{option} is for one program; {path} has 2" in err
