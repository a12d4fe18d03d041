"""Errors that an external review found, each with one small program.

The docstring of a test is the wrong behaviour before.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.emitted import functions_of
from support.harness import compiled

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.notation import mesh_of, parse_layout
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.plan.program import PlanError, load_plan
from shardir.diagnostics import ShardirError
from shardir.interpret.equivalence import compare
from shardir.syntax.source import collect_warnings
from shardir.tools import run as shard_run

# ---- text ----


def test_alias_may_be_indented() -> None:
    """It was reported as undefined."""
    text = """
        dist.mesh @m <a = 2>
        #rows = #dist.layout<@m, [{a}]>
        func.func private @f(tensor<4xf32, #rows>)"""
    assert "[{a}]" in shardir.compile(text, "").text


# ---- constants ----


def constant(numbers: str, type: str) -> Any:
    """Return the value of a constant in an emitted program."""
    text = f"""
        func.func @f() -> {type} {{
          %c = nn.constant dense<{numbers}> : {type} -> {type}
          func.return %c : {type}
        }}"""
    return functions_of(shardir.compile(text).program)["f"](rt.Mesh([], 0))


@pytest.mark.parametrize("type", ["tensor<f32>", "tensor<3xf32>"])
def test_largest_f32_is_a_constant(type: str) -> None:
    """Masks contain it. Its shortest literal is a double beyond f32, which torch refuses."""
    largest = torch.finfo(torch.float32).max
    assert (constant("3.4028235e+38", type) == largest).all()
    assert (constant("-3.4028235e+38", type) == -largest).all()


@pytest.mark.parametrize(("type", "shape"), [("0x3xf32", (0, 3)), ("2x0xf32", (2, 0))])
def test_constant_without_elements(type: str, shape: tuple[int, ...]) -> None:
    assert constant("1.0", f"tensor<{type}>").shape == shape


# ---- programs and their data ----


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("<normal>", "<normal, std = -1.0>", r"\[G10\] expected std to be at least 0, got -1.0"),
        ("<normal>", "<uniform, low = 2.0, high = 1.0>", "expected low to be at most high, 1.0"),
        (
            "<normal>",
            "<integers, low = 0, high = 9223372036854775808>",
            r"\[G10\] expected high to be",
        ),
        (
            "<normal>",
            "<normal, std = 1e400>",
            "expected a number in the range of floats, got 1e400",
        ),
        ("lr = 0.1", "lr = 1e400", "expected a number in the range of floats, got 1e400"),
        (
            '#train.init<file, path = "data.npz", array = "x">',
            '"x"',
            'expected train.input .*got "x"',
        ),
    ],
)
def test_distributions_without_values_are_refused(
    old: str, new: str, message: str, tmp_path: Path
) -> None:
    """Some were drawn differently, or ended a run; an attribute that is no init was ignored."""
    np.savez(tmp_path / "data.npz", x=np.zeros(4, np.float32), y=np.zeros(4, np.float32))
    text = STEP.replace("BATCH", "4")
    assert old in text
    with pytest.raises(ShardirError, match=message):
        shardir.compile(text.replace(old, new), base_dir=tmp_path).save(tmp_path / "out")


STEP = """
    func.func private @f(
        %x: tensor<4xf32> {train.input = #train.init<file, path = "data.npz", array = "x">},
        %y: tensor<BATCHxf32> {train.input = #train.init<file, path = "data.npz", array = "y">},
        %w: tensor<f32> {train.parameter = "w", train.init = #train.init<normal>}
    ) -> tensor<f32> {
      %a = nn.reduce <sum> %x dims <0> : (tensor<4xf32>) -> tensor<f32>
      %b = nn.reduce <sum> %y dims <0> : (tensor<BATCHxf32>) -> tensor<f32>
      %c = nn.mul %a, %w : (tensor<f32>, tensor<f32>) -> tensor<f32>
      %loss = nn.mul %b, %c : (tensor<f32>, tensor<f32>) -> tensor<f32>
      func.return %loss : tensor<f32>
    }
    train.step @step of @f <sgd, lr = 0.1>
"""


@pytest.mark.parametrize(("rows", "batch"), [(5, 4), (9, 2)])
def test_inputs_and_labels_stay_together(rows: int, batch: int, tmp_path: Path) -> None:
    """The order of rows depends on their number: other rows were drawn for the labels."""
    np.savez(tmp_path / "data.npz", x=np.zeros(9, np.float32), y=np.zeros(rows, np.float32))
    text = STEP.replace("BATCH", str(batch))
    with pytest.raises(ShardirError, match="expected equal numbers"):
        shardir.compile(text, base_dir=tmp_path).save(tmp_path / "out")


def test_step_that_is_not_differentiated_is_named() -> None:
    with pytest.raises(ShardirError, match="expected functions in place of requests"):
        _ = shardir.compile(STEP.replace("BATCH", "4"), "propagate-strategies").program


def test_no_passes_are_no_passes(tmp_path: Path) -> None:
    """An empty pipeline was replaced by the default one."""
    path = tmp_path / "f.ir"
    path.write_text(STEP.replace("BATCH", "4"))
    assert "train.step @step" in shardir.compile_file(path, "").text
    assert "train.step @step" not in shardir.compile_file(path).text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--dump", "/nowhere/there.npz"],
            "expected a file in a writable folder, got /nowhere/there.npz",
        ),
        (["--dump", "/"], "expected a file, not a directory, got /"),
        (["--timeout", "0"], "more than 0"),
        (["--timeout", "nan"], "more than 0"),
        (["--timeout", "inf"], "at most 1000000, got inf"),
        (["--timeout", "1e10"], "at most 1000000, got 1e10"),
        (["--dump", "program.py"], "expected a name that ends in .npz, got program.py"),
        (["--threads", "-1"], "expected 0 or more"),
    ],
)
def test_impossible_options_are_refused_before_the_run(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        shard_run.main(["f.ir", *words])
    assert message in capsys.readouterr().err


def test_file_of_another_kind_is_named_as_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "f.txt"
    path.write_text("")
    assert shard_run.main([str(path)]) == 2
    assert "f.txt: is a file, not a compiled directory" in capsys.readouterr().err


# ---- comparisons ----


@pytest.mark.parametrize("wrong", [0.0, 2e-5, -1e-5])
def test_small_results_are_compared_by_their_size(wrong: float) -> None:
    """The gradients of a mean are small, and all differences were below 1e-4."""
    right = np.full(4, 1e-5, np.float32)
    compare("f", 0, right, right + np.float32(1e-7), "f32")
    with pytest.raises(ShardirError, match="in result 0 of @f"):
        compare("f", 0, right, np.full(4, wrong, np.float32), "f32")


def test_inputs_that_differ_in_a_number_are_drawn_apart(tmp_path: Path) -> None:
    text = """
    func.func @f(%x_1: tensor<4xf32>, %x_2: tensor<4xf32>) -> tensor<4xf32> {
      %d = nn.sub %x_1, %x_2 : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
      func.return %d : tensor<4xf32>
    }"""
    plan = json.loads((shardir.compile(text).save(tmp_path / "p") / "plan.json").read_text())
    first, second = plan["functions"]["f"]["args"]
    assert first["key"] != second["key"]


# ---- layouts ----

CONV = "(tensor<2x4x5xf64>, tensor<4x1x2xf64>) -> tensor<2x4x4xf64>"
LAID_OUT = {
    "explicit sizes before a concat": (
        "%x: tensor<5x3xf64, #dist.layout<@m, [{}, {b} sizes [1, 0, 2]]>>, %y: tensor<5x1xf64>",
        "nn.concat %x, %y axis 1 : (tensor<5x3xf64, #dist.layout<@m, [{}, {b} sizes [1, 0, 2]]>>, "
        "tensor<5x1xf64>) -> tensor<5x4xf64>",
    ),
    "explicit sizes before a slice": (
        "%x: tensor<4x3xf64, #dist.layout<@m, [{a} sizes [1, 3], {}]>>, %y: tensor<f64>",
        "nn.slice %x starts <1, 0> limits <4, 3> strides <1, 1> : (tensor<4x3xf64, "
        "#dist.layout<@m, [{a} sizes [1, 3], {}]>>) -> tensor<3x3xf64>",
    ),
    "explicit sizes before no repeats": (
        "%x: tensor<5x3xf64, #dist.layout<@m, [{a} sizes [4, 1], {}]>>, %y: tensor<f64>",
        "nn.repeat_interleave %x repeats 0 axis 0 : (tensor<5x3xf64, "
        "#dist.layout<@m, [{a} sizes [4, 1], {}]>>) -> tensor<0x3xf64>",
    ),
    "a device without a group of a convolution": (
        "%x: tensor<2x4x5xf64, #dist.layout<@m, [{}, {b}, {}]>>, %y: tensor<4x1x2xf64>",
        f"nn.conv %x, %y : {CONV}".replace(
            "2x4x5xf64", "2x4x5xf64, #dist.layout<@m, [{}, {b}, {}]>"
        ),
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_laid_out_ops_keep_their_meaning(name: str) -> None:
    """Explicit sizes were copied to dimensions of another size; groups of channels were counted on
    devices without channels: four over three devices are 2, 2 and 0."""
    arguments, op = LAID_OUT[name]
    result = op.rsplit("-> ", 1)[1]
    module = shardir.parse(f"""
        dist.mesh @m <a = 2, b = 3>
        func.func @f({arguments}) -> {result} {{
          %z = {op}
          func.return %z : {result}
        }}
        train.gradient @g of @f wrt <0>""")
    compiled(module, check=True)


@pytest.mark.parametrize(
    ("op", "result"),
    [
        ("nn.max_pool %x window <3> stride <2> padding <1, 1>", "2x1x4xf64"),
        ("nn.slice %x starts <0, 0, 1> limits <2, 1, 7> strides <1, 1, 1>", "2x1x6xf64"),
        ("nn.fold %x dim 1 step 2 offset 0", "2x7xf64"),
    ],
)
def test_halo_exchanges_are_differentiated_in_the_local_view(op: str, result: str) -> None:
    """The cotangent of the windows was used as that of the rows."""
    halo = "[{}, {}, {b}]" if "fold" not in op else "[{}, {b}, {}]"
    shape = "2x1x7xf64" if "fold" not in op else "2x4x1xf64"
    x = f"tensor<{shape}, #dist.layout<@m, {halo}>>"
    module = shardir.parse(f"""
        dist.mesh @m <a = 2, b = 3>
        func.func @f(%x: {x}) -> tensor<{result}> {{
          %z = {op} : ({x}) -> tensor<{result}>
          func.return %z : tensor<{result}>
        }}
        train.gradient @g of @f wrt <0>""")
    compiled(module, ("propagate-strategies", "insert-redistributions", "lower-to-spmd"))
    assert f"dist.halo_{'fold' if 'fold' in op else 'unfold'}" in str(module)
    compiled(module, ("distributed-autodiff",), check=True)


def test_axis_of_size_1_splits_no_input() -> None:
    """It does not overlap with itself, so that two dimensions of an op could have it."""
    text = """
        dist.mesh @m <a = 1, b = 1>
        func.func @f(
            %x: tensor<3x6x2xf32>, %w: tensor<6xf32, #dist.layout<@m, [{a, b}]>>, %b: tensor<6xf32>
        ) -> tensor<3x6x2xf32> {
          %y = nn.group_norm %x, %w, %b groups 3 eps 1.000000e-05 : (tensor<3x6x2xf32>,
            tensor<6xf32, #dist.layout<@m, [{a, b}]>>, tensor<6xf32>) -> tensor<3x6x2xf32>
          func.return %y : tensor<3x6x2xf32>
        }"""
    assert "{a" not in shardir.compile(text, "propagate-strategies").text
    shardir.compile(text)


def test_redistribution_of_another_mesh_is_refused() -> None:
    """A step between two meshes was planned."""
    mesh = mesh_of("m", "a = 2")
    layouts = [parse_layout(f"@{name}, [{{a}}, {{}}]") for name in "km"]
    with pytest.raises(ShardirError, match=r"\[R3\] expected a layout of mesh @m, got \[@k"):
        shardir.plan_redistribution((4, 4), "f32", mesh, layouts[0], layouts[1])


# ---- mixed precision ----


@pytest.mark.parametrize("pipeline", ["train", "single-device"])
def test_a_redistribution_of_the_source_may_be_narrow(pipeline: str) -> None:
    """It stayed f32 after a product in bf16."""
    text = """
        dist.mesh @m <a = 2>
        func.func @f(%x: tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>) -> tensor<4x4xf32> {
          %y = nn.matmul %x, %x : (tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>,
            tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>)
            -> tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>
          %z = dist.redistribute %y : (tensor<4x4xf32, #dist.layout<@m, [{a}, {}]>>)
            -> tensor<4x4xf32, #dist.layout<@m, [{}, {}]>>
          %r = nn.relu %z : (tensor<4x4xf32, #dist.layout<@m, [{}, {}]>>) -> tensor<4x4xf32>
          func.return %r : tensor<4x4xf32>
        }"""
    after = shardir.compile(text, f"mixed-precision,{pipeline}").text
    assert "nn.convert %x" in after
    assert "nn.convert %r" in after
    assert after.count("nn.convert") == 2


# ---- passes twice ----


def test_casts_keep_their_order() -> None:
    """Two casts that use results of the same op were exchanged by each run of the fusion."""
    text = """
        dist.mesh @m <a = 2>
        #sum = #dist.local<@m, [{}], partial sum {a}>
        #all = #dist.local<@m, [{}]>
        func.func @f(%x: tensor<4xf32, #sum>, %y: tensor<4xf32, #sum>) -> tensor<4xf64, #all> {
          %u = dist.all_reduce <sum> %x over <a> : (tensor<4xf32, #sum>) -> tensor<4xf32, #all>
          %v = dist.all_reduce <sum> %y over <a> : (tensor<4xf32, #sum>) -> tensor<4xf32, #all>
          %p = nn.convert %u : (tensor<4xf32, #all>) -> tensor<4xf64, #all>
          %q = nn.convert %v : (tensor<4xf32, #all>) -> tensor<4xf64, #all>
          %r = nn.add %p, %q : (tensor<4xf64, #all>, tensor<4xf64, #all>) -> tensor<4xf64, #all>
          func.return %r : tensor<4xf64, #all>
        }"""
    once = shardir.compile(text, "fuse-communication")
    assert shardir.compile(once.module, "fuse-communication").text == once.text


def test_a_strategy_that_is_lost_is_a_warning() -> None:
    text = """
    dist.mesh @m <a = 2>
    func.func private @f(%x: tensor<4x8xf32>, %w: tensor<8xf32> {train.parameter = "w", train.init = #train.init<normal>}) -> tensor<f32> {
      %y = nn.mul %x, %w : (tensor<4x8xf32>, tensor<8xf32>) -> tensor<4x8xf32>
      %l = nn.mse_loss <mean> %y, %x strategy<((2, 1), (2, 1))> : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<f32>
      func.return %l : tensor<f32>
    }
    train.step @step of @f <sgd, lr = 0.1>
    """  # noqa: E501 - the text of a program
    with collect_warnings() as early:
        shardir.compile(text, "distributed-autodiff,propagate-strategies")
    assert ["the strategy of nn.mse_loss is lost" in message for _, message in early] == [True]
    with collect_warnings() as late:
        shardir.compile(text, "train")
    assert not late


def test_explicit_sizes_in_a_plan_sum_to_the_dimension(tmp_path: Path) -> None:
    text = """
    dist.mesh @m <a = 2>
    func.func @f(%x: tensor<5xf32, #dist.layout<@m, [{a} sizes [1, 4]]>>) -> tensor<f32> {
      %s = nn.reduce <sum> %x dims <0> : (tensor<5xf32, #dist.layout<@m, [{a} sizes [1, 4]]>>) -> tensor<f32>
      func.return %s : tensor<f32>
    }"""  # noqa: E501 - the text of a program
    directory = shardir.compile(text).save(tmp_path / "p")
    path = directory / "plan.json"
    plan = json.loads(path.read_text())
    load_plan(directory)
    for sizes in ([1, 3], [1, 4, 0]):
        plan["functions"]["f"]["args"][0]["dims"][0]["sizes"] = sizes
        path.write_text(json.dumps(plan))
        with pytest.raises(PlanError, match=r"dimension 0: .* are not the shards of 5 elements"):
            load_plan(directory)


def test_empty_sizes_are_refused() -> None:
    with pytest.raises(ShardirError, match="got '\\]'"):
        parse_layout("@m, [{a} sizes []]")


DEVICES = Cluster((Level("node", 2, 1e9, 1e-6),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cluster": "h200"}, "expected a Cluster, got 'h200'"),
        ({"shape": (-4,)}, "integers of 0 or more, got (-4,)"),
        ({"shape": (4.0,)}, "integers of 0 or more, got (4.0,)"),
        ({"shape": (4, 4)}, "a layout of 2 dimensions"),
        ({"source": "@m, [{a}]"}, "expected a Layout, got '@m, [{a}]'"),
        ({"dtype": "f31"}, "expected an element type, got f31"),
    ],
)
def test_wrong_arguments_of_a_plan(change: dict[str, Any], message: str) -> None:
    layout = parse_layout("@m, [{a}]")
    given: dict[str, Any] = {
        "shape": [4], "dtype": "f32", "mesh": Mesh("m", (("a", 2),)), "source": layout,
        "target": layout, "cluster": DEVICES,
    }  # fmt: skip
    assert not shardir.plan_redistribution(**given).steps
    with pytest.raises(ShardirError, match=re.escape(message)):
        shardir.plan_redistribution(**given | change)
