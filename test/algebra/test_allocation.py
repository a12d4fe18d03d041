"""Offsets of buffers: no overlap; few buffers against a mixed-integer program, and many that are
cut from a block, which is then the smallest."""

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from support.extent import sampled

from shardir.algebra.allocation import LiveBuffer, allocate, best_fit, live_bytes_bound
from shardir.algebra.packing import PackingSearch
from shardir.tools import bench

cut = bench.load("memory_plan").cut


def some_buffers(seed: int, number: int, times: int, sizes: Sequence[int]) -> list[LiveBuffer]:
    draw = Random(seed)
    found = []
    for _ in range(number):
        start, end = sorted(draw.sample(range(times), 2))
        found.append(LiveBuffer(start, end, draw.choice(sizes)))
    return found


def used(buffers: Sequence[LiveBuffer], offsets: Sequence[int]) -> int:
    """The bytes of the block, after a check at each time that no byte is in two buffers."""
    for time in {b.start for b in buffers}:
        top = 0
        live = sorted(
            (o, o + b.size) for b, o in zip(buffers, offsets, strict=True)
            if b.start <= time < b.end and b.size
        )  # fmt: skip
        for lower, upper in live:
            assert lower >= top, (time, live)
            top = upper
    return max((o + b.size for b, o in zip(buffers, offsets, strict=True)), default=0)


def full(seed: int, number: int, times: int, size: int) -> list[LiveBuffer]:
    """Random buffers, and at each time one more that fills the block: without a gap anywhere they
    seldom fit."""
    draw, left, found = Random(seed), [size] * times, list[LiveBuffer]()
    while len(found) < number:
        start = draw.randrange(times - 1)
        end = draw.randrange(start + 2, times + 1)
        if free := min(left[start:end]):
            found.append(LiveBuffer(start, end, draw.randint(1, (free + 1) // 2)))
            left[start:end] = [x - found[-1].size for x in left[start:end]]
    return found + [LiveBuffer(i, i + 1, x) for i, x in enumerate(left) if x]


def minimum(buffers: Sequence[LiveBuffer]) -> int:
    """The bytes of the smallest block, by a mixed-integer program: offsets, the top, and for each
    pair that is live at once which of them is lower."""
    from scipy.optimize import LinearConstraint, milp

    n = len(buffers)
    pairs = [
        (i, j) for i, b in enumerate(buffers) for j in range(i)
        if b.start < buffers[j].end and buffers[j].start < b.end
    ]  # fmt: skip
    total = sum(b.size for b in buffers)
    rows, bounds = [], []

    def at_most(bound: float, **terms: float) -> None:
        rows.append([terms.get(f"x{i}", 0.0) for i in range(n + 1 + len(pairs))])
        bounds.append(bound)

    for i, b in enumerate(buffers):
        at_most(-b.size, **{f"x{i}": 1, f"x{n}": -1})
    for k, (i, j) in enumerate(pairs, n + 1):
        at_most(total - buffers[i].size, **{f"x{i}": 1, f"x{j}": -1, f"x{k}": total})
        at_most(-buffers[j].size, **{f"x{j}": 1, f"x{i}": -1, f"x{k}": -total})
    upper = [total] * (n + 1) + [1] * len(pairs)
    cost = [0] * n + [1] + [0] * len(pairs)
    constraints = LinearConstraint(np.array(rows), -np.inf, bounds)
    found = milp(cost, integrality=np.ones(len(cost)), bounds=(0, upper), constraints=constraints)
    return round(found.fun)


@pytest.mark.parametrize(
    "seed", [*sampled(range(12), 4), 43, 51, 124, 147]
)  # the last need each kind of step
def test_few_buffers_are_in_the_smallest_block(seed: int):
    buffers = full(seed, 8, 6, 24)
    smallest = minimum(buffers)
    found = allocate(buffers)
    assert used(buffers, found.offsets) == found.size == smallest
    search = PackingSearch(buffers, 10**9)
    offsets = search.run(smallest, 10**9)
    assert offsets is not None
    assert used(buffers, offsets) <= smallest
    assert search.run(smallest - 1, 10**9) is None
    assert search.work < 10**8, "ended by the limit, not by a proof"


@pytest.mark.parametrize("seed", range(8))
def test_a_cut_block_is_found_again(seed: int):
    buffers = cut(Random(seed), 60, 40, 1 << 20)
    found = allocate(buffers)
    assert found.bound == 1 << 20
    assert used(buffers, found.offsets) == found.size == 1 << 20
    assert found.is_minimal


def test_best_fit_alone_does_not_find_them():
    """So the test above is of the search."""
    blocks = [allocate(cut(Random(seed), 60, 40, 1 << 20)) for seed in range(8)]
    assert sum(a.best_fit > 1 << 20 for a in blocks) >= 6


@pytest.mark.parametrize("seed", sampled(range(10), 4))
def test_no_overlap_when_the_limit_ends_the_search(seed: int):
    buffers = some_buffers(seed, 80, 60, range(300))
    found = allocate(buffers, max_work=200_000)
    assert used(buffers, found.offsets) == found.size <= found.best_fit
    assert found.bound == max(
        sum(b.size for b in buffers if b.start <= time < b.end) for time in range(60)
    )


def test_offsets_are_aligned():
    buffers = some_buffers(1, 40, 30, range(1, 5000))
    found = allocate(buffers, alignment=512)
    assert all(o % 512 == 0 for o in found.offsets)
    used(buffers, found.offsets)
    assert found.bound == live_bytes_bound(buffers, 512) <= found.size


def test_sizes_are_only_numbers():
    """The number of bytes changes neither the work nor the plan."""
    buffers = cut(Random(3), 60, 40, 1 << 12)
    large = [b._replace(size=b.size << 30) for b in buffers]
    small = allocate(buffers)
    assert allocate(large).offsets == tuple(o << 30 for o in small.offsets)


def test_a_capacity_is_small_enough():
    buffers = cut(Random(0), 60, 40, 1 << 20)
    assert allocate(buffers, capacity=1 << 21).size <= 1 << 21


def test_a_buffer_fits_into_the_smallest_gap():
    """Between buffers of one time, from 10 to 30 and from 40 to 45."""
    walls = [
        LiveBuffer(0, 2, 10),
        LiveBuffer(0, 1, 20),
        LiveBuffer(0, 2, 10),
        LiveBuffer(0, 1, 5),
        LiveBuffer(0, 2, 1),
    ]
    buffers = [*walls, LiveBuffer(1, 2, 4)]
    assert best_fit(buffers, range(6)) == [0, 10, 30, 40, 45, 40]


def test_nothing_to_allocate():
    assert allocate([]).size == 0
    assert allocate([LiveBuffer(0, 3, 0)]).offsets == (0,)
