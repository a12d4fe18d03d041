"""The mode auto, with nothing stated, against plans that are written down: modelled seconds of the
lowered programs, by shardir.cost.report.

On every training step of docs/examples, and on small models that the benchmarks and docs/examples
write. At tiny sizes latencies are most of what a step takes; at those of one layer of the
benchmarks calculation, bytes and latencies count alike. What the search counts is what the report
says, where nothing in the text says that it is to be done again (`recompute`).

That is of ops one after the other. Overlap comes behind the search, and may hide more of another
plan: of docs/examples/overlap.ir, 1.9 % of the step. Of nothing else here.
"""

import sys
from importlib import import_module
from pathlib import Path

import pytest
from extent import extent
from xdsl.dialects.builtin import ModuleOp

from shardir import compile
from shardir.analysis.functions import is_local_body, mesh_of, name_of
from shardir.cost import report
from shardir.dialects.train import StepOp
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE, found_by_search
from shardir.syntax.parser import parse
from shardir.tools import bench

plans, programs = bench.load("plans"), bench.load("programs")
UNHIDDEN = 1.02
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))
resnet = import_module("make_resnet").resnet

MIN_GAP_PART = {"layers": 1, "batch": 8, "seq": 16, "hidden": 32, "heads": 4, "vocab": 64}
MADE = {
    "gpt": lambda mesh: programs.gpt(**MIN_GAP_PART, mesh=mesh),
    "bert": lambda mesh: programs.bert(**MIN_GAP_PART, mesh=mesh),
    "mlp": lambda mesh: programs.mlp(mesh=mesh),
    "gpt layer": lambda mesh: programs.gpt(layers=1, mesh=mesh),
    "bert layer": lambda mesh: programs.bert(layers=1, mesh=mesh),
    "transformer layer": lambda mesh: programs.transformer(layers=1, mesh=mesh),
    "resnet": lambda mesh: resnet(
        blocks=(1, 1), width=8, batch=8, image=16, classes=16, dp=mesh[0], tp=mesh[1]
    ),
}  # fmt: skip


def is_global_step(module: ModuleOp) -> bool:
    steps = any(isinstance(op, StepOp) for op in module.body.ops)
    return steps and not any(is_local_body(block) for _, block in bodies(module))


def examples() -> list[str]:
    """The training steps in the global view."""
    names = (p.stem for p in sorted(EXAMPLES.glob("*.ir")))
    return [n for n in names if is_global_step(parse((EXAMPLES / f"{n}.ir").read_text()))]


def never_better(module: ModuleOp) -> None:
    (mesh,) = {mesh_of(f, module) for f, _ in bodies(module)}
    assert mesh is not None
    known = [n for n in plans.PLANS if n != "2d" or len(mesh.names) == 2]
    written, bare = [plans.PLANS[n](module) for n in known], plans.bare(module)
    least = min(plans.seconds(m, plans.alone("train")) for m in written)
    searched = compile(bare, plans.alone("auto")).module
    spent = {f.name: f.seconds for f in report(searched)}
    assert sum(spent.values()) <= least
    least = min(map(plans.seconds, written))
    assert plans.seconds(bare, "auto") <= least * UNHIDDEN
    again = [op for op in module.walk() if RECOMPUTE in op.attributes]
    for f, _ in bodies(searched):
        if counted := found_by_search(f):
            low = 0.9 if again else 1 - 1e-9
            assert low * spent[name_of(f)] <= counted["objective"] + 1e-12
            assert counted["objective"] <= spent[name_of(f)] * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("name", examples())
def test_no_plan_of_an_example_takes_less(name: str):
    never_better(parse((EXAMPLES / f"{name}.ir").read_text()))


MESHES = [(2, 2), (2, 4)]
PAIRS = [
    (model, mesh) for i, model in enumerate(MADE) for mesh in extent(MESHES[i % 2 :][:1], MESHES)
]


@pytest.mark.parametrize(("model", "mesh"), PAIRS, ids=str)
def test_no_plan_of_a_small_model_takes_less(model: str, mesh: tuple[int, int]):
    never_better(parse(MADE[model](mesh)))
