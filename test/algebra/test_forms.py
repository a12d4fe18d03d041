"""The forms of collectives: their times by hand, and those of rings message by message."""

from dataclasses import replace
from typing import Any

import pytest

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import COLLECTIVES
from shardir.algebra.forms import (
    all_gather,
    all_reduce,
    broadcast,
    direct,
    fastest,
    forms_of,
    gather,
    levels_of,
)
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.diagnostics import ShardirError

BOX, SHELF = Level("box", 4, 1e9, 1e-6), Level("shelf", 2, 1e8, 1e-5)
CLUSTER = Cluster((BOX, SHELF), 10**9, (("f32", 1e9), ("f64", 1e8)), 1e10, 1e-6)
MESH = Mesh("m", (("dp", 2), ("tp", 4)), CLUSTER)
DP, TP = (Axis("dp"),), (Axis("tp"),)


def ring(mesh: Mesh, axes: Axes, size: float, rounds: int) -> float:
    """A ring round by round: each device sends a shard to the next over the links between them, and
    a round ends with its slowest message. The slowest group counts."""
    found = []
    for group in mesh.groups(axes):
        links = []
        for a, b in zip(group, (*group[1:], group[0]), strict=True):
            units = mesh.cluster_or_default.units
            link = next(
                l
                for l, u in zip(mesh.cluster_or_default.levels, units, strict=True)
                if a // u == b // u
            )
            links.append(link.latency + size / len(group) / link.bandwidth)
        found.append(sum(max(links) for _ in range(rounds)))
    return max(found)


@pytest.mark.parametrize("axes", [DP, TP, (*DP, *TP), (Axis("tp", 1, 2),)], ids=str)
@pytest.mark.parametrize("size", [64.0, 1e9])
def test_rings_are_their_messages(axes: Axes, size: float) -> None:
    n, levels = MESH.extent(axes), levels_of(MESH, axes)
    full, half = ring(MESH, axes, size, 2 * (n - 1)), ring(MESH, axes, size, n - 1)
    for forms, messages in ((all_reduce(levels), full), (all_gather(levels), half)):
        assert fastest(forms, size).seconds(size) <= messages * (1 + 1e-12)
        (ring_form,) = [form for form in forms if form.name == "ring"]
        assert ring_form.seconds(size) == pytest.approx(messages)


def test_levels_of_groups() -> None:
    assert levels_of(MESH, TP) == ((4, BOX),)
    assert levels_of(MESH, DP) == ((2, SHELF),)
    assert levels_of(MESH, (*DP, *TP)) == ((4, BOX), (2, SHELF))
    across = Mesh("m", (("a", 4), ("b", 2)), CLUSTER)
    assert levels_of(across, (Axis("a"),)) == ((2, BOX), (2, SHELF))
    assert levels_of(across, (Axis("a", 1, 2),)) == ((2, SHELF),)
    assert levels_of(across, ()) == ()


def test_forms_by_hand() -> None:
    """Of 3 devices nothing doubles, so that the ring is fastest; of 100 the tree is, of 64 B."""
    three = ((3, Level("l", 3, 1e9, 1e-6)),)
    small, large = (fastest(all_reduce(three), size) for size in (64, 3e9))
    assert (small.name, large.name) == ("ring", "ring")
    many = ((100, Level("l", 100, 1e9, 1e-6)),)
    small, large = (fastest(all_reduce(many), size) for size in (64, 1e9))
    assert small.name == "tree" and small.seconds(64) == pytest.approx(14e-6 + 128e-9)
    assert large.name == "ring" and large.seconds(1e9) == pytest.approx(198e-6 + 2 * 0.99)
    assert fastest(all_gather(many), 64).name == "ring"
    doubled = fastest(all_gather(((64, Level("l", 64, 1e9, 1e-6)),)), 64)
    assert doubled.name == "doubling" and doubled.seconds(64) == pytest.approx(6e-6 + 63e-9)
    halved = fastest(all_reduce(((64, Level("l", 64, 1e9, 1e-6)),)), 64)
    assert halved.name == "halving" and halved.seconds(64) == pytest.approx(12e-6 + 126e-9)
    for forms, seconds in (
        (broadcast(many), 1 + 7e-6), (gather(many), 0.99 + 7e-6), (direct(many), 1 + 1e-6)
    ):  # fmt: skip
        assert fastest(forms, 1e9).seconds(1e9) == pytest.approx(seconds)
    for kind, record in COLLECTIVES.items():
        if record.forms is not None:
            assert fastest(forms_of(kind, record.forms, MESH, ()), 64).seconds(64) == 0


def test_ratios_of_a_kind_by_hand() -> None:
    """Half of an all-reduce's latencies, and one and a half of the time of its bytes; others as
    they are, but for the time of a call, of which each form has one."""
    kinds, bytes = (("all_reduce", 0.5),), (("all_reduce", 1.5),)
    on = replace(CLUSTER, collectives=kinds, bytes=bytes, call=3e-5)
    mesh = replace(MESH, cluster=on)
    for kind, forms, latency, rate in (
        ("all_reduce", all_reduce, 0.5, 1.5), ("all_gather", all_gather, 1.0, 1.0)
    ):  # fmt: skip
        for found, before in zip(
            *(forms_of(kind, forms, m, TP) for m in (mesh, MESH)), strict=True
        ):
            assert found.name == before.name
            assert found[1:] == pytest.approx((3e-5 + latency * before.latency, rate * before.rate))


def test_hierarchies_by_hand() -> None:
    """800 MB on 2 boxes of 4. All-reduce: within a box 0.6 s, twice; a quarter across, 2 x 1 s.
    All-gather: a quarter across, 1 s, then all of it within, 0.6 s."""
    levels = levels_of(MESH, (*DP, *TP))
    found = fastest(all_reduce(levels), 8e8)
    assert found.name == "hierarchical"
    assert found.seconds(8e8) == pytest.approx(2 * (0.6 + 2e-6) + 2 * (1 + 1e-5))
    found = fastest(all_gather(levels), 8e8)
    assert found.name == "hierarchical"
    assert found.seconds(8e8) == pytest.approx(0.6 + 2e-6 + 1 + 1e-5)


@pytest.mark.parametrize(
    "figures",
    [
        {"levels": (Level("l", 4, 0.0, 1e-6),)}, {"levels": (Level("l", 4, -1.0, 1e-6),)},
        {"levels": (Level("l", 4, 1e9, -1e-6),)}, {"levels": (Level("l", 0, 1e9, 1e-6),)},
        {"levels": (Level("l", 4, float("nan"), 1e-6),)}, {"memory_bandwidth": 0.0},
        {"memory": 0}, {"overhead": -1.0}, {"overhead": float("inf")},
        {"overhead": float("nan")}, {"interference": 2.0},
        {"skew": -1.0}, {"skew": float("inf")}, {"call": -1.0}, {"operands": (("f32", 0.0),)},
        {"packing": -1.0}, {"error": -0.1}, {"occupancy": 1.5}, {"bytes": (("all_reduce", 0.0),)},
        {"flops": (("f32", 0.0),)}, {"collectives": (("all_reduce", -1.0),)},
    ],
    ids=str,
)  # fmt: skip
def test_a_cluster_of_impossible_figures_is_refused(figures: dict[str, Any]) -> None:
    given: dict[str, Any] = {"levels": CLUSTER.levels, **figures}
    with pytest.raises(ShardirError, match=r"^expected .*, got .*; give "):
        Cluster(**given)
