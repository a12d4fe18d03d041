# ruff: noqa: E402 (torch may not be installed)
"""The order of rows: a permutation in each epoch, a function of seed, epoch and step alone."""

import math
from collections import Counter
from itertools import product

import pytest
from support.extent import extent, sampled
from support.ranks import orders

torch = pytest.importorskip("torch")

from shardir.backend.torch.shardir_runtime.data.order import BLOCK, batch_rows, permuted_rows
from shardir.backend.torch.shardir_runtime.plan.epochs import Epochs


def order(rows: int, epoch: int, seed: int) -> list[int]:
    return permuted_rows(rows, torch.full((rows,), epoch), torch.arange(rows), seed).tolist()


def test_each_epoch_has_each_row_once():
    for rows in [*range(1, extent(12, 201)), 127, 128, 129, 1021, 9973]:
        seen = {tuple(order(rows, epoch, seed)) for epoch in (0, 1, 2**40) for seed in (0, -1)}
        assert all(sorted(one) == list(range(rows)) for one in seen)
        assert len(seen) == 6 or rows < 6  # epochs and seeds differ


def test_all_orders_of_few_rows_are_as_frequent():
    epochs, rows = 6000, 4
    every = torch.arange(epochs).repeat_interleave(rows)
    drawn = permuted_rows(rows, every, torch.arange(rows).repeat(epochs), 5).view(epochs, rows)
    counts, wanted = Counter(map(tuple, drawn.tolist())), epochs / math.factorial(rows)
    assert len(counts) == math.factorial(rows)
    chi_square = sum((count - wanted) ** 2 / wanted for count in counts.values())
    assert chi_square < 49.7  # 23 degrees of freedom: one of a thousand seeds exceeds it


def test_many_rows_are_mixed():
    x = torch.arange(100003).double()
    y = torch.tensor(order(100003, 0, 1)).double()
    near = torch.corrcoef(torch.stack([y[1:], y[:-1], x[1:]]))
    assert (near - torch.eye(3)).abs().max() < 0.01


@pytest.mark.parametrize(
    ("rows", "last"),
    sampled(product((1, 2, 10, 40, 1000, 10**12 + 39), ("wrap", "drop", "pad=mask")), 4),
)
def test_rows_are_those_of_the_reference(rows, last):
    """Of each part of a batch: a few rows, or more than are computed at a time."""
    for batch in (1, 3, 12, 40) if last == "wrap" else (1, rows):
        epochs = Epochs(rows, min(batch, 40), last)
        for number in (0, 1, 3, BLOCK - 1, 10**6):
            first = epochs.first(number)
            places = range(first, first + epochs.batch)
            want = [orders.row(rows, p // rows, p % rows, 3) for p in places]
            for start, stop in ((0, epochs.batch), (0, epochs.batch // 2), (1, 1)):
                part = batch_rows(epochs, (start, stop), number, 3)
                assert part.tolist() == want[start:stop]
    large = batch_rows(Epochs(rows, 3 * BLOCK, "wrap"), (7, 3 * BLOCK), 1, 3)
    assert len(large) == 3 * BLOCK - 7
    assert large[0] == orders.row(rows, (3 * BLOCK + 7) // rows, (3 * BLOCK + 7) % rows, 3)
