"""Sets of the kinds of collectives that may be fused, as bits of one number."""

from typing import Any

import numpy as np

from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.algebra.mesh import Mesh

KindSets = np.ndarray[Any, np.dtype[np.uint64]]
"""Sets of kinds. Two collectives of one bucket have the same bit; others may."""

NO_KIND = np.uint64(0)

ANY_KIND = ~NO_KIND

_FUSIBLE = [name for name, record in COLLECTIVES.items() if record.fusible]

_BITS = 64 // len(_FUSIBLE)


def kind_bit(mesh: Mesh, step: CollectiveStep) -> int:
    """Return the bit of a collective's kind: those of any axes of two, of four dimensions,
    differ."""
    names = {axis.name for axis in step.axes}
    axes = sum(1 << i for i, axis in enumerate(mesh.names) if axis.name in names)
    return 1 << _BITS * _FUSIBLE.index(step.kind) + (4 * axes + step.dim) % _BITS
