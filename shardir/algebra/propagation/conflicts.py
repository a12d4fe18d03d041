"""Conflicts: proposals that can't all be granted, because they split one factor or dimension over
different axes, or two of them over the same axis.

The alternatives are the maximal sets of proposals that go together. They are compared by

1. the seconds that redistributions next to the node or value take for their bytes;
2. the seconds that those take for their latencies;
3. into how many parts they split, the finest first;
4. the order of factors or dimensions, then that of the mesh's axes.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import product
from typing import NamedTuple, TypeVar

from shardir.algebra.factors import MAX_CHOICES
from shardir.algebra.mesh import Axes, Mesh, sizes_of

Key = TypeVar("Key", bound=str | int)
"""A factor's name, or the number of a dimension."""


class Alternative(NamedTuple):
    """Axes that may be granted to factors or dimensions, and the estimated seconds of it."""

    granted: tuple[tuple[str | int, Axes], ...]
    transfer: float
    """The seconds for the bytes of redistributions."""
    latency: float
    """The seconds for their latencies."""


def resolve(
    proposals: Mapping[Key, Collection[Axes]],
    taken: Axes,
    mesh: Mesh,
    cost: Callable[[dict[Key, Axes]], tuple[float, float]],
) -> tuple[dict[Key, Axes], tuple[Alternative, ...]]:
    """Return the granted proposals, none of them over `taken`; and where some conflict, the
    alternatives, the granted one first. `cost`: of an alternative, the seconds for bytes, and for
    latencies."""
    found = _compatible(proposals, taken, mesh)
    if len(found) == 1:
        return found[0], ()
    costs = [(cost(granted), granted) for granted in found]
    costs.sort(key=lambda c: (*c[0], -mesh.extent(tuple(a for x in c[1].values() for a in x))))
    return costs[0][1], tuple(Alternative(tuple(granted.items()), *c) for c, granted in costs)


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
