"""The single moves of a table of routes."""

import numpy as np

from shardir.algebra.collectives import CollectiveStep
from shardir.algebra.routes import Routes


def single_moves(known: Routes) -> dict[tuple[int, int], CollectiveStep]:
    """Return the move from one layout to another of a tensor that all split evenly, where there is
    one: by the indices of both."""
    shape = (known.mesh.size,) * known.rank
    ends = np.argwhere(np.isfinite(known.single_move_seconds(shape, 1))).tolist()
    return {(i, j): known.step(shape, 1, i, j) for i, j in ends}
