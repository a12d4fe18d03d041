"""docs/miniature.py, the compiler in small: it computes what numpy does, and decides as shardir."""

import importlib.util
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.extent import extent, sampled
from support.harness import apply

from shardir.dialects.dist import layout_of
from shardir.syntax.parser import default_parser
from shardir.syntax.source import Source

FILE = Path(__file__).parents[2] / "docs" / "miniature.py"
PROGRAM = """
dist.mesh @m <dp = 2, tp = 2>
#x = #dist.layout<@m, [{dp}, {}]>
#w = #dist.layout<@m, [{}, {tp}]>
func.func private @loss(
    %x: tensor<8x4xf32, #x>, %w: tensor<4x16xf32, #w> {train.parameter = "w"},
    %v: tensor<16x4xf32> {train.parameter = "v"}) -> tensor<f32> {
  %h = nn.matmul %x, %w : (tensor<8x4xf32, #x>, tensor<4x16xf32, #w>) -> tensor<8x16xf32>
  %r = nn.relu %h
  %y = nn.matmul %r, %v
  %z = nn.add %y, %x : (tensor<8x4xf32>, tensor<8x4xf32, #x>) -> tensor<8x4xf32>
  %q = nn.mul %z, %z
  %loss = nn.reduce <sum> %q dims <0, 1> -> tensor<f32>
  func.return %loss
}
"""


@pytest.fixture(scope="module")
def mini() -> Any:
    spec = importlib.util.spec_from_file_location("miniature", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["miniature"] = module  # dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def mesh(mini: Any) -> Any:
    return mini.Mesh((("dp", 2), ("tp", 2)))


def layouts(mini: Any, rank: int = 2) -> list[Any]:
    """All complete layouts over dp and tp of a value with so many dimensions."""
    axes = [(), ("dp",), ("tp",), ("dp", "tp"), ("tp", "dp")]
    every = (mini.Layout(dims) for dims in product(axes, repeat=rank))
    return [l for l in every if len(set(l.used)) == len(l.used)]


def test_it_is_short_and_needs_numpy_alone() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 500
    imports = {line.split()[1].split(".")[0] for line in text.splitlines()
               if line.startswith(("import ", "from "))}  # fmt: skip
    assert imports - sys.stdlib_module_names == {"numpy"}


def test_it_runs(mini: Any, capsys: pytest.CaptureFixture[str]) -> None:
    mini.main()
    out = capsys.readouterr().out
    assert "y_1 = ranks.all_reduce(y, ('tp',))" in out
    assert float(out.split()[-1]) < 1e-12


def test_any_annotations_compute_what_one_device_does(mini: Any, mesh: Any) -> None:
    rng, draw = np.random.default_rng(1), random.Random(1)
    choices: list[Any] = [None, *layouts(mini)]
    for _ in range(extent(40, 1000)):
        drawn = {name: draw.choice(choices) for name in "xwv"}
        annotations = {name: layout for name, layout in drawn.items() if layout}
        program = mini.block(annotations)
        text, found = mini.lower(program, mesh)
        data = [rng.standard_normal(v.shape) for v in program.values if not v.op]
        results = mini.run(text, program, found, mesh, data)
        for result, wanted in zip(results, mini.on_one_device(*data), strict=True):
            np.testing.assert_allclose(result, wanted, rtol=1e-10, err_msg=f"{drawn}\n{text}")


def test_plans_of_redistributions_lead_to_the_target(mini: Any, mesh: Any) -> None:
    """Each rank has its shard of the target, from its shard or its summand of the source."""
    every = layouts(mini)
    partial = [mini.Layout(l.dims, (a,)) for l in every for a in ("dp", "tp") if a not in l.used]
    partial.append(mini.Layout(((), ()), ("dp", "tp")))
    for source, target in sampled(list(product([*every, *partial], every)), 100):
        check_plan(mini, mesh, source, target)


def check_plan(mini: Any, mesh: Any, source: Any, target: Any) -> None:
    x = np.arange(64.0).reshape(8, 8)
    _, steps = mini.plan(mesh, x.shape, source, target)
    summands = np.random.default_rng(2).standard_normal((mesh.extent(source.partial), *x.shape))
    summands[-1] += x - summands.sum(0)
    slots: dict[Any, Any] = {}
    barriers: dict[Any, Any] = {}

    def result(rank: int) -> np.ndarray:
        ranks = mini.Ranks(mesh, rank, slots, barriers)
        held = summands[mesh.index(rank, source.partial)][source.slices(mesh, x.shape, rank)]
        for move in steps:
            held = getattr(ranks, move.kind)(held, *move.dims, move.axes)
        return held

    with ThreadPoolExecutor(4) as pool:
        for rank, held in enumerate(pool.map(result, range(4))):
            wanted = x[target.slices(mesh, x.shape, rank)]
            np.testing.assert_allclose(held, wanted, atol=1e-9, err_msg=f"{source} {target}")


def test_it_propagates_as_shardir_does(mini: Any, mesh: Any) -> None:
    annotations = {"x": mini.Layout((("dp",), ())), "w": mini.Layout(((), ("tp",)))}
    found = mini.propagate(mini.block(annotations), mesh)
    module = default_parser().parse_source(Source(PROGRAM, "mlp.ir"))
    apply(module, "propagate-strategies")
    wanted = {
        value.name_hint: str(layout_of(value))
        for op in module.walk()
        for value in (*op.results, *(a for r in op.regions for b in r.blocks for a in b.args))
    }
    assert {v.name: f"@m, {layout}" for v, layout in found.items()} == wanted
