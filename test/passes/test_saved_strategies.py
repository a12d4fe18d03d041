"""--save-strategies and --load-strategies: the loaded program has the same text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runlines import run_tool

import shardir
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.algebra.saved import Line, Saved, read
from shardir.algebra.strategy import Strategy
from shardir.diagnostics import ShardirError
from shardir.passes import search_strategies
from shardir.passes.propagate_strategies import FunctionPropagation

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
PROPAGATED = [
    "matmul_strategies", "transformer_block", "operator_parallel_trained", "split_softmax",
    "loss_parallel", "manual_split", "realformer", "bert", "wide_and_deep",
]  # fmt: skip
SEARCHED = ["matmul_rows_then_columns", "operator_parallel_trained", "modes", "loss_parallel"]


def refuse(*_: object) -> None:
    raise AssertionError("loaded strategies are decided again")


@pytest.mark.parametrize("name", PROPAGATED)
def test_propagated_strategies_come_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file = EXAMPLES / f"{name}.ir", tmp_path / "plan.txt"
    made = shardir.compile_file(path, save_strategies=file)
    monkeypatch.setattr(FunctionPropagation, "propagated", refuse)
    again = shardir.compile_file(path, load_strategies=file)
    assert again.text == made.text and again.program == made.program


@pytest.mark.parametrize("name", SEARCHED)
def test_searched_strategies_come_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After differentiation: gradients and updates are in the file too."""
    path, file = EXAMPLES / f"{name}.ir", tmp_path / "plan.txt"
    made = shardir.compile_file(path, mode="auto", save_strategies=file)
    assert " search {" in file.read_text()
    monkeypatch.setattr(search_strategies, "search_plan", refuse)
    again = shardir.compile_file(
        path, mode="auto", load_strategies=file, save_strategies=tmp_path / "b"
    )
    assert again.text == made.text and again.program == made.program
    assert (tmp_path / "b").read_text() == file.read_text()


def test_a_search_decomposes_composites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If no pass before has decomposed them, the file has their parts."""
    text = """
dist.mesh @m <d = 2>
func.func @f(%x: tensor<8x4xf32>, %y: tensor<8x4xf32>) -> tensor<f32> {
  %loss = nn.mse_loss <mean> %x, %y : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
"""
    file = tmp_path / "plan.txt"
    made = shardir.compile(text, mode="auto", save_strategies=file).text
    assert "nn.mse_loss" not in file.read_text()
    monkeypatch.setattr(search_strategies, "search_plan", refuse)
    assert shardir.compile(text, mode="auto", load_strategies=file).text == made
    composite = tmp_path / "composite.txt"
    made = shardir.compile(text, save_strategies=composite).text
    assert "nn.mse_loss" in composite.read_text()
    assert shardir.compile(text, load_strategies=composite).text == made


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
        assert shardir.compile(text, mode=mode, load_strategies=tmp_path / mode).text == made


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
    """Another layout in the file is another program."""
    file = tmp_path / "plan.txt"
    shardir.compile(NET, save_strategies=file)
    rows = file.read_text()
    assert "%w = argument : <@m, [{}, {}]>" in rows
    file.write_text(
        rows.replace("%w = argument : <@m, [{}, {}]>", "%w = argument : <@m, [{}, {tp}]>")
        .replace("{dp, tp}, {}", "{dp}, {}")
        .replace("%h = nn.matmul :", "%h = nn.matmul strategy<((2, 1), (1, 2))> :")
        .replace("%h = nn.matmul strategy<((2, 1), (1, 2))> : <@m, [{dp}, {}]>",
                 "%h = nn.matmul strategy<((2, 1), (1, 2))> : <@m, [{dp}, {tp}]>  // mine")
    )  # fmt: skip
    text = shardir.compile(NET, load_strategies=file).text
    assert "dist.all_gather" in text and "%w: tensor<4x3xf32," in text


def test_a_plan_serves_another_batch(tmp_path: Path) -> None:
    """Sizes are not compared."""
    file = tmp_path / "plan.txt"
    shardir.compile(NET, save_strategies=file)
    larger = NET.replace("tensor<8x", "tensor<32x")
    assert shardir.compile(larger, load_strategies=file).text == shardir.compile(larger).text


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
    path.write_text(NET)
    shardir.compile(NET, save_strategies=file)
    other = NET.replace("tp = 2", "tp = 4").replace("nn.relu", "nn.gelu").replace("%w", "%v")
    path.write_text(other)
    words = ["shard-run", str(path), "--load-strategies", str(file)]
    code, _, err = run_tool(words, b"")
    locations = [line.split(": error: ")[0] for line in err.splitlines() if ": error: " in line]
    assert code == 2
    assert locations == [f"{file}:{n}:1" for n in (1, 3, 4, 6)], err
    code, _, err = run_tool(["shard-run", str(tmp_path), "--save-strategies=x"], b"")
    assert code == 2 and "--save-strategies is for an .ir file" in err


def test_locations_are_on_one_line(tmp_path: Path) -> None:
    """The name of a file may have any characters; it is shown, and never parsed."""
    named = NET.replace(
        ": (tensor<8x6xf32>) -> tensor<8x6xf32>",
        r': (tensor<8x6xf32>) -> tensor<8x6xf32> loc("a/b\0A@net\22\01.ir":7:1)',
    )
    file = tmp_path / "plan.txt"
    made = shardir.compile(named, save_strategies=file).text
    line = '%y = nn.relu : <@m, [{dp, tp}, {}]>  // b?@net"?.ir:7'
    assert file.read_text().splitlines()[-1] == f"@net {line}"
    assert shardir.compile(named, load_strategies=file).text == made


def test_a_file_is_of_one_program(tmp_path: Path) -> None:
    path = tmp_path / "two.ir"
    path.write_text(f"{NET}// -----\n{NET}")
    for option in ("--save-strategies", "--load-strategies", "--cost-graph"):
        words = ["shard-opt", str(path), "--mode=auto", "--split-input-file", option, "x.svg"]
        code, _, err = run_tool(words, b"")
        assert code == 2 and f"{option} is for one program; {path} has 2" in err


NAMES = st.from_regex(r"[A-Za-z_][\w$.-]{0,5}", fullmatch=True) | st.from_regex(
    r"\d{1,3}", fullmatch=True
)
AXES = st.lists(st.sampled_from([Axis("a"), Axis("b", 1, 2), Axis("b", 2, 2)]), unique=True)
LAYOUTS = st.builds(
    Layout, st.just("m"), st.lists(AXES.map(tuple), max_size=3).map(tuple), AXES.map(tuple)
)
STRATEGIES = st.none() | st.builds(
    Strategy,
    st.sampled_from([None, "m"]),
    st.lists(st.lists(AXES.map(tuple), max_size=2).map(tuple), min_size=1, max_size=2).map(tuple),
    st.none() | st.just((((Axis("a"),),),)),
)
LINES = st.builds(
    Line,
    st.sampled_from(["f", "a b", 'q"uo//te', "π"]),
    st.lists(NAMES, min_size=1, max_size=2, unique=True).map(tuple),
    st.sampled_from(["argument", "nn.matmul", "dist.redistribute"]),
    STRATEGIES,
    st.lists(LAYOUTS, min_size=1, max_size=2).map(tuple),
)


@given(st.lists(LINES, max_size=5))
def test_what_is_written_is_read(lines: list[Line]) -> None:
    saved = Saved({"m": Mesh("m", (("a", 2), ("b", 4)))}, lines, {"f": "{gap = 0.0 : f64}"})
    text = str(saved)
    again, errors = read(text)
    assert not errors
    assert str(again) == text and again.meshes == saved.meshes
    assert sorted(map(str, again.lines)) == sorted(map(str, lines))
