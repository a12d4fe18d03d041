"""Sub-axes in the search: an only axis is as good as the same devices on two axes."""

from dataclasses import replace
from random import Random

import pytest
from support.extent import extent, sampled

from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.cost.clusters import load
from shardir.interpret.equivalence import check_pass
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.graph.candidates import divisions
from shardir.syntax.parser import parse
from shardir.tools import bench

laws, ratios = bench.load("program_laws"), bench.load("ratios")
steps = bench.load("random_steps")

SIZES = [
    (None, (2, 3)), (None, (2, 4)), (None, (4, 4)),
    ("gloo", (2, 2)), ("gloo", (2, 4)), ("h200", (2, 8)), ("pod2048", (8, 8)),
]  # fmt: skip
"""Clusters, and two axes on their first devices. In the last two clusters the units of a level end
between the axes."""


@pytest.mark.parametrize(("cluster", "sizes"), sampled(SIZES, 3), ids=str)
def test_one_axis_is_never_slower_than_two(cluster: str | None, sizes: tuple[int, int]):
    """And the lowered program takes the objective's time."""
    a, b = sizes
    devices = replace(load(cluster).part(a * b), memory=None) if cluster else None
    one, two = Mesh("m", (("d", a * b),), devices), Mesh("m", (("a", a), ("b", b)), devices)
    for seed in range(extent(1, 40)):
        text = steps.random_step(one, Random(5 + seed), 2)  # of the first some sizes are small
        objective, spent = searched(text)
        assert spent == pytest.approx(objective, rel=ratios.ROUNDING)
        other, _ = searched(text.replace(steps.declared(one), steps.declared(two)))
        assert objective <= other * (1 + 1e-9)


def searched(text: str) -> tuple[float, float]:
    """Return the objective of the search, and the time of the lowered program."""
    options = "inline-calls,distributed-autodiff,search-strategies{overlap=false}"
    plan = compile(text, options).module
    ((f, _),) = bodies(plan)
    return found_by_search(f)["objective"], laws.lowered_seconds(plan)


def test_a_program_over_sub_axes_computes_the_same():
    """Two features are not divided by six devices, and no more are three rows."""
    text = """
dist.mesh @m <d = 6>
func.func @f(%x: tensor<3x64xf32>, %w: tensor<64x2xf32>) -> tensor<3x2xf32> {
  %y = nn.matmul %x, %w : (tensor<3x64xf32>, tensor<64x2xf32>) -> tensor<3x2xf32>
  func.return %y : tensor<3x2xf32>
}
"""
    plan = compile(text, "search-strategies").module
    assert "[{d:(2)3}, {d:(1)2}]" in str(plan)
    check_pass(parse(str(plan)), compile(plan, "lower-plan").module, "lower-plan")


def test_an_only_axis_is_divided():
    def divided(*sizes: int, cluster: str | None = None) -> list[tuple[str, ...]]:
        devices = load(cluster).part(sizes[0]) if cluster else None
        mesh = Mesh("m", tuple(zip("ab", sizes, strict=False)), devices)
        return [tuple(map(str, axes)) for axes in divisions(mesh)]

    assert divided(7) == [("a",)]
    assert divided(2, 8) == [("a", "b")]
    assert divided(8) == divided(8, 1) == [("a",), ("a:(1)2", "a:(2)4")]
    assert divided(30) == [("a",), ("a:(1)2", "a:(2)15"), ("a:(1)6", "a:(6)5")]
    assert divided(64, cluster="h200") == [("a",), ("a:(1)8", "a:(8)8")]
    assert divided(16, cluster="h200") == [("a",), ("a:(1)2", "a:(2)8")]
