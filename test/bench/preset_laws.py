"""The law of presets: the program that the mode auto makes is never slower than those of presets,
by the full report, overlap included.

    auto <= presets     the programs of products of presets that fit into the memory, from layouts
                        of their arguments: propagation infers the others, and the pipeline `train`
                        differentiates them
"""

from collections.abc import Iterable, Iterator

from xdsl.dialects.builtin import ModuleOp

from bench.plans import of_presets, seconds
from bench.ratios import ratio
from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import mesh_of
from shardir.cost import report
from shardir.rewriting.functions import bodies
from shardir.search.plans.presets import Product, ProductOfPresets, Structure, products


def mesh_of_step(module: ModuleOp) -> Mesh:
    """Return the mesh of the function of a module."""
    ((f, _),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    return mesh


def existing(module: ModuleOp) -> list[Product]:
    """Return the products of presets that a program has."""
    ((f, _),) = bodies(module)
    mesh, structure = mesh_of_step(module), Structure(f)
    return [p for p in products(mesh) if ProductOfPresets(p, structure, mesh).exists]


def claims(module: ModuleOp, some: Iterable[Product]) -> Iterator[tuple[str, float]]:
    """Yield the ratio of each claim for some products of presets."""
    auto = seconds(module, "auto")
    memory = mesh_of_step(module).cluster_or_default.memory
    for presets in some:
        written = of_presets(module, presets)
        assert written is not None
        (cost,) = report(compile(written).module)
        if memory is not None and cost.memory.peak > memory:
            continue
        yield "auto <= presets", ratio(auto, cost.seconds)
