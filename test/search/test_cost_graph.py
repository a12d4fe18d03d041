"""--cost-graph: the costs in the file are those of the plan, and those of the drawings."""

import json
from html import escape
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from support.runlines import run_tool

import shardir
from shardir.cost import report
from shardir.search.plans.picture import edge_lines, rows

NET = """
dist.cluster @c <levels [node = 4 {bandwidth = 1e+09, latency = 1e-06}], memory = 1000000000 {bandwidth = 1e+12}, flops {f32 = 1e+8}>
dist.mesh @m <a = 2, b = 2> on @c
func.func @net(%x: tensor<8x16xf32>, %w: tensor<16x12xf32, #dist.layout<@m, [{a}, {b}]>>) -> tensor<8x12xf32> {
  %y = nn.matmul %x, %w strategy<((2, 1), (1, 2))> : (tensor<8x16xf32>, tensor<16x12xf32, #dist.layout<@m, [{a}, {b}]>>) -> tensor<8x12xf32>
  %z = nn.relu %y : (tensor<8x12xf32>) -> tensor<8x12xf32>
  func.return %z : tensor<8x12xf32>
}
"""  # noqa: E501 - the text of a program

STEP = """
dist.mesh @m <d = 2>
func.func private @loss(
    %x: tensor<8x4xf32> {train.input = #train.init<normal>},
    %w: tensor<4x6xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> tensor<f32> {
  %h = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
  %r = nn.relu %h : (tensor<8x6xf32>) -> tensor<8x6xf32>
  %s = nn.reduce <sum> %r dims <0, 1> : (tensor<8x6xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}
train.step @step of @loss <momentum, lr = 0.1, momentum = 0.9>
"""

CostData = dict[str, Any]


def written(text: str, file: Path) -> str:
    source = file.parent / 'a<b>&"c.ir'
    source.write_text(text)
    words = ["shard-opt", str(source), "--mode=auto", "--cost-graph", str(file)]
    code, _, err = run_tool(words, b"")
    assert code == 0, err
    return file.read_text()


def graph_of(text: str, tmp_path: Path) -> CostData:
    (found,) = json.loads(written(text, tmp_path / "graph.json"))["functions"]
    return found


def cost(graph: CostData, chosen: tuple[int, ...]) -> float:
    own = sum(n["candidates"][k]["seconds"] for n, k in zip(graph["nodes"], chosen, strict=True))
    tables = graph["tables"]
    return own + sum(tables[e["table"]][chosen[e["from"]]][chosen[e["to"]]] for e in graph["edges"])


@pytest.mark.parametrize("text", [NET, STEP])
def test_the_chosen_candidates_have_the_sum(text: str, tmp_path: Path) -> None:
    graph = graph_of(text, tmp_path)
    chosen = tuple(n["chosen"] for n in graph["nodes"])
    assert cost(graph, chosen) == pytest.approx(graph["sum"], rel=1e-12)
    for e in graph["edges"]:
        table = graph["tables"][e["table"]]
        assert e["seconds"] == table[chosen[e["from"]]][chosen[e["to"]]]
        assert len(table) == len(graph["nodes"][e["from"]]["candidates"])
        assert {len(row) for row in table} == {len(graph["nodes"][e["to"]]["candidates"])}


def test_no_other_choice_is_cheaper(tmp_path: Path) -> None:
    """Over all choices, from the file alone."""
    graph = graph_of(NET, tmp_path)
    every = product(*(range(len(n["candidates"])) for n in graph["nodes"]))
    assert min(cost(graph, chosen) for chosen in every) == pytest.approx(graph["sum"])
    assert graph["bound"] <= graph["objective"] <= graph["sum"] * (1 + 1e-9)


def test_annotations_are_the_only_candidates(tmp_path: Path) -> None:
    x, w, y, z, result = graph_of(NET, tmp_path)["nodes"]
    assert [n["values"] for n in (x, w, y, z, result)] == [["%x"], ["%w"], ["%y"], ["%z"], ["%z"]]
    assert [n["annotated"] for n in (x, w, y, z, result)] == [False, True, True, False, False]
    assert [c["layout"] for c in w["candidates"]] == ["[{a}, {b}]"]
    assert [c["strategy"] for c in y["candidates"]] == ["((2, 1), (1, 2))"]
    assert (y["op"], y["operands"], y["at"].rpartition(":")[2]) == ("nn.matmul", ["%x", "%w"], "5")
    assert len(z["candidates"]) == 9 and w["op"] is None


def test_edges_have_the_seconds_of_redistributions(tmp_path: Path) -> None:
    """From the product's result to the operand of each candidate of the relu: the report of a
    program of this redistribution alone."""
    graph = graph_of(NET, tmp_path)
    y, z = graph["nodes"][2:4]
    (edge,) = [e for e in graph["edges"] if e["values"] == ["%y"]]
    (row,) = graph["tables"][edge["table"]]
    (source,) = y["candidates"][0]["results"]
    cluster, mesh = NET.splitlines()[1:3]
    for seconds, candidate in zip(row, z["candidates"], strict=True):
        have, want = (
            f"tensor<8x12xf32, #dist.layout<@m, {t}>>" for t in (source, candidate["operands"][0])
        )
        moved = shardir.compile(
            f"{cluster}\n{mesh}\nfunc.func @moved(%x: {have}) -> {want} {{\n"
            f"  %y = dist.redistribute %x : ({have}) -> {want}\n  func.return %y : {want}\n}}",
            "lower-to-spmd",
        )
        (moving,) = report(moved.module)
        assert seconds == pytest.approx(moving.seconds, rel=1e-9)


def test_the_ends_of_an_update_are_one_node(tmp_path: Path) -> None:
    graph = graph_of(STEP, tmp_path)
    values = [n["values"] for n in graph["nodes"] if not n["op"]]
    assert ["%w", "%w_1"] in values and ["%w_momentum", "%w_momentum_1"] in values
    assert [n["id"] for n in graph["nodes"]] == [*range(len(graph["nodes"]))]


@pytest.mark.parametrize("text", [NET, STEP])
def test_drawings_have_the_texts_of_the_data(text: str, tmp_path: Path) -> None:
    graph = graph_of(text, tmp_path)
    dot = written(text, tmp_path / "graph.dot")
    assert dot.count("[label=<<TABLE") == len(graph["nodes"])
    for name in (row[0] for node in rows(graph) for row in node):
        assert escape(name) in dot
    for e in graph["edges"]:
        label = "\\n".join(edge_lines(graph, e))
        assert f'n0_{e["from"]} -> n0_{e["to"]} [label="{label}"]' in dot
    chosen = sum(row[2] for node in rows(graph) for row in node)
    assert chosen == len(graph["nodes"]) == dot.count("BGCOLOR") / 2


def test_drawn_candidates_are_the_nearest_ones(tmp_path: Path) -> None:
    """`+` is the increase of the plan's cost, with the same choice for all other nodes."""
    graph = graph_of(NET, tmp_path)
    chosen = [n["chosen"] for n in graph["nodes"]]
    more = []
    for k in range(9):
        other = (*chosen[:3], k, *chosen[4:])
        more.append(cost(graph, other) - graph["sum"])
    shown = [
        time.partition("+")[2] for _, time, is_chosen in rows(graph)[3] if time and not is_chosen
    ]
    units = {"0": 0.0, "ns": 1e-9, "us": 1e-6, "ms": 1e-3}
    seconds = [float(t.split()[0]) * units[t.split()[-1]] for t in shown]
    wanted = sorted(more)[1:6]
    assert seconds == pytest.approx(wanted, rel=6e-3, abs=1e-12)


def test_wrong_files_and_pipelines(tmp_path: Path) -> None:
    source = tmp_path / "net.ir"
    source.write_text(NET)
    for mode, file, message in (
        ("auto", "a.png", "a.png: expected a cost graph as .json, .dot"),
        ("semi_auto", "a.dot", "no pass searches; run search-strategies, or --mode=auto"),
    ):
        words = ["shard-opt", str(source), "--mode", mode, "--cost-graph", file]
        code, _, err = run_tool(words, b"")
        assert (code, err) == (2, f"shard-opt: error: --cost-graph: {message}\n")
    code, _, err = run_tool(
        ["shard-opt", str(source), "--mode=auto", "--cost-graph=/no/a.dot"], b""
    )
    assert code == 1 and "cannot write /no/a.dot: No such file or directory" in err
    source.write_text("func.func @f() {\n  func.return\n}\n")
    code, _, err = run_tool(["shard-opt", str(source), "--mode=auto", "--cost-graph=a.dot"], b"")
    assert code == 1 and "expected a function with a mesh for the cost graph, got none" in err
