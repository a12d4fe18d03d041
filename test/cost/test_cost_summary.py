"""The summary of a cost: at most 25 lines, whose figures are those of the ops."""

import json
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shardir
from shardir.cost.report import FunctionCost
from shardir.reports.layouts import folded

BLOCKS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
            for _ in range(BLOCKS)
        )
        self.head = nn.Linear(256, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def cost() -> FunctionCost:
    with torch.device("meta"):
        model, x, labels = Model(), torch.zeros(64, 256), torch.zeros(64, 8)
    return shardir.compile(
        model, x, labels=labels, loss=mse_loss, optimizer="adamw, lr = 0.001",
        mesh="dp = 2, tp = 2", cluster="h200", plan="megatron(tp) * fsdp(dp)",
    ).cost("step")  # fmt: skip


@pytest.mark.parametrize("width", [60, 100, 200])
def test_it_is_short_and_has_the_figures_of_the_ops(
    cost: FunctionCost, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = str(cost).splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    computation = sum(c.seconds for c in cost.ops if not c.communicates)
    share = re.search(r"computation \S+ \S+ (\d+)%", text)
    assert share is not None and int(share[1]) == round(100 * computation / cost.seconds)
    assert f"layers.* x {BLOCKS}" in text and "over {dp}" in text
    dearest = [line for line in lines[lines.index("  the dearest") + 1 :] if "%" in line]
    assert len(dearest) == 10 or (width == 60 and len(dearest) > 2)
    assert all(re.search(r" at \S+\.py:\d+", line) for line in dearest) or width == 60
    assert len(cost.table().splitlines()) > 100


def test_a_summary_of_stages_has_the_waits_of_ranks() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.zeros(8, 64)
    program = shardir.compile(
        model, x, labels=x, loss=mse_loss, optimizer="sgd, lr = 0.1", stages="1f1b, ranks = 2",
        accumulate="mean, microbatches = 4", cluster="h200", mesh="d = 1",
    )  # fmt: skip
    cost = program.cost("step")
    lines = str(cost).splitlines()
    assert len(lines) <= 25
    found = [line for line in lines if line.startswith("  rank ")]
    assert len(found) == 2 and all("waits" in line for line in found)


def test_a_function_that_takes_no_time_has_no_dearest_ops() -> None:
    program = shardir.compile(nn.Identity(), torch.zeros(8, 64), train=False, mesh="dp = 2")
    assert str(program.cost()).splitlines()[-1].startswith("  memory")


def test_the_record_and_the_html_have_the_figures_of_the_ops(cost: FunctionCost) -> None:
    record = json.loads(json.dumps(cost.record()))
    assert record["mesh"] == {"dp": 2, "tp": 2} and record["seconds"] == cost.seconds
    (layers,) = [group for group in record["layers"] if group["name"] == "layers.*"]
    assert layers["count"] == BLOCKS
    ops = [op for op in record["ops"] if op["layer"] == "layers.*"]
    for whole, part in ((layers, ops), (record, record["ops"])):
        sent = [op for op in part if op["form"] is not None]
        if whole is layers:
            assert whole["seconds"] == pytest.approx(sum(op["seconds"] for op in part))
            assert whole["bytes"] == sum(op["bytes"] for op in sent)
        else:
            by_axes = {c["axes"]: c["bytes"] for c in record["communication"]}
            assert sum(by_axes.values()) == sum(op["bytes"] for op in sent)
    assert record["memory"]["peak"] == sum(record["memory"]["parts"].values())
    html = cost._repr_html_()
    assert html.count("<tr") == html.count("</tr>") and f"layers.* x {BLOCKS}" in html


def test_paragraphs_of_equal_layers_are_one() -> None:
    texts = [
        f"@f: %h.{i}.up: [{{d}}]\n  by %h.{i}.x\n    ... {i} more ...\n    of %w" for i in range(3)
    ]
    assert folded([*texts, "@f: %head"]) == [
        "@f: %h.*.up: [{d}] x 3\n  by %h.*.x\n    ...\n    of %w", "@f: %head"
    ]  # fmt: skip
    texts[1] = texts[1].replace("{d}", "{e}")
    assert len(folded(texts)) == 2
