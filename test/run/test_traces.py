"""Traces of runs on real ranks: each op once in each call, in the order of the program and in rows
that hold one event at a time, under the names of the simulated run."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cost.test_stage_times import MASKED

import shardir
from shardir.tools import bench
from shardir.tools.run import main

INIT = "train.init = #train.init<normal>"
EXAMPLE = "docs/examples/overlap.ir"


def traced(tmp_path: Path, compiled: shardir.Compiled, steps: int = 4) -> tuple[Any, Any]:
    """The events by process and row, and the report of a run."""
    path = tmp_path / "trace.json"
    report = compiled.run(steps=steps, trace=path, trace_steps=2, timeout=60)
    return rows_of(path), report


def rows_of(path: Path) -> dict[str, dict[str, list[dict[str, Any]]]]:
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"].get("name") for e in events
             if e["ph"] == "M"}  # fmt: skip
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for e in events:
        if e["ph"] == "X":
            row = named["thread_name", e["pid"], e["tid"]]
            found[named["process_name", e["pid"], 0]][row].append(e)
    for rows in found.values():
        for of_row in rows.values():
            of_row.sort(key=lambda e: e["ts"])
            for a, b in pairwise(of_row):
                assert a["ts"] + a["dur"] <= b["ts"] + 1e-3
    return found


def names(events: list[dict[str, Any]]) -> list[str]:
    return [e["name"] for e in events]


def test_layers_in_a_loop_have_their_own_names(tmp_path: Path) -> None:
    """Of a transformer of four layers, which the program has once, on 4 ranks."""
    text = bench.load("programs").transformer(layers=4, hidden=16, heads=4, mesh=(2, 2))
    compiled = shardir.compile(text, "train")
    assert "for i in range(4):" in compiled.program
    found, report = traced(tmp_path, compiled)
    predicted = found["predicted @step, all ranks"]
    for rank in range(4):
        measured = found[f"measured @step, rank {rank}"]
        assert len(measured["calls"]) == 2
        begin = measured["calls"][1]["ts"]
        second = [e for e in measured["compute"] if e["ts"] >= begin]
        lines = set(names(second))
        scalar = [e for e in predicted["compute"] if e["args"]["bytes"] <= 3 * 4]
        expected = [e for e in predicted["compute"] if e["name"] in lines or e not in scalar]
        costly = set(names(expected))  # views have no time
        assert [n for n in names(second) if n in costly] == names(expected)
        mine = sum(e["dur"] for e in second)
        assert 0.5 * measured["calls"][1]["dur"] < mine <= measured["calls"][1]["dur"] + 1
        links = [e for e in measured["links: machine"] if e["ts"] >= begin]
        assert names(links) == names(predicted["links: machine"])
    step = report.differences["step"]
    parts = step.parts
    changes = [abs(d.measured - d.predicted) for d in parts]
    assert changes == sorted(changes, reverse=True)
    total = sum(e["dur"] for e in predicted["compute"]) * 1e-6
    assert sum(d.predicted for d in parts) == pytest.approx(total, rel=1e-6)
    assert sum(d.measured for d in parts) == pytest.approx(step.measured, rel=1e-9)
    (reduces,) = [d for d in parts if d.what == "dist.all_reduce over {tp}"]
    assert reduces.kind == "exposed"
    assert reduces.events == sum("all_reduce" in n for n in names(predicted["compute"])) - 1


def test_collectives_in_flight(tmp_path: Path) -> None:
    """They are on the links from their start to the end of the wait for them."""
    found, _ = traced(tmp_path, shardir.compile_file(EXAMPLE))
    for rank in range(4):
        measured = found[f"measured @step, rank {rank}"]
        gathers = [e for row, of_row in measured.items() if row.startswith("links") for e in of_row
                   if e["name"].startswith("%w2 = dist.all_gather")]  # fmt: skip
        waits = [e for e in measured["compute"] if e["name"] == f"wait for {gathers[0]['name']}"]
        assert len(gathers) == 2 and len(waits) == 4  # its start, and its end
        for flight, start, end in zip(gathers, waits[::2], waits[1::2], strict=True):
            assert flight["ts"] == start["ts"]
            assert flight["ts"] + flight["dur"] == pytest.approx(end["ts"] + end["dur"], abs=1e-3)
            between = [e for e in measured["compute"] if start["ts"] < e["ts"] < end["ts"]]
            assert any(e["cat"] == "computation" for e in between)


def test_a_pipeline(tmp_path: Path) -> None:
    """Each rank has the functions of its stages in their order, and values arrive where they are
    sent to."""
    text = MASKED.replace('"v"', f'"v", {INIT}').replace('"w"', f'"w", {INIT}')
    found, _ = traced(tmp_path, shardir.compile(text, "train"))
    for rank in range(4):
        measured = found[f"measured @step, rank {rank}"]
        functions = names(measured["functions"])
        stage = rank // 2
        actions = names(found[f"predicted @step, pipeline rank {stage}"]["functions"])
        loop = [n for n in actions if n[0] == str(stage)]
        ours = [n for n in functions if "begin" not in n and "update" not in n]
        assert ours == 2 * loop
        arrived = [e for row, of_row in measured.items() if row.startswith("arrivals")
                   for e in of_row]  # fmt: skip
        other = (rank + 2) % 4
        assert len(arrived) == 2 * 4 and {e["args"]["rank"] for e in arrived} == {other}
        sent = found[f"measured @step, rank {other}"]["sends"]
        assert len(sent) == len(arrived)
        for a, s in zip(arrived, sent, strict=True):
            assert a["ts"] + a["dur"] > s["ts"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    given = ["--steps", "3", "--trace", str(path), "--trace-steps", "1", "--trace-cluster", "h200"]
    assert main([EXAMPLE, *given, "--check"]) == 0
    out = capsys.readouterr().out
    assert "step: predicted " in out and "mean of 1 calls of 4 ranks" in out
    found = rows_of(path)
    assert len(found["measured @step, rank 3"]["calls"]) == 1
    assert "links: node" in found["predicted @step, all ranks"]


def test_wrong_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--trace", str(tmp_path)], "expected a file, not a directory"),
        (["--trace", str(tmp_path / "t.txt")], "expected a name that ends in .json"),
        (["--trace", str(tmp_path / "no" / "t.json")], "expected a file in a writable folder"),
        (["--trace", str(tmp_path / "t.json"), "--trace-steps", "0"], "expected 1 or more"),
    ):
        with pytest.raises(SystemExit) as end:
            main([EXAMPLE, *words])
        assert end.value.code == 2
        assert message in capsys.readouterr().err
    saved = shardir.compile_file(EXAMPLE).save(tmp_path / "out")
    trace = ["--trace", str(tmp_path / "t.json")]
    assert main([str(saved), *trace, "--trace-cluster", "nothing"]) == 2
    assert "expected a cluster" in capsys.readouterr().err
    with (saved / "program.py").open("a") as file:
        file.write("# changed\n")
    assert main([str(saved), *trace]) == 2
    assert "expected the program.py that source.ir compiles to" in capsys.readouterr().err
    (saved / "source.ir").unlink()
    assert main([str(saved), *trace]) == 2
    assert "compile it anew" in capsys.readouterr().err
    assert not (tmp_path / "t.json").exists()
