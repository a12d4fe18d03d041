"""The mode auto without annotations, against written plans: estimated times of the lowered
programs, by shardir.cost.report.

On every training step of docs/examples, and on small models of the benchmarks and docs/examples. At
tiny sizes latencies dominate a step; at those of one layer of the benchmarks computation, bytes and
latencies all count. The objective of the search is the time of the report, unless the program is
annotated with `recompute`.

With overlap too no written plan is faster. Then a plan of presets may be chosen (test_presets.py)
whose sum of times is larger; the law of the sums is that of the search without overlap.
"""

import re
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from support.extent import LONG, extent, sampled
from xdsl.dialects.builtin import ModuleOp

from shardir import compile
from shardir.analysis.functions import mesh_of, name_of
from shardir.cost import report
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE, found_by_search, presets_of
from shardir.syntax.parser import parse
from shardir.tools import bench

plans, programs = bench.load("plans"), bench.load("programs")
OVERLAP = "overlap-communication"
COMMENT = re.compile("//.*")
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
resnet = import_module("make_resnet").resnet

TINY = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 64}
MADE = {
    "mlp": lambda mesh: programs.mlp(mesh=mesh),
    "gpt layer": lambda mesh: programs.gpt(layers=1, mesh=mesh),
    "resnet": lambda mesh: resnet(
        blocks=extent((1,), (1, 1)), width=8, batch=8, image=16, classes=16, dp=mesh[0], tp=mesh[1]
    ),
    "transformer layer": lambda mesh: programs.transformer(layers=1, mesh=mesh),
}  # fmt: skip
if LONG:  # the examples have a BERT and a GPT, of tiny sizes
    MADE["bert layer"] = lambda mesh: programs.bert(layers=1, mesh=mesh)
    MADE["gpt"] = lambda mesh: programs.gpt(**TINY, mesh=mesh)
    MADE["bert"] = lambda mesh: programs.bert(**TINY, mesh=mesh)


def examples() -> list[str]:
    """Return the names of the training steps in the global view."""
    codes = {p.stem: COMMENT.sub("", p.read_text()) for p in sorted(EXAMPLES.glob("*.ir"))}
    found = [n for n, code in codes.items() if "train.step" in code and "#dist.local" not in code]
    return extent(["transformer_block"], found)


def assert_auto_is_fastest(module: ModuleOp) -> None:
    (mesh,) = {mesh_of(f, module) for f, _ in bodies(module)}
    assert mesh is not None
    names = [n for n in plans.PLANS if n != "2d" or len(mesh.names) == 2]
    pipeline, bare = plans.without_overlap("train"), plans.bare(module)
    written = [compile(plans.PLANS[n](module), pipeline).module for n in names]
    searched = compile(bare, plans.without_overlap("auto")).module
    overlapped = plans.seconds(searched, OVERLAP)
    if any(presets_of(f) for f, _ in bodies(searched)):
        searched = compile(bare, plans.without_overlap("auto{overlap=false}")).module
    seconds = {f.name: f.seconds for f in report(searched)}
    for plan in written:
        costs = report(plan)
        assert sum(seconds.values()) <= sum(f.seconds for f in costs)
        if overlapped > sum(f.computation for f in costs):  # which overlap cannot reduce
            assert overlapped <= plans.seconds(plan, OVERLAP) * (1 + 1e-9)
    again = [op for op in module.walk() if RECOMPUTE in op.attributes]
    for f, _ in bodies(searched):
        if counted := found_by_search(f):
            low = 0.9 if again else 1 - 1e-9
            assert low * seconds[name_of(f)] <= counted["objective"] + 1e-12
            assert counted["objective"] <= seconds[name_of(f)] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", examples())
def test_no_written_plan_of_an_example_is_faster(name: str):
    assert_auto_is_fastest(parse((EXAMPLES / f"{name}.ir").read_text()))


MESHES = [(2, 2), (2, 4)]
PAIRS = sampled(product(MADE, MESHES), 1)


@pytest.mark.parametrize(("model", "mesh"), PAIRS, ids=str)
def test_no_written_plan_of_a_small_model_is_faster(model: str, mesh: tuple[int, int]):
    assert_auto_is_fastest(parse(MADE[model](mesh)))
