"""The order in which a step reads the rows of its data. It depends on the seed, the epoch and the
step alone, not on the mesh or a restart.

The order of an epoch is a permutation of the rows, computed for each position alone: a Feistel
network over the bits of the position, repeated until the result is a row. So the time and memory of
a batch do not depend on the number of rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.random import outputs, seed_of
from ..plan.epochs import Epochs

ROUNDS = 12
"""The number of rounds of the network. With fewer, some orders of three to five rows are more
frequent than others."""

BLOCK = 1 << 14
"""The smallest number of places whose rows are computed at once: for fewer, the calls of torch take
longer than their work."""


def batch_rows(epochs: Epochs, part: tuple[int, int], number: int, seed: int) -> Tensor:
    """Return the rows at the places [start, stop) of a batch: [stop - start] indices as i64."""
    many = max(1, BLOCK // max(1, part[1] - part[0]))
    return _batches(epochs, part, number - number % many, many, seed)[number % many]


@lru_cache(maxsize=8)
def _batches(epochs: Epochs, part: tuple[int, int], number: int, many: int, seed: int) -> Tensor:
    """The rows of a part of `many` batches, from a number on."""
    first = torch.tensor([epochs.first(number + k) for k in range(many)], dtype=torch.int64)
    places = first[:, None] + torch.arange(*part)
    flat = places.flatten()
    found = permuted_rows(epochs.rows, flat // epochs.rows, flat % epochs.rows, seed)
    return found.view(places.shape)


def permuted_rows(rows: int, epochs: Tensor, places: Tensor, seed: int) -> Tensor:
    """Return the row at each place of each epoch's order."""
    if not len(places):
        return places
    first, last = (int(epoch) for epoch in epochs.aminmax())
    epoch_keys = outputs(seed_of(f"{seed}/order"), torch.arange(first, last + 1))
    keys = outputs(epoch_keys, torch.arange(ROUNDS).unsqueeze(1))
    if first < last:
        keys = keys[:, epochs - first]
    found = _permute_bits(rows, keys, places)
    left = (found >= rows).nonzero().flatten()
    while len(left):  # on average less than half of them remain; each cycle has a row
        found[left] = _permute_bits(rows, keys if first == last else keys[:, left], found[left])
        left = left[found[left] >= rows]
    return found


def _permute_bits(rows: int, keys: Tensor, values: Tensor) -> Tensor:
    """Permute the numbers with the bits of `rows` - 1. Each round xors one half of the bits with a
    hash of the other half, which is its own inverse.

    keys: [rounds, values], or [rounds] for all values.
    """
    bits = (rows - 1).bit_length()
    low = bits - bits // 2
    above, below = values >> low, values & ((1 << low) - 1)
    for number, key in enumerate(keys):
        if number % 2:
            below.bitwise_xor_(outputs(key, above).bitwise_and_((1 << low) - 1))
        else:
            above.bitwise_xor_(outputs(key, below).bitwise_and_((1 << (bits - low)) - 1))
    return (above << low).bitwise_or_(below)
