"""The work of compiling grows linearly with the number of ops."""

import re
from dataclasses import replace
from itertools import count
from unittest.mock import patch

import pytest
from support.extent import extent, long_form
from support.growth import superlinear
from xdsl.context import Context

import shardir
from shardir.api import caches
from shardir.backend.torch.emit import program
from shardir.backend.torch.emit.plan import plan_of
from shardir.backend.torch.emit.program import program_text
from shardir.cost import clusters
from shardir.pipelines import build
from shardir.syntax.parser import parse
from shardir.syntax.printer import print_module
from shardir.tools import bench

programs = bench.load("programs")
placed = bench.load("auto").on

CLUSTER = replace(clusters.load("h200").part(8))

RUNS = count()


@pytest.fixture(autouse=True)
def with_full_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run begins with empty caches, whatever other tests have compiled."""
    monkeypatch.setattr(caches, "MAX_ENTRIES", 10**9)


def of_this_run(text: str) -> str:
    """Return a program with other names of parameters than that of any run before: attributes that
    have been read once are found in a table."""
    return text.replace('"w', f'"run{next(RUNS)}.w')


def compiled(layers: int) -> None:
    """Compile an MLP to a train step, and to the text of both views and of the program."""
    module = parse(of_this_run(placed(CLUSTER, programs.mlp(layers=layers))), verify=True)
    print_module(module)
    for p in build("train"):
        p.apply(Context(), module)
        module.verify()
    print_module(module)
    program_text(module)
    with patch.object(program, "outline_copy", lambda m: m):  # each layer for itself
        program_text(module)
    plan_of(module)


def compiled_presets(layers: int) -> None:
    """Compile an MLP without annotations by a plan that gathers the parameters of each layer."""
    text = of_this_run(placed(CLUSTER, programs.mlp(layers=layers)))
    compiled = shardir.compile(re.sub(r", #dist\.layout<[^>]*>", "", text), plan="fsdp")
    assert compiled.program and "dist.all_gather" in compiled.text


FUNCTIONS = """
func.func private @called{i}(%x: tensor<8xf32>) -> tensor<8xf32> {{
  %y = nn.relu %x : (tensor<8xf32>) -> tensor<8xf32>
  func.return %y : tensor<8xf32>
}}
func.func private @loss{i}(
    %x: tensor<8xf32, #dist.layout<@m, [{{d}}]>>,
    %w: tensor<8xf32> {{train.parameter = "w{i}", train.init = #train.init<normal>}}
) -> tensor<f32> {{
  %y = nn.mul %x, %w : (tensor<8xf32, #dist.layout<@m, [{{d}}]>>, tensor<8xf32>) -> tensor<8xf32>
  %z = func.call @called{i}(%y) : (tensor<8xf32>) -> tensor<8xf32>
  %s = nn.reduce <sum> %z dims <0> : (tensor<8xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}}
train.step @step{i} of @loss{i} <sgd, lr = 0.1>
"""


def compiled_functions(number: int) -> None:
    """Compile a number of steps, each of its own function, which calls one, and a mesh after
    them."""
    text = "".join(FUNCTIONS.format(i=i) for i in range(number)) + "dist.mesh @m <d = 2>"
    compiled = shardir.compile(of_this_run(text))
    assert compiled.program and compiled.text


def compiled_parameters(number: int) -> None:
    """Compile a step of one function with a number of parameters, all of which its update
    returns."""
    t = "tensor<8xf32, #dist.layout<@m, [{d}]>>"
    head = ", ".join(
        f'%w{i}: {t} {{train.parameter = "w{i}", train.init = #train.init<normal>}}'
        for i in range(number)
    )
    lines = [f"%x{i + 1} = nn.mul %x{i}, %w{i} : ({t}, {t}) -> {t}" for i in range(number)]
    text = (
        f"dist.mesh @m <d = 2>\nfunc.func private @loss(%x0: {t}, {head}) -> tensor<f32> {{\n"
        + "\n".join(lines)
        + f"\n%s = nn.reduce <sum> %x{number} dims <0> : ({t}) -> tensor<f32>\n"
        "func.return %s : tensor<f32>\n}\ntrain.step @step of @loss <sgd, lr = 0.1>"
    )
    compiled = shardir.compile(of_this_run(text))
    assert compiled.program and compiled.text


@long_form
def test_the_work_grows_as_the_number_of_parameters() -> None:
    assert list(superlinear(compiled_parameters, 80)) == []


def test_the_work_grows_as_the_number_of_functions() -> None:
    assert list(superlinear(compiled_functions, extent(6, 32))) == []


def test_the_work_grows_as_the_number_of_layers() -> None:
    assert list(superlinear(compiled, extent(2, 16))) == []


@long_form
def test_the_work_of_presets_grows_as_the_number_of_layers() -> None:
    """Their gathers are fused by layers too."""
    assert list(superlinear(compiled_presets, 16)) == []
