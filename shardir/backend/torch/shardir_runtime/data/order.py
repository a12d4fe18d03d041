"""The order in which a step reads the rows of its data: a function of the seed, the epoch and the
step alone, the same on every mesh and after a restart.

The order of an epoch is a permutation that is computed for each position by itself (a Feistel
network over the bits of the position, walked along its cycle until the result is a row), so that
time and memory of a batch do not depend on the number of rows.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.random import outputs, seed_of
from ..plan.epochs import Epochs

ROUNDS = 12
"""Fewer prefer some orders of three to five rows."""


BLOCK = 1 << 14
"""The number of places, at least, whose rows are computed at a time: for few of them the calls of
torch take longer than their work."""


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
    while len(left):  # fewer than half of them at a time, and a cycle returns to where it began
        found[left] = _permute_bits(rows, keys if first == last else keys[:, left], found[left])
        left = left[found[left] >= rows]
    return found


def _permute_bits(rows: int, keys: Tensor, values: Tensor) -> Tensor:
    """Permute the numbers of as many bits as `rows` - 1 has: each round adds to one half of the
    bits a hash of the other half, which the same round undoes. keys: [rounds, values], or one for
    all values."""
    bits = (rows - 1).bit_length()
    low = bits - bits // 2
    above, below = values >> low, values & ((1 << low) - 1)
    for number, key in enumerate(keys):
        if number % 2:
            below.bitwise_xor_(outputs(key, above).bitwise_and_((1 << low) - 1))
        else:
            above.bitwise_xor_(outputs(key, below).bitwise_and_((1 << (bits - low)) - 1))
    return (above << low).bitwise_or_(below)
