"""The prices of many exchanges at once, against the price of each by its record."""

import numpy as np
import pytest
from extent import extent

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.mesh import Mesh
from shardir.algebra.routes import Routes
from shardir.algebra.steps import step_seconds
from shardir.cost.clusters import load

SLOW_INSIDE = Cluster((Level("node", 4, 1e8, 2e-6), Level("pod", 2, 1e9, 1e-6)))
MESHES = [
    Mesh("m", (("a", 2), ("b", 2), ("c", 8)), load("pod2048").part(32)),
    Mesh("m", (("a", 4), ("b", 4)), load("h200").part(16)),
    Mesh("m", (("a", 2), ("b", 4)), SLOW_INSIDE),
    Mesh("m", (("a", 3), ("b", 3))),
    Mesh("m", (("a", 2), ("b", 6))),
]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_exchanges_cost_the_same_together_as_each_alone(mesh: Mesh) -> None:
    known, compared = Routes(mesh, 2, "sum", mesh.names), 0
    shape = (mesh.size, mesh.size)
    together = known.each(mesh.size**2 * 4)
    for (i, j), step in known.moves.items():
        if step.kind == "exchange" and (i + 3 * j) % extent(len(mesh.axes) ** 3 // 3, 1) == 0:
            alone = step_seconds(mesh, shape, known.layouts[i], step, 4)
            np.testing.assert_allclose(together[i, j], alone, rtol=1e-12)
            compared += 1
    assert compared > 5
