"""The law of presets: the program that the mode auto makes is never slower than those of presets,
by the full report, overlap included.

    auto <= presets     the programs of products of presets that fit into the memory, from layouts
                        of their arguments: propagation infers the others, and the pipeline `train`
                        differentiates them
    auto <= presets, split rows
                        the same where presets split the rows of a loss, a softmax or a norm, with
                        a part of STATISTICS for what `train` saves there
"""

from collections.abc import Iterable, Iterator

from plans import of_presets, seconds
from ratios import ratio
from xdsl.dialects.builtin import ModuleOp

from shardir import compile
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import mesh_of
from shardir.cost import report
from shardir.rewriting.functions import bodies
from shardir.search.presets import Product, ProductOfPresets, Structure, products

STATISTICS = 1.002
"""The part by which the pipeline `train` may be faster where rows are split: it differentiates the
sharded op, and so computes the statistics of its rows once; `auto` differentiates first, and
computes them twice."""


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


def splits_rows(module: ModuleOp, presets: Product) -> bool:
    """Whether presets split a dimension along which an op has statistics."""
    ((f, _),) = bodies(module)
    structure = Structure(f)
    plan = ProductOfPresets(presets, structure, mesh_of_step(module))
    return any(
        not op.factors().replicate.isdisjoint(plan.split(roles))
        for op, roles in structure.roles.items()
    )


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
        if splits_rows(module, presets):
            yield "auto <= presets, split rows", ratio(auto, cost.seconds * STATISTICS)
        else:
            yield "auto <= presets", ratio(auto, cost.seconds)
