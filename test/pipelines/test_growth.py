"""The work of compiling grows linearly with the number of ops."""

from dataclasses import replace

from extent import extent
from growth import superlinear
from xdsl.context import Context

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


def compiled(layers: int) -> None:
    """Compile an MLP to a train step, and to the text of both views and of the program."""
    module = parse(placed(CLUSTER, programs.mlp(layers=layers)), verify=True)
    print_module(module)
    for p in build("train"):
        p.apply(Context(), module)
        module.verify()
    print_module(module)
    program_text(module)
    plan_of(module)


def test_the_work_grows_as_the_number_of_layers() -> None:
    assert list(superlinear(compiled, extent(4, 16))) == []
