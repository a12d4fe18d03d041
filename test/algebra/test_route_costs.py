"""The prices of many moves at once, against the price of each by its record."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from extent import extent
from single_moves import single_moves

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.detours import Detours
from shardir.algebra.exchange import exchange_axes
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.routes import Routes, routes
from shardir.algebra.steps import step_seconds
from shardir.cost.clusters import load

SLOW_INSIDE = Cluster((Level("node", 4, 1e8, 2e-6), Level("pod", 2, 1e9, 1e-6)))
CASES = [
    (Mesh("m", (("a", 2), ("b", 2), ("c", 8)), load("pod2048").part(32)), 2),
    (Mesh("m", (("a", 4), ("b", 4)), load("h200").part(16)), 2),
    (Mesh("m", (("a", 4), ("b", 4)), load("h200").part(16)), 3),
    (Mesh("m", (("a", 2), ("b", 4)), SLOW_INSIDE), 2),
    (Mesh("m", (("a", 3), ("b", 3))), 2),
    (Mesh("m", (("a", 2), ("b", 6))), 2),
]


@pytest.mark.parametrize(("mesh", "rank"), CASES, ids=str)
def test_moves_cost_the_same_together_as_each_alone(mesh: Mesh, rank: int) -> None:
    known, compared = Routes(mesh, rank, "sum", mesh.names), {"exchange": 0}
    shape = (mesh.size,) * rank
    together, every = known.each(shape, 4), extent(len(known.layouts) // 3, 1)
    for (i, j), step in single_moves(known).items():
        if step.kind != "exchange" or (i + 3 * j) % every == 0:
            alone = step_seconds(mesh, shape, known.layouts[i], step, 4)
            np.testing.assert_allclose(together[i, j], alone, rtol=1e-12)
            compared[step.kind] = compared.get(step.kind, 0) + 1
    assert len(compared) == 8
    assert min(compared.values()) > 5, compared


def test_a_detour_is_the_fastest_two_exchanges() -> None:
    """By way of any layout of the sub-axes that splits the tensor evenly, priced by the records."""
    mesh, random = Mesh("m", (("a", 4), ("b", 4)), load("pod2048").part(16)), Random(0)
    axes, shape, shorter = mesh.cut(mesh.names, mesh.level_sub_axes), (64, 8), 0
    every = [l for l in Routes(mesh, 2, "sum", axes).layouts if l.even(mesh, shape)]
    detours = Detours(mesh, shape, axes, 4)
    for partial in ((), axes[:1]):
        layouts = [l for l in every if l.partial == partial]

        def seconds(before: Layout, after: Layout) -> float:
            step = CollectiveStep("exchange", exchange_axes(before, after), after)
            return step_seconds(mesh, shape, before, step, 4) if before != after else 0.0

        for _ in range(extent(4, 40)):
            source, target = random.sample(layouts, 2)
            best = min(seconds(source, z) + seconds(z, target) for z in layouts)
            found = detours.faster(source, target, best * 1.001)
            assert found is not None
            assert detours.faster(source, target, best * 0.999) is None
            by_way = seconds(source, found[1]) + seconds(found[1], target)
            np.testing.assert_allclose([found[0], by_way], best, rtol=1e-9)
            shorter += best < seconds(source, target) * (1 - 1e-6)
    assert shorter


def test_devices_with_another_memory_have_the_same_paths() -> None:
    """A search without a limit, and the programs that are lowered within it, find each once."""
    cluster = load("pod2048").part(16)
    few, many = (
        Mesh("m", (("a", 4), ("b", 4)), replace(cluster, memory=memory)) for memory in (1, 2)
    )
    assert few != many
    assert routes(few, 2) is routes(many, 2) is not routes(Mesh("m", few.axes), 2)
