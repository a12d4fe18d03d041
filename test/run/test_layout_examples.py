"""The examples of layouts, strategies and redistributions on real ranks: results and gradients."""
# ruff: noqa: E402 (torch may not be installed)

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from support.device import DEVICE
from support.ranks.example_runs import Tensors, check_training, equal, gradients

import shardir
from shardir.backend.runs import Options, RunError
from shardir.backend.torch.launch.start import run
from shardir.diagnostics import ShardirError
from shardir.interpret import run as interpret
from shardir.syntax.parser import parse


@pytest.mark.parametrize(
    ("name", "layouts"), [("redistributions_2_devices", 3), ("redistributions_4_devices", 7)]
)
def test_every_redistribution_keeps_the_value(ran, name, layouts):
    example = ran(name)
    assert len(example.plan["functions"]) == layouts
    pairs = 0
    for function in example.plan["functions"]:
        x = example.args(function)["x"]
        for y in example.results(function):
            np.testing.assert_array_equal(y, x.numpy().astype(np.float32))
            pairs += 1
    assert pairs == layouts * (layouts - 1)


@pytest.mark.parametrize("function", ["a2_b2_c2", "a4_b1_c1", "a1_b8_c1", "named"])
def test_strategies(ran, function):
    example = ran("matmul_strategies")
    args = example.args(function)
    equal(example.results(function)[0], args["x"] @ args["w"])


@pytest.mark.parametrize(
    ("name", "wanted"), [("matmul_rows_then_columns", "xwv"), ("matmul_partial_groups", "xab")]
)
def test_two_products(ran, name, wanted):
    example = ran(name)
    args = example.args("gradient")
    equal(example.results("net")[0], args[wanted[0]] @ args[wanted[1]] @ args[wanted[2]])
    right = gradients(lambda x, w, v: x @ w @ v, [args[k] for k in wanted], args["d_z"])
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)


def test_net_on_eight(ran):
    example = ran("operator_parallel")
    args = example.args("gradient")
    z, dw = gradients(lambda w: torch.relu(args["x"] @ w), [args["w"]], args["d_z"])
    equal(example.results("net")[0], z)
    for found, value in zip(example.results("gradient"), (z, dw), strict=True):
        equal(found, value)


@pytest.mark.parametrize("mode", [None, "auto"])
def test_one_strategy_of_three(ran, mode):
    """The strategies of the other ops are inferred, or searched for."""
    example = ran("ffn_cost_graph", mode=mode)
    args = example.args("gradient")
    net = example.args("ffn")
    equal(example.results("ffn")[0], torch.relu(net["x"] @ net["w1"]) @ net["w2"])
    right = gradients(
        lambda w1, w2: torch.relu(args["x"] @ w1) @ w2, [args["w1"], args["w2"]], args["d_y"]
    )
    for found, value in zip(example.results("gradient"), right, strict=True):
        equal(found, value)


@pytest.mark.parametrize("form", ["replicated", "rows", "columns", "summed"])
def test_four_forms(ran, form):
    assert ran("matmul_four_forms").results(form)[0].tolist() == [[19, 22], [43, 50]]


# ---- the trained net ----


def test_the_net_starts_at_the_loss_of_the_log(ran):
    """The log of MindSpore's tutorial has the mean over rank 0's samples, the first two of 16."""
    example = ran("operator_parallel_trained", 0)
    (losses,) = example.results("losses")
    described = example.plan["functions"]["losses"]["results"][0]
    assert (described["shape"], described["dims"]) == ([16], [["d"]])
    np.random.seed(1)  # as the tutorial's program draws its data
    x, labels = np.random.rand(16, 32), np.random.rand(16, 16)
    equal(np.load(example.directory / "data" / "operator_parallel_x.npy"), x)
    assert abs(losses[:2].mean() - 23.03) < 0.04
    assert abs(losses[:2].mean() - labels[:2].sum(1).mean() * np.log(16)) < 0.04


def test_the_net_is_trained(ran):
    example = ran("operator_parallel_trained", 4)

    def loss(v: Tensors) -> Any:
        z = torch.relu(v["x"] @ v["w"])
        return -(torch.log_softmax(z, 1) * v["labels"]).sum()

    check_training(example, loss, steps=4, lr=0.001, momentum=0.1)
    losses = example.dump["losses/step"]
    assert (np.diff(losses) < 0).all(), losses
    assert (
        example.results("losses")[0][:2].mean()
        < ran("operator_parallel_trained", 0).results("losses")[0][:2].mean()
    )


# ---- shards of explicit sizes ----


def test_manual_split(ran):
    """A table in shards of explicit sizes: lookup, gradient, redistributions, training."""
    functional = torch.nn.functional
    example = ran("manual_split")
    args = example.args("gradient")
    rows, d_table = gradients(
        lambda table: functional.embedding(args["ids"], table), [args["table"]], args["d_rows"]
    )
    equal(example.results("net")[0], rows)
    equal(example.results("gradient")[1], d_table)
    table = example.args("moved")["table"].numpy().astype(np.float32)
    np.testing.assert_array_equal(example.results("moved")[0], table)

    def loss(v: Tensors) -> Any:
        flat = functional.embedding(v["ids"], v["table"]).flatten(1)
        return functional.cross_entropy(flat @ v["w"], v["clicks"])

    check_training(example, loss, steps=3)


def test_the_fields_of_a_manual_split(ran):
    """Each device looks up the ids of its fields, in its shard of the table."""
    functional = torch.nn.functional
    example = ran("manual_split")
    first = torch.tensor([0, 40, 64, 71])
    args = example.args("gradient_of_fields")
    rows, d_table = gradients(
        lambda table: functional.embedding(args["codes"] + first, table), [args["table"]],
        args["d_rows"],
    )  # fmt: skip
    equal(example.results("fields")[0], rows)
    equal(example.results("gradient_of_fields")[1], d_table)

    def loss(v: Tensors) -> Any:
        flat = functional.embedding(v["codes"] + first, v["table"]).flatten(1)
        return functional.cross_entropy(flat @ v["w"], v["clicks"])

    check_training(example, loss, steps=3, step="step_of_fields")


FIELDS = """dist.mesh @m <d = 2>
!table = tensor<5x2xf32>
!ids = tensor<16x2xi64>
func.func @f(
    %table: !table {{train.input = #train.init<normal>}},
    %codes: !ids {{train.input = #train.init<integers, low = 0, high = {}>}}
) -> tensor<16x2x2xf32> {{
  %first = nn.constant dense<[0, 3]> : tensor<2xi64> -> tensor<2xi64>
  %ids = nn.add %codes, %first : (!ids, tensor<2xi64>) -> !ids
  %y = nn.gather %table, %ids axis 0 field 1 slices <3, 2> strategy<((2, 1), (1, 2))>
    : (!table, !ids) -> tensor<16x2x2xf32>
  func.return %y : tensor<16x2x2xf32>
}}"""


@pytest.mark.parametrize("high", [2, 3])
def test_an_id_out_of_its_slice_ends_the_run(tmp_path: Path, high: int):
    """Of field 1, rows 3 and 4, which rank 1 has; in the interpreter too."""
    text = FIELDS.format(high)
    compiled = shardir.compile(text)
    directory = compiled.save(tmp_path / "f")
    codes = np.array([[0, 0]] * 15 + [[0, high - 1]])
    module = parse(text)
    table = np.zeros((5, 2), np.float32)
    if high == 2:
        run(directory, Options(timeout=60))
        interpret(module, "f", [table, codes])
        return
    said = {
        "cpu": r"IndexError: index 5 at \[\d+, 1\] is out",
        "cuda": ".*: an index is out of range",
    }
    with pytest.raises(RunError, match=f"rank 1 failed: {said[DEVICE]}"):
        run(directory, Options(timeout=60))
    with pytest.raises(ShardirError, match=r"expected an index from 3 to 4 at \[15, 1\], got 5"):
        interpret(module, "f", [table, codes])
