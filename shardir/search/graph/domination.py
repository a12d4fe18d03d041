"""Candidates that no plan of minimum cost needs, since another one is cheaper for it.

    nn.softmax %x: [{}, {a}] -> [{}, {a}]    in parts, with all-reduces of maxima and sums
    [{a}, {}] -> [{a}, {}]                   with all-to-alls from and to the former: faster

A plan with the first candidate is not slower with the second one, from and to the layouts of the
first: no path is longer than one by way of another layout.
"""

from collections.abc import Sequence

import numpy as np
from xdsl.dialects.builtin import TensorType

from shardir.algebra.arrays import Flags, Table
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.search.graph.transfer_costs import path_seconds

Ends = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""The layouts of the operands of an op, and those of its results."""

Fixed = tuple[bool, ...]
"""Of each result whether the search counts less than the sum of its redistributions, so that only
candidates with the same layout of it are compared."""


def dominated(
    mesh: Mesh,
    types: Sequence[TensorType],
    bounds: Sequence[tuple[Ends, float]],
    others: Sequence[tuple[Ends, float]],
    fixed: Fixed,
) -> Flags:
    """Return which candidates are slower than one of the others with the redistributions from and
    to their layouts.

    Args:
        types: of the operands, then of the results.
        bounds: the layouts of each candidate, and a lower bound of its seconds.
        others: the layouts of the others, and their seconds.
    """
    total = np.tile([seconds for _, seconds in others], (len(bounds), 1))
    operands = len(types) - len(fixed)
    for i, t in enumerate(types):
        mine, theirs = ([(*ends[0], *ends[1])[i] for ends, _ in some] for some in (bounds, others))
        if i < operands:
            total += _between(mesh, t, mine, theirs)
        else:
            total += _between(mesh, t, theirs, mine, fixed[i - operands]).T
    limits = np.array([seconds for _, seconds in bounds])
    return total.min(axis=1) < limits


def _between(
    mesh: Mesh,
    t: TensorType,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    is_fixed: bool = False,
) -> Table:
    """Return the seconds from each source to each target; infinite where none are known, and
    between all different layouts if they are fixed."""
    if is_fixed:
        return np.array([[0.0 if s == l else np.inf for l in targets] for s in sources])
    rows, columns = ({l: i for i, l in enumerate(dict.fromkeys(ls))} for ls in (sources, targets))
    among = np.ix_([rows[l] for l in sources], [columns[l] for l in targets])
    return path_seconds(mesh, t, [*rows], [*columns])[among]
