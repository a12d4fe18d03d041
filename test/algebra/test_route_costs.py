"""The prices of many moves at once, against the price of each by its record."""

from dataclasses import replace

import numpy as np
import pytest
from support.algebra.single_moves import single_moves
from support.extent import extent

from shardir.algebra.cluster import Cluster, Level
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
    together, every = known.single_move_seconds(shape, 4), extent(len(known.layouts) // 3, 1)
    for (i, j), step in single_moves(known).items():
        if step.kind != "exchange" or (i + 3 * j) % every == 0:
            alone = step_seconds(mesh, shape, known.layouts[i], step, 4)
            np.testing.assert_allclose(together[i, j], alone, rtol=1e-12)
            compared[step.kind] = compared.get(step.kind, 0) + 1
    assert len(compared) == 8
    assert min(compared.values()) > 5, compared


def test_devices_with_another_memory_have_the_same_paths() -> None:
    """A search without a limit, and the programs that are lowered within it, find each once."""
    cluster = load("pod2048").part(16)
    few, many = (
        Mesh("m", (("a", 4), ("b", 4)), replace(cluster, memory=memory)) for memory in (1, 2)
    )
    assert few != many
    assert routes(few, 2) is routes(many, 2) is not routes(Mesh("m", few.axes), 2)
