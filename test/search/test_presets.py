"""Presets: against plans written by hand, against formulas, and against the mode auto.

The programs of presets to compare with have the layouts of the arguments only; propagation infers
the others, and the pipeline `train` differentiates them. `auto` takes the same plans from its own
graph, after differentiation.
"""

import re
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from math import prod
from random import Random

import pytest
from support.extent import extent, long_form, sampled

from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import mesh_of
from shardir.cost import report
from shardir.cost.clusters import load, names
from shardir.cost.report import FunctionCost
from shardir.dialects.dist import layout_of
from shardir.rewriting.composites import expand
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.graph.candidates import CandidateSource
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.value_layouts import tied_values
from shardir.search.measure.strategy_plan import LoweredPlans, StrategyPlan
from shardir.search.plans.preset_plans import plan_of
from shardir.search.plans.preset_solutions import PresetSolutions
from shardir.search.plans.presets import Preset, Product, ProductOfPresets, Structure
from shardir.syntax.parser import parse
from shardir.tools import bench

plans, programs, search = bench.load("plans"), bench.load("programs"), bench.load("search")
preset_laws, laws, steps = bench.load("preset_laws"), bench.load("laws"), bench.load("random_steps")

DATA, ZERO_3, MEGATRON, SEQUENCE = Preset
SMALL = {"layers": 1, "batch": 16, "seq": 32, "hidden": 64, "heads": 8}
MODELS = {
    "gpt": partial(programs.gpt, **SMALL, vocab=128),
    "transformer": partial(programs.transformer, **SMALL),
    "mlp": programs.mlp,
}


def on(cluster: str, mesh: Mesh, program: str) -> str:
    """Return a program on a mesh of a cluster."""
    bare = search.LAYOUT.sub("", program)
    declared = re.sub("dist.mesh @m <[^>]*>", f"dist.mesh {mesh} on @c", bare, count=1)
    return f"dist.cluster @c <{load(cluster).part(mesh.size)}>\n{declared}"


@pytest.mark.parametrize("model", ["gpt", "transformer"])
def test_megatron_is_the_plan_written_by_hand(model: str) -> None:
    module = parse(MODELS[model](mesh=(2, 4)))
    found = plans.of_presets(module, (DATA, MEGATRON))
    for (_, written), (_, block) in zip(bodies(module), bodies(found), strict=True):
        assert [layout_of(v) for v in block.args] == [layout_of(v) for v in written.args]


def test_an_input_has_its_batch_split_once() -> None:
    """Two of its dimensions are of the same class."""
    module = parse("""
dist.mesh @m <a = 2>
func.func @f(%x: tensor<8x8xf32> {train.input = #train.init<normal>}) -> tensor<8x8xf32> {
  %t = nn.transpose %x perm <1, 0> : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %y = nn.add %x, %t : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
  func.return %y : tensor<8x8xf32>
}
""")
    ((_, block),) = bodies(plans.of_presets(module, (DATA,)))
    assert str(layout_of(block.args[0])) == "@m, [{a}, {}]"


def planned(text: str, some: Iterable[Product]) -> Iterator[tuple[StrategyPlan, LoweredPlans]]:
    """Yield the plans of products of presets in the graph of a step, those that exist."""
    module = search.applied(text, "distributed-autodiff")
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    ties = tied_values(f, block)
    expand(block, None)
    graph, structure = CostGraph(block, CandidateSource(mesh), ties), Structure(f)
    solutions = PresetSolutions(graph, graph.problem_with(LatencyShares(1.0)), structure)
    lowered = LoweredPlans(module, f, mesh)
    for presets in (ProductOfPresets(each, structure, mesh) for each in some):
        if presets.exists:
            choice = solutions.choice(solutions.solve(presets))
            yield plan_of(graph, choice, 0.0, str(presets)), lowered


def preset_cost(text: str, presets: Product) -> FunctionCost:
    """Return the cost of the plan of presets in the graph of a step, lowered."""
    ((plan, lowered),) = planned(text, [presets])
    return lowered.cost(plan)


@pytest.mark.parametrize(
    ("model", "presets"),
    sampled(product(["transformer", "mlp"], [(DATA, DATA), (MEGATRON, DATA)]), 2),
    ids=str,
)
def test_a_plan_of_presets_is_that_of_its_layouts(model: str, presets: Product) -> None:
    text = on("h200", Mesh("m", (("dp", 2), ("tp", 4))), MODELS[model]())
    (written,) = report(compile(plans.of_presets(parse(text), presets)).module)
    assert preset_cost(text, presets).seconds == pytest.approx(written.seconds, rel=1e-9)


@pytest.mark.parametrize("presets", [MEGATRON, SEQUENCE])
def test_bytes_of_megatron(presets: Preset) -> None:
    """Two all-reduces of an activation forward and two backward for each layer: each of 2 (n - 1) /
    n of its bytes. With sequence parallelism each is a reduce-scatter and an all-gather, of as many
    bytes."""
    layers, n, shape = 2, 4, (16, 32, 64)
    made = programs.transformer(layers=layers, batch=16, seq=32, hidden=64, heads=8)
    text = on("h200", Mesh("m", (("tp", n),)), made)
    activations = 8 * layers * 4 * prod(shape) * (n - 1) / n
    ((received, _),) = preset_cost(text, (presets,)).communication.values()
    assert activations <= received <= activations * 1.02  # and the norms' gradients, and the loss


CASES = [
    ("ascend910", (("a", 4),), "gpt"),
    ("h200", (("a", 2), ("b", 2)), "transformer"),
    ("pod2048", (("a", 16),), "mlp"),
]
MESHES = [(4,), (8,), (2, 4), (4, 2), (2, 2, 2)]
MANY = [
    (cluster, tuple(zip("abc", sizes, strict=False)), model)
    for cluster, sizes, model in product(names(), MESHES, MODELS)
]


@pytest.mark.parametrize(("cluster", "axes", "model"), extent(CASES[2:], CASES + MANY))
def test_auto_is_never_slower_than_presets(cluster: str, axes: tuple, model: str) -> None:
    never_slower(on(cluster, Mesh("m", axes), MODELS[model]()))


@long_form
def test_the_smallest_sum_is_reported_beside_that_of_presets() -> None:
    """A GPT whose plan of presets is faster with overlap: its gap is not that of the search."""
    step = compile(
        search.LAYOUT.sub("", programs.gpt(layers=1, mesh=(2, 4))), "distributed-autodiff"
    ).module
    found, sums = (
        found_by_search(f)
        for options in ("", "{overlap=false}")
        for f, _ in bodies(compile(step, f"search-strategies{options}").module)
    )
    assert found["bound"] <= found["smallest"] < found["objective"]
    assert found["smallest"] == sums["objective"] and "smallest" not in sums


def never_slower(text: str) -> None:
    """The law, by the report of the lowered programs, overlap included."""
    module = parse(text)
    found = [*preset_laws.claims(module, preset_laws.existing(module))]
    assert found
    for claim, ratio in found:
        assert ratio <= 1, claim


def drawn(cluster: str, number: int) -> tuple[Mesh, str]:
    """Return the mesh and the program of a number of the law `presets`."""
    random = Random(f"presets {cluster} {number}")
    mesh = laws.random_mesh(cluster, random)
    return mesh, steps.random_step(mesh, random, random.randint(1, 3), steps.OPTIMIZERS)


def test_presets_are_compared_by_programs() -> None:
    """The program takes 27% longer than the estimate of the searched plan."""
    module = parse(drawn("h200", 100000022)[1])
    for claim, ratio in preset_laws.claims(module, [(DATA, ZERO_3)]):
        assert ratio <= 1, claim
