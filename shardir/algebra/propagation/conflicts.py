"""Conflicts: proposals that split one factor or dimension over different axes, or two of them over
one axis.

The alternatives are the maximal sets of compatible proposals. They are compared by

1. the estimated seconds of the redistributions at the node or value;
2. the number of parts, the largest first;
3. the order of factors or dimensions, then of the mesh's axes.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import NamedTuple, TypeVar

from shardir.algebra.estimates import ranked
from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.algebra.op_sharding import MAX_CHOICES

Key = TypeVar("Key", bound=str | int)
"""A factor's name, or the number of a dimension."""


class Alternative(NamedTuple):
    """Axes that may be granted to factors or dimensions, and the estimated seconds of the
    redistributions that follow from them."""

    granted: tuple[tuple[str | int, Axes], ...]
    seconds: float


def resolve(
    proposals: Mapping[Key, Collection[Axes]],
    taken: Axes,
    mesh: Mesh,
    seconds: Callable[[dict[Key, Axes]], float],
) -> tuple[dict[Key, Axes], tuple[Alternative, ...]]:
    """Return the granted proposals, and, if some conflict, the alternatives, the granted one first.

    Args:
        taken: axes that no proposal may use.
        seconds: the estimated seconds of an alternative.
    """
    alternatives = _compatible_sets(proposals, taken, mesh)
    if len(alternatives) == 1:
        return alternatives[0], ()

    def parts(granted: dict[Key, Axes]) -> int:
        return mesh.extent(tuple(a for axes in granted.values() for a in axes))

    best = ranked(alternatives, seconds, lambda granted: -parts(granted))
    return best[0][1], tuple(Alternative(tuple(granted.items()), time) for time, granted in best)


def _compatible_sets(
    proposals: Mapping[Key, Collection[Axes]], taken: Axes, mesh: Mesh
) -> list[dict[Key, Axes]]:
    """Return the maximal sets of proposals, at most one for each key, that do not overlap each
    other or `taken`. The finest come first, in the order of the keys."""
    choices: dict[Key, list[Axes]] = {}
    count = 1
    for key, axes in proposals.items():
        fits = [a for a in axes if mesh.clash((*taken, *a)) is None]
        fits.sort(key=lambda a: (-mesh.extent(a), [mesh.order(b) for b in a], sizes_of(a)))
        choices[key] = fits if count * (len(fits) + 1) <= MAX_CHOICES else fits[:1]
        count *= len(choices[key]) + 1
    if all(len(c) <= 1 for c in choices.values()):
        only = {key: c[0] for key, c in choices.items() if c}
        if mesh.clash(tuple(a for axes in only.values() for a in axes)) is None:
            return [only]
    sets = []
    for combo in product(*[(*c, ()) for c in choices.values()]):
        used = tuple(a for axes in combo for a in axes)
        refused = [
            a for axes, c in zip(combo, choices.values(), strict=True) if not axes for a in c
        ]
        if mesh.clash(used) is None and all(mesh.clash((*used, *a)) for a in refused):
            sets.append({key: a for key, a in zip(choices, combo, strict=True) if a})
    return sets
