"""Plans side by side: the figures of each, and the fastest one that fits."""

import csv
import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

import shardir
from shardir import ShardirError
from shardir.reports.comparison import PlanComparison
from shardir.tools import opt

MODEL = Path(__file__).parents[2] / "docs" / "examples" / "presets.ir"
PLANS = ["ddp", "zero1", "fsdp(dp)", "megatron(tp) * fsdp(dp)", "fsdp(dp) recompute=full"]


FITTING = ["ddp", "zero1", "fsdp(dp)", "fsdp(dp) recompute=full"]
"""Those for a mesh without tp."""


def network() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


def compared(**options: Any) -> PlanComparison:
    x = torch.zeros(64, 512, device="meta")
    arguments: dict[str, Any] = {"plans": PLANS, **options}
    return shardir.compare(
        network(), x, labels=x, loss=mse_loss, optimizer="adam, lr = 0.001", **arguments
    )


def test_rows_are_the_estimates_of_each_plan_and_bytes_those_of_the_formula() -> None:
    """An all-reduce of the gradients of n devices receives 2 (n - 1) / n of their bytes."""
    found = compared(meshes=["dp = 16", "dp = 2, tp = 8"], cluster="h200")
    rows = {(r.plan, r.mesh): r for r in found.rows}
    assert len(rows) == 5 + 4 and not any(r.error for r in found.rows)
    assert ("megatron(tp) * fsdp(dp)", "dp = 16") not in rows, "the mesh has no axis tp"
    assert found.best == min(found.rows, key=lambda r: r.seconds or 0.0)
    parameters = sum(p.numel() for p in network().parameters())
    ddp = rows["ddp", "dp = 16"]
    assert ddp.bytes["{dp}"] == pytest.approx(2 * 15 / 16 * 4 * parameters, rel=0.01)
    states = rows["fsdp(dp)", "dp = 16"].memory
    assert ddp.memory is not None and states is not None
    assert ddp.memory - states > 2.5 * 4 * parameters * 15 / 16  # parameters, moments, gradients
    x = torch.zeros(64, 512, device="meta")
    program = shardir.compile(
        network(), x, labels=x, loss=mse_loss, optimizer="adam, lr = 0.001",
        mesh="dp = 2, tp = 8", cluster="h200", plan="megatron(tp) * fsdp(dp)",
    )  # fmt: skip
    cost, row = program.cost("step"), rows["megatron(tp) * fsdp(dp)", "dp = 2, tp = 8"]
    assert row.seconds == cost.seconds and row.memory == cost.memory.peak
    assert row.samples == pytest.approx(64 / cost.seconds)
    flops = 3 * 2 * 64 * 2 * 512 * 2048 / 16 / cost.seconds  # of products, on one of 16 devices
    assert row.peak_share is not None
    rate = cost.mesh.cluster_or_default.rates["f32"]
    assert row.peak_share == pytest.approx(flops / rate, rel=0.3)


def test_a_plan_that_does_not_fit_is_not_the_best() -> None:
    cluster = "levels [node = 4 {bandwidth = 1e11, latency = 1e-6}], memory = 35000000"
    found = compared(meshes=["dp = 4"], cluster=cluster)
    by_plan = {r.plan: r for r in found.rows}
    assert by_plan["ddp"].fits is False and by_plan["fsdp(dp)"].fits is True
    assert found.best is not None and found.best.fits
    lines = str(found).splitlines()
    assert lines[1].startswith("* ") and "too large" not in lines[1]
    assert sum("too large" in line for line in lines) == sum(r.fits is False for r in found.rows)
    html = found._repr_html_()
    assert html.count("<tr") == sum(not r.error for r in found.rows) + 1 and html.count("bold") == 1


def test_a_program_that_does_not_fit_is_a_warning() -> None:
    cluster = "levels [node = 4 {bandwidth = 1e11, latency = 1e-6}], memory = 35000000"
    x, model = torch.zeros(64, 512, device="meta"), network()
    arguments = {"labels": x, "loss": mse_loss, "optimizer": "adam, lr = 0.001", "mesh": "dp = 4"}
    with pytest.warns(UserWarning, match=r"@step to need at most the 33.4 MiB of a .* got an est"):
        shardir.compile(model, x, plan="ddp", cluster=cluster, **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardir.compile(model, x, plan="fsdp(dp)", cluster=cluster, **arguments)
        shardir.compile(model, x, plan="ddp", **arguments)


def test_one_command_says_which_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = [str(MODEL), "--compare", "ddp; auto; fsdp(foo)", "--meshes", "2"]
    assert opt.main([*words, "--cost=h200", "--format", "json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert {r["mesh"] for r in records} == {"dp = 2", "dp = 1, tp = 2"}
    wrong = [r for r in records if r["plan"] == "fsdp(foo)"]
    assert len(wrong) == 2 and all("expected" in r["error"] for r in wrong)
    file = tmp_path / "plans.csv"
    assert opt.main([*words, "--cost=h200", "--format", "csv", "-o", str(file)]) == 0
    table = list(csv.DictReader(io.StringIO(file.read_text())))
    assert [float(r["seconds"]) for r in table if r["seconds"]] == [
        r["seconds"] for r in records if r["seconds"]
    ]
    words[-3:] = ["ddp", "--meshes", "dp = 2; dp = 4, tp = 2"]
    assert opt.main([*words, "--cost=h200"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("* ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare", "ddp"], "--compare: expected --meshes or --cost=CLUSTER, got neither"),
        (["--compare", "ddp", "-p", "train"], "--compare: expected no passes, which plans have"),
        (["--meshes", "4"], "--meshes: expected --compare, got none"),
        (["--by-layer"], "--by-layer: expected --compare, got none"),
        (["--compare", "dpd", "--meshes", "4"], "got dpd"),
        (["--compare", "fsdp(tp)", "--meshes", "dp = 4; tp"], "expected"),
    ],
)
def test_wrong_comparisons(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert opt.main([str(MODEL), *words]) == 2
    assert message in capsys.readouterr().err


def test_wrong_calls() -> None:
    x = torch.zeros(2, 512)
    with pytest.raises(ShardirError, match=r"expected meshes=.*, devices=16 or a cl"):
        shardir.compare(network(), x, plans=["ddp"])
    with pytest.raises(ShardirError, match="expected a list as plans, got 'ddp'"):
        shardir.compare(network(), x, plans="ddp", devices=4)
    with pytest.raises(ShardirError, match="expected no loss beside a program of the IR"):
        shardir.compare(MODEL, plans=["ddp"], devices=4, loss=mse_loss)
    for options, message in (
        ({"plans": []}, "expected plans and meshes to compare, got no plan"),
        ({"devices": 0}, "expected at least 1 device, got 0"),
        ({"meshes": ["dp = 2"]}, "expected meshes or devices, got meshes and 4 devices; drop one"),
        ({"mode": "auto"}, "expected no mode beside the plans to compare, got one; give plans="),
        ({"precision": "bf16"}, "got one; write it behind a plan: 'ddp precision=bf16'"),
    ):
        arguments: dict[str, Any] = {"plans": ["ddp"], "devices": 4, "train": False} | options
        with pytest.raises(ShardirError, match=message):
            shardir.compare(network(), x, **arguments)


def test_a_function_that_takes_no_time_has_no_rates() -> None:
    x = torch.zeros(2, 512)
    (row,) = shardir.compare(nn.Identity(), x, train=False, plans=["ddp"], meshes=["dp = 2"]).rows
    assert row.seconds == 0 and row.samples is None and not row.error


def test_stages_are_those_of_a_compilation_on_the_mesh_of_one_stage() -> None:
    """The batch of 64 is divided into microbatches, which a compilation has of its own: 16 rows."""
    found = compared(
        plans=["ddp stages=2 microbatches=4", "ddp microbatches=4", "ddp stages=3"],
        meshes=["dp = 4"], cluster="h200",
    )  # fmt: skip
    rows = {r.plan: r for r in found.rows}
    row, x = rows["ddp stages=2 microbatches=4"], torch.zeros(16, 512, device="meta")
    assert row.mesh == "stage = 2, dp = 2"
    program = shardir.compile(
        network(), x, labels=x, loss=mse_loss, optimizer="adam, lr = 0.001", mesh="dp = 2",
        cluster="h200", plan="ddp", stages="1f1b, ranks = 2", accumulate="mean, microbatches = 4",
    )  # fmt: skip
    cost = program.cost("step")
    assert row.seconds == pytest.approx(cost.seconds) and row.memory == cost.memory.peak
    assert row.samples == pytest.approx(64 / cost.seconds)
    assert rows["ddp microbatches=4"].samples is not None
    assert "expected 3 stages to divide the axis dp, got dp = 4" in rows["ddp stages=3"].error
    for plan, message in (
        ("ddp stages=0", "stages: expected 1 or more, got 0"),
        ("ddp schedule=zbv", "expected stages for schedule=zbv, got none"),
    ):
        with pytest.raises(ShardirError, match=message):
            compared(plans=[plan], meshes=["dp = 4"])


def test_plans_within_the_error_of_the_cluster_are_marked() -> None:
    cluster = "levels [node = 4 {bandwidth = 1e9, latency = 1e-6}], error = 0.5"
    found = compared(plans=FITTING, meshes=["dp = 4"], cluster=cluster)
    assert {r.spread for r in found.rows} == {0.5}
    best = found.best
    assert best is not None and best.seconds is not None
    _, *lines, note = str(found).splitlines()
    near = [r.plan for r in found.rows[1:] if (r.seconds or 0.0) <= 1.5 * best.seconds]
    assert [line[2:].split("  ")[0] for line in lines if line[0] == "~"] == near
    assert note.startswith("Half of the predicted steps are within 50% of measured ones")


def test_layers_add_up_and_differ_from_the_best_plan() -> None:
    found = compared(plans=FITTING, meshes=["dp = 4"], cluster="h200")
    for row in found.rows:
        assert sum(group.bytes for group in row.layers) == sum(row.bytes.values())
    head, *lines = found.by_layer().splitlines()
    columns = len(found.rows)
    assert head.split() == ["layer", *map(str, range(1, columns + 1))]
    assert len(lines) == columns + len({str(g) for r in found.rows for g in r.layers})
    assert "(" not in lines[0].split("  ")[1] and any("(+" in line for line in lines)
    recomputed = {r.plan: r.recomputed for r in found.rows}
    assert recomputed["fsdp(dp) recompute=full"] > 0 == recomputed["ddp"]


def test_of_several_steps_the_table_says_which_one_it_is_of() -> None:
    model, x = network(), torch.zeros(64, 512, device="meta")
    step = shardir.Step(
        lambda model, x: mse_loss(model(x), x), x, optimizer=torch.optim.Adam(model.parameters())
    )
    found = shardir.compare(
        model, steps={"first": step, "second": step}, plans=["ddp"], meshes=["dp = 2"]
    )
    assert str(found).splitlines()[-1] == "The figures are those of @first alone, not of @second"
