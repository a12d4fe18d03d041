"""Collectives in flight beside computation: their times by hand, and the parts of a bucket against
all cuts of it."""

import tracemalloc
from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import numpy as np
import pytest
from support.extent import sampled

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.cost import report
from shardir.cost.report import FunctionCost
from shardir.cost.schedule import cut_points, largest_normal

PAIR = Level("pair", 2, 1e3, 0.0)
MESH = "dist.mesh @m <a = 2, b = 2> on @c\n"
TYPES = """
#replicated = #dist.local<@m, [{}, {}]>
#rows = #dist.local<@m, [{b}, {}]>
#apart = #dist.local<@m, [{a}, {}]>
#both = #dist.local<@m, [{a, b}, {}]>
"""


def cost(
    body: str, latency: float = 0.0, interference: float = 0.0, skew: float = 0.0,
    occupancy: float = 0.0,
) -> FunctionCost:  # fmt: skip
    """Return the cost of a function of %x [2, 4], sharded over b, %u [2, 4], sharded over a, %v [1,
    4], sharded over both, and %w [4, 4]. A product of 4 x 4 costs 0.128 s, to gather %x or %u a
    latency and 0.032 s, to gather %v two and 0.048 s."""
    links = f"{{bandwidth = 1e3, latency = {latency}}}"
    levels = ", ".join(f"{name} = 2 {links}" for name in ("pair", "shelf"))
    text = (
        f"dist.cluster @c <levels [{levels}], flops {{f32 = 1e3}}, interference = {interference}, "
        f"occupancy = {occupancy}, skew = {skew}>\n" + MESH + TYPES
        + "func.func @f(%x: tensor<2x4xf32, #rows>, %u: tensor<2x4xf32, #apart>, "
        "%v: tensor<1x4xf32, #both>, %w: tensor<4x4xf32, #replicated>)"
        " -> tensor<4x4xf32, #replicated> {\n"
        + "".join(f"  {line}\n" for line in body.strip().splitlines())
        + "  func.return %w : tensor<4x4xf32, #replicated>\n}"
    )  # fmt: skip
    (found,) = report(shardir.compile(text, "").module)
    return found


W = "tensor<4x4xf32, #replicated>"
PRODUCT = f"nn.matmul %w, %w : ({W}, {W}) -> {W}"


def start(name: str, value: str = "x") -> str:
    axes, t = {"x": ("b", "2x4xf32, #rows"), "u": ("a", "2x4xf32, #apart"),
               "v": ("a, b", "1x4xf32, #both")}[value]  # fmt: skip
    return f"%{name} = dist.all_gather %{value} dim 0 over <{axes}> async : (tensor<{t}>) -> {W}"


def wait(name: str) -> str:
    return f"%{name}_ = dist.wait %{name} : ({W}) -> {W}"


@pytest.mark.parametrize(
    ("lines", "latency", "interference", "seconds"),
    [
        ([start("g"), wait("g")], 0.01, 0.0, 0.042),  # nothing hides it
        ([start("g"), f"%p = {PRODUCT}", wait("g")], 0.01, 0.0, 0.128),  # it is hidden
        ([start("g"), f"%p = {PRODUCT}", wait("g")], 0.2, 0.0, 0.232),  # it hides the product
        ([start("g"), f"%p = {PRODUCT}", wait("g")], 0.01, 0.5, 0.144),  # half of its bytes' time
        ([start("g"), f"%p = {PRODUCT}", wait("g")], 0.01, 1.0, 0.16),  # all but its latency
        # over the same links one after the other
        ([start("g"), start("h"), wait("g"), wait("h")], 0.01, 0.0, 0.084),
        # over others at once
        ([start("g"), start("h", "u"), wait("g"), wait("h")], 0.01, 0.0, 0.042),
        # the function ends when the last collective ends
        ([f"%p = {PRODUCT}", start("g"), wait("g")], 0.0, 0.0, 0.16),
    ],
)  # fmt: skip
def test_times_of_overlap(
    lines: list[str], latency: float, interference: float, seconds: float
) -> None:
    found = cost("\n".join(lines), latency, interference)
    assert found.seconds == pytest.approx(seconds)
    assert found.overlapped == pytest.approx(sum(c.seconds for c in found.ops) - seconds)


@pytest.mark.parametrize(("interference", "seconds"), [(0.0, 0.158), (0.5, 0.174), (1.0, 0.19)])
def test_a_device_is_at_work_in_a_share_of_latencies(interference: float, seconds: float) -> None:
    """0.3 of 0.1 s, beside a product of 0.128 s; the bytes take 0.032 s. Blocking it is as long as
    without."""
    lines = [start("g"), f"%p = {PRODUCT}", wait("g")]
    found = cost("\n".join(lines), 0.1, interference, occupancy=0.3)
    assert found.seconds == pytest.approx(seconds)
    assert cost(BLOCKING["x"], 0.1, interference, occupancy=0.3).seconds == pytest.approx(0.132)


@pytest.mark.parametrize(
    ("occupancy", "seconds"), [(0.0, 0.264), (0.3, 0.032 + 0.03 + 0.132), (1.0, 0.264)]
)
def test_links_are_held_while_devices_are_at_work(occupancy: float, seconds: float) -> None:
    """For 0.3 of a latency of 0.1 s and for the bytes of the first, whether the second is blocking
    or not; without an occupancy, for all of it."""
    second = start("h").replace(" async", "")
    for lines in ([start("h"), wait("g"), wait("h")], [second, wait("g")]):
        found = cost("\n".join([start("g"), *lines]), 0.1, occupancy=occupancy)
        assert found.seconds == pytest.approx(seconds)


def test_in_groups_of_one_device_nothing_is_in_flight() -> None:
    """Neither in the model nor in the program."""
    shard, full = (f"tensor<4x4xf32, #dist.local<@m, [{{{a}}}, {{}}]>>" for a in ("a", ""))
    text = (
        f"dist.mesh @m <a = 1>\nfunc.func @f(%x: {shard}) -> {full} {{\n"
        f"  %g = dist.all_gather %x dim 0 over <a> async : ({shard}) -> {full}\n"
        f"  %y = dist.wait %g : ({full}) -> {full}\n  func.return %y : {full}\n}}"
    )
    compiled = shardir.compile(text, "")
    assert report(compiled.module)[0].seconds == 0.0
    assert "return x" in compiled.program


def test_a_blocking_collective_queues_after_one_in_flight() -> None:
    blocking = start("h").replace(" async", "")
    assert cost("\n".join([start("g"), blocking, wait("g")])).seconds == pytest.approx(0.064)


# ---- the last device ----


REMAINS = largest_normal(2)[1] ** 0.5
"""How far devices that have waited for another one are apart: of what each alone would be."""

BLOCKING = {value: start(f"b{value}", value).replace(" async", "") for value in "xuv"}


@pytest.mark.parametrize(
    ("lines", "seconds", "late"),
    [
        ([BLOCKING["x"]], 0.032, 0.0),  # nothing is computed before it
        ([f"%p = {PRODUCT}", BLOCKING["x"]], 0.128 + 0.1 + 0.032, 0.1),
        # in the run before
        ([BLOCKING["x"], f"%p = {PRODUCT}"], 0.128 + 0.1 + 0.032, 0.1),
        # those of a group are there after it, those over the other axis are not
        ([f"%p = {PRODUCT}", BLOCKING["x"], BLOCKING["x"].replace("bx", "b")],
         0.128 + 0.1 + 0.064, 0.1),
        # not as they were, since each has waited for one of the others
        ([f"%p = {PRODUCT}", BLOCKING["x"], BLOCKING["u"]],
         0.128 + (1 + REMAINS) * 0.1 + 0.064, (1 + REMAINS) * 0.1),
        ([f"%p = {PRODUCT}", BLOCKING["x"], f"%q = {PRODUCT}", BLOCKING["u"]],
         0.256 + 0.2 * (1 + REMAINS**2) ** 0.5 + 0.064, 0.2 * (1 + REMAINS**2) ** 0.5),
        # nor in the run before, but after one over both, by at most as much as they compute
        ([BLOCKING["u"], f"%p = {PRODUCT}", BLOCKING["x"]],
         0.128 + (1 + REMAINS) * 0.1 + 0.064, (1 + REMAINS) * 0.1),
        ([f"%p = {PRODUCT}", f"%q = {PRODUCT}", BLOCKING["v"], BLOCKING["x"], BLOCKING["u"]],
         0.256 + 0.256 + 0.048 + 0.064, 0.256),
        # one in flight begins late too, and nothing beside it hides that
        ([f"%p = {PRODUCT}", start("g"), wait("g")], 0.26, 0.1),
        ([f"%p = {PRODUCT}", start("g"), f"%q = {PRODUCT}", wait("g")],
         0.256 + 2**0.5 * 0.1, 2**0.5 * 0.1),
        # those that begin it are together, not those that wait for it
        ([f"%p = {PRODUCT}", start("g"), start("h"), wait("g"), wait("h")], 0.128 + 0.1 + 0.064,
         0.1),
        ([f"%p = {PRODUCT}", start("g"), f"%q = {PRODUCT}", f"%r = {PRODUCT}", wait("g"),
          BLOCKING["x"]], 0.384 + (1 + 2**0.5) * 0.1 + 0.032, (1 + 2**0.5) * 0.1),
    ],
)  # fmt: skip
def test_a_collective_begins_with_the_last_device_which_is_late(
    lines: list[str], seconds: float, late: float
) -> None:
    """By 0.1 s of two after a product, which takes 0.128 s: the root of 0.128 times the skew."""
    found = cost("\n".join(lines), skew=(0.1 / largest_normal(2)[0]) ** 2 / 0.128)
    assert found.seconds == pytest.approx(seconds)
    assert found.late == pytest.approx(late)
    waits = [c for c in found.ops if c.communicates]
    assert sum(found.exposed.values()) == pytest.approx(
        sum(c.seconds for c in waits) - found.overlapped
    )
    assert ("for the last device" in str(found)) == (late > 0)


@pytest.mark.parametrize("n", [1, 2, 4, 32])
def test_the_last_device_is_as_late_as_the_largest_number_drawn(n: int) -> None:
    drawn = np.random.default_rng(n).normal(size=(100_000, n)).max(axis=1)
    assert largest_normal(n) == pytest.approx((drawn.mean(), drawn.var()), abs=0.01)


def test_devices_that_wait_for_others_in_turn_are_as_late_as_drawn_ones() -> None:
    """Four, which compute as long before each collective, over one axis of two and then over the
    other."""
    skew, product = 1e-3, 0.128
    lines = [f"%p = {PRODUCT}", BLOCKING["x"], f"%q = {PRODUCT}", BLOCKING["u"]]
    found = cost("\n".join(lines), skew=skew)
    at = np.zeros((20_000, 2, 2))
    rng, means = np.random.default_rng(0), []
    for step in range(40):
        at = at + rng.normal(scale=(skew * product) ** 0.5, size=at.shape)
        at = np.broadcast_to(at.max(axis=1 + step % 2, keepdims=True), at.shape)
        means.append(at.mean())
    assert found.late == pytest.approx((means[-1] - means[-21]) / 10, rel=0.03)


def test_a_device_is_late_by_no_more_than_it_has_computed() -> None:
    found = cost(f"%p = {PRODUCT}\n{BLOCKING['x']}", skew=5.0)
    assert found.late == pytest.approx(0.128)


# ---- the parts of a bucket ----


@pytest.mark.parametrize("seed", sampled(range(60), 12))
def test_the_cuts_of_a_bucket_are_the_best_of_all(seed: int) -> None:
    rng = Random(seed)
    count, latency, overhead = rng.randint(1, 8), rng.choice([0.0, 0.01, 0.1]), 1e-3
    interference, occupancy = rng.choice([0.0, 0.5, 1.0]), rng.choice([0.0, 0.5])
    sending = [rng.choice([0.01, 0.02, 0.05, 0.4]) for _ in range(count)]
    ready = sorted(rng.uniform(0, 0.5) for _ in range(count))

    def end(ends: Sequence[int]) -> float:
        free = late = 0.0
        for i, j in pairwise((0, *ends)):
            held = (occupancy or 1.0) * latency
            free = max(free, ready[j - 1] + late) + held + sum(sending[i:j])
            late += interference * sum(sending[i:j])
        return free + (overhead + occupancy * latency) * (len(ends) - 1)

    every = [(*c, count) for k in range(count) for c in combinations(range(1, count), k)]
    on = Cluster((PAIR,), overhead=overhead, interference=interference, occupancy=occupancy)
    assert end(cut_points(sending, ready, latency, on)) == pytest.approx(min(map(end, every)))


def test_the_memory_to_cut_a_bucket_grows_as_its_values() -> None:
    """No table of the values by the values: 20,000 of them would take 3.2 GB."""
    n, on = 20_000, Cluster((PAIR,), overhead=1e-6, interference=0.1)
    tracemalloc.start()
    ends = cut_points([1e-6] * n, [2e-6 * i for i in range(n)], 1e-5, on)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert ends[-1] == n and 1 < len(ends) < 100
    assert peak < 1000 * n
