"""Conflicts: proposals that can't all be granted, because they split one factor or dimension over
different axes, or two of them over the same axis.

The alternatives are the maximal sets of proposals that go together. They are compared by

1. the estimated time of the redistributions at the node or value; of equal ones by
2. the number of parts into which they split, the largest first;
3. the order of factors or dimensions, then that of the mesh's axes.
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
    """Axes that may be granted to factors or dimensions, and the estimated time of the
    redistributions that follow."""

    granted: tuple[tuple[str | int, Axes], ...]
    seconds: float


def resolve(
    proposals: Mapping[Key, Collection[Axes]],
    taken: Axes,
    mesh: Mesh,
    seconds: Callable[[dict[Key, Axes]], float],
) -> tuple[dict[Key, Axes], tuple[Alternative, ...]]:
    """Return the granted proposals, none of them over `taken`; and where some conflict, the
    alternatives, the granted one first. `seconds`: the estimated time of an alternative."""
    found = _compatible(proposals, taken, mesh)
    if len(found) == 1:
        return found[0], ()

    def parts(granted: dict[Key, Axes]) -> int:
        return mesh.extent(tuple(a for axes in granted.values() for a in axes))

    best = ranked(found, seconds, lambda granted: -parts(granted))
    return best[0][1], tuple(Alternative(tuple(granted.items()), time) for time, granted in best)


def _compatible(
    proposals: Mapping[Key, Collection[Axes]], taken: Axes, mesh: Mesh
) -> list[dict[Key, Axes]]:
    """The maximal sets of proposals, one for each key, no two of which use an axis, nor one that is
    `taken`. The finest first, in the order of the keys."""
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
    found = []
    for combo in product(*[(*c, ()) for c in choices.values()]):
        used = tuple(a for axes in combo for a in axes)
        refused = [
            a for axes, c in zip(combo, choices.values(), strict=True) if not axes for a in c
        ]
        if mesh.clash(used) is None and all(mesh.clash((*used, *a)) for a in refused):
            found.append({key: a for key, a in zip(choices, combo, strict=True) if a})
    return found
