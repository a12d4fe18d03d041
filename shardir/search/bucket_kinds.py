"""The kinds of fusible collectives, as bits: those of one bucket are of one kind.

A word for each collective, in it a bit for the axes, without their order and parts, and the
dimension. Collectives that cannot be in one bucket may share a bit, so that sets of kinds that have
none in common are of collectives that are never fused.
"""

from typing import Any

import numpy as np

from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.algebra.mesh import Mesh

Kinds = np.ndarray[Any, np.dtype[np.uint64]]
"""Sets of kinds: [..., collective]."""

_WORDS = {name: i for i, name in enumerate(n for n, c in COLLECTIVES.items() if c.fusible)}

_DIMS = 4
"""The dimensions that have a bit of their own for each axes."""

NO_KIND = np.zeros(len(_WORDS), np.uint64)

ALL_KINDS = ~NO_KIND


def kind_of(mesh: Mesh, step: CollectiveStep) -> Kinds:
    """Return the kind of a fusible collective."""
    names = {axis.name for axis in step.axes}
    axes = sum(1 << i for i, axis in enumerate(mesh.names) if axis.name in names)
    found = NO_KIND.copy()
    found[_WORDS[step.kind]] = 1 << (axes * _DIMS + step.dim % _DIMS) % 64
    return found


def rates_of(kinds: Kinds) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return which part of some sets has each kind: [..., collective, bit] of [set, ...,
    collective]."""
    found = np.zeros((*kinds.shape[1:], 64))
    every = np.bitwise_or.reduce(kinds.reshape(-1, len(NO_KIND)), axis=0)
    for word, bits in enumerate(every.tolist()):
        for bit in range(bits.bit_length()):
            if bits >> bit & 1:
                has = kinds[..., word] >> np.uint64(bit) & np.uint64(1)
                found[..., word, bit] = has.mean(axis=0)
    return found


def packed(bits: np.ndarray[Any, np.dtype[np.bool_]]) -> Kinds:
    """Return the sets of kinds of their bits."""
    return (bits.astype(np.uint64) << np.arange(64, dtype=np.uint64)).sum(axis=-1, dtype=np.uint64)
