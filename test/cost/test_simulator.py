"""The simulated run: known times by hand; and of examples and random steps on every ready-made
cluster, that it is the reported one, with no gap, one event at a time in each row, and the reported
peak."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
from cost.test_one_price import meshes, unlimited
from cost.test_schedule import MESH, PRODUCT, TYPES, start, wait
from cost.test_stage_times import MASKED
from support.extent import extent
from xdsl.dialects.builtin import ModuleOp

import shardir
from shardir.cost.clusters import names
from shardir.cost.report import StagedCost
from shardir.cost.schedule import largest_normal
from shardir.cost.simulator import COMPUTE, RankTimeline, Simulation, simulate
from shardir.cost.trace import predicted_trace
from shardir.dialects.dist import is_started
from shardir.tools import bench

steps = bench.load("random_steps")

EXAMPLES = (
    "mixed_precision",
    "overlap",
    "offload",
    "parameter_server",
    "pangu_alpha",
    "ring_attention",
)


def by_hand(body: str, interference: float, skew: float = 0.0) -> Simulation:
    """A function of %x [2, 4], sharded over b, and %w [4, 4]: a product takes 0.128 s, to gather %x
    0.01 s and 0.032 s."""
    links = "{bandwidth = 1e3, latency = 0.01}"
    text = (
        f"dist.cluster @c <levels [pair = 2 {links}, shelf = 2 {links}], flops {{f32 = 1e3}}, "
        f"interference = {interference}, skew = {skew}>\n{MESH}{TYPES}"
        "func.func @f(%x: tensor<2x4xf32, #rows>, %u: tensor<2x4xf32, #apart>, "
        "%w: tensor<4x4xf32, #replicated>) -> tensor<4x4xf32, #replicated> {\n"
        f"{body}\n  func.return %w : tensor<4x4xf32, #replicated>\n}}"
    )
    (found,) = simulate(shardir.compile(text, "").module)
    return found


def events(rank: RankTimeline) -> list[tuple[str, float, float, bool, str]]:
    return [
        (e.row, round(e.begin, 9), round(e.end, 9), e.waits, e.cost.op.name) for e in rank.events
    ]


def test_events_by_hand() -> None:
    """Half of the 0.032 s of the bytes is lost when the gather starts; the gather over other links
    ends with the one before it."""
    body = "\n".join([start("g"), f"%p = {PRODUCT}", wait("g"), start("h", "u"), wait("h")])
    (rank,) = by_hand(body, 0.5).ranks
    gather = "dist.all_gather"
    assert sorted(events(rank)) == sorted([
        ("links: pair", 0.0, 0.042, False, gather),
        (COMPUTE, 0.0, 0.016, True, gather),
        (COMPUTE, 0.016, 0.144, False, "nn.matmul"),
        ("links: shelf", 0.144, 0.186, False, gather),
        (COMPUTE, 0.144, 0.16, True, gather),
        (COMPUTE, 0.16, 0.186, True, gather),
    ])  # fmt: skip
    assert rank.exposed == pytest.approx(0.058)
    assert rank.busy(COMPUTE) == pytest.approx(0.128)
    assert rank.busy("links: pair") == pytest.approx(0.042)


def test_the_wait_for_the_last_rank_is_an_event_of_its_own() -> None:
    """It begins a gather 0.1 s late after a product of 0.128 s, with a skew of 0.078125 s for two;
    one in flight too, whatever is computed beside it. A trace names the waits, which are not
    exposed."""
    blocking = start("g").replace(" async", "")
    body = "\n".join([
        blocking, f"%p = {PRODUCT}", start("h"), f"%q = {PRODUCT}", wait("h"), start("i", "u"),
        wait("i"),
    ])  # fmt: skip
    found = by_hand(body, 0.0, skew=0.078125 / largest_normal(2)[0] ** 2)
    (rank,) = found.ranks
    gather, product = "dist.all_gather", "nn.matmul"
    remains = largest_normal(2)[1]
    first = 0.1 * remains**0.5  # after the product of the run before, and one over other axes
    apart = first + 0.398 + 0.1 * (1 + remains) ** 0.5  # after two products
    expected = [
        (COMPUTE, 0.0, first, True, gather),
        (COMPUTE, first, first + 0.042, True, gather),
        ("links: pair", first, first + 0.042, False, gather),
        (COMPUTE, first + 0.042, first + 0.17, False, product),
        (COMPUTE, first + 0.17, first + 0.27, True, gather),
        ("links: pair", first + 0.27, first + 0.312, False, gather),
        (COMPUTE, first + 0.27, first + 0.398, False, product),
        (COMPUTE, first + 0.398, apart, True, gather),
        ("links: shelf", apart, apart + 0.042, False, gather),
        (COMPUTE, apart, apart + 0.042, True, gather),
    ]  # fmt: skip
    assert sorted(events(rank)) == sorted(
        (row, round(begin, 9), round(end, 9), *rest) for row, begin, end, *rest in expected
    )
    assert rank.exposed == pytest.approx(0.042 + 0.042)
    trace = json.loads(predicted_trace([found]))["traceEvents"]
    late = [e for e in trace if e.get("cat") == "skew"]
    assert [e["name"].split()[6] for e in late] == ["%g", "%h", "%i"]
    assert late[1]["name"].startswith("wait for the last rank at %h") and late[1]["dur"] == 100_000


def programs() -> Iterator[ModuleOp]:
    for example in EXAMPLES:
        yield shardir.compile_file(f"docs/examples/{example}.ir").module
    random = Random(0)
    for cluster in (None, *names()):
        for _ in range(extent(1, 20)):
            mesh = unlimited(random.choice(meshes(cluster)))
            yield shardir.compile(steps.random_step(mesh, random, 3), "train").module


def test_a_simulated_run_is_what_the_report_has() -> None:
    in_flight = 0
    for module in programs():
        for found in simulate(module):
            cost, (rank,) = found.cost, found.ranks
            holds(rank)
            device = [e for e in rank.events if e.row == COMPUTE]
            for a, b in pairwise(device):  # without a gap
                assert a.end == pytest.approx(b.begin, rel=1e-12)
            assert found.seconds == pytest.approx(cost.seconds, rel=1e-12)
            computing = [e.end - e.begin for e in device if not e.waits]
            assert sum(computing) == pytest.approx(cost.computation, rel=1e-9)
            waits = defaultdict[object, float](float)
            for e in device:
                waits[e.cost.op] += (e.end - e.begin) * (e.waits and not e.late)
            for c in cost.ops:
                if c.communicates:
                    assert waits[c.op] == pytest.approx(cost.exposed[c.op], abs=1e-12)
                    if not is_started(c.op):
                        assert cost.exposed[c.op] >= c.seconds * (1 - 1e-9)
                    in_flight += is_started(c.op)
    assert in_flight > 10


def holds(rank: RankTimeline) -> None:
    """One event at a time in each row; the peak of live bytes is that of the report."""
    for row in rank.rows:
        mine = [e for e in rank.events if e.row == row]
        for a, b in pairwise(mine):
            assert a.end <= b.begin * (1 + 1e-12)
    assert max(n for _, n in rank.bytes) == rank.memory.peak
    assert all(a <= b for (a, _), (b, _) in pairwise(rank.bytes))


def pipeline() -> Simulation:
    module = shardir.compile(MASKED, "train").module
    (found,) = simulate(module)
    return found


def test_a_pipeline_has_the_bubble_of_its_report() -> None:
    found = pipeline()
    cost = found.cost
    assert isinstance(cost, StagedCost)
    assert found.seconds == pytest.approx(cost.seconds)
    for rank, busy, bubble in zip(found.ranks, cost.busy, found.bubbles, strict=True):
        holds(rank)
        assert bubble == pytest.approx(1 - busy / cost.seconds)
    received = [(e.cost.op, rank.rank, e.run) for rank in found.ranks for e, _ in rank.arrivals]
    assert len(received) == len(set(received)) == 4 + 4
    """Of 4 microbatches %h goes to the last rank, and its gradient comes back."""


# ---- the trace ----


def test_the_trace_of_a_pipeline() -> None:
    found = pipeline()
    trace = json.loads(predicted_trace([found]))
    assert trace["displayTimeUnit"] == "ns"
    rows: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    for e in trace["traceEvents"]:
        if e["name"] == "thread_name":
            rows[e["pid"], e["tid"]] = e["args"]["name"]
        if e["name"] == "process_name":
            processes[e["pid"]] = e["args"]["name"]
    assert list(processes.values()) == [
        "predicted @step, pipeline rank 0", "predicted @step, pipeline rank 1",
    ]  # fmt: skip
    complete = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == set("MXCsfi")
    for pid, rank in enumerate(found.ranks):
        mine = [e for e in complete if e["pid"] == pid]
        assert len(mine) == len(rank.events) + len(rank.runs)
        for row in rank.rows:
            total = sum(e["dur"] for e in mine if rows[pid, e["tid"]] == row)
            want = sum(e.end - e.begin for e in rank.events if e.row == row)
            assert total == pytest.approx(want * 1e6, abs=1e-4)
        peaks = [e["args"]["bytes"] for e in trace["traceEvents"] if e["ph"] == "C"
                 and e["pid"] == pid]  # fmt: skip
        assert max(peaks) == rank.memory.peak
    products = [e for e in complete if e["name"].startswith("%h = nn.matmul")]
    assert len(products) == 4
    assert products[0]["args"] == {"op": "nn.matmul", "bytes": 192, "flops": 128}
    """[4, 4] x [4, 4] of f32."""
    arrows = {"s": {}, "f": {}}
    for e in trace["traceEvents"]:
        if e["ph"] in arrows:
            arrows[e["ph"]][e["id"]] = e
    assert arrows["s"].keys() == arrows["f"].keys() and len(arrows["s"]) == 8
    for number, sent in arrows["s"].items():
        arrived = arrows["f"][number]
        assert sent["pid"] != arrived["pid"] and sent["ts"] < arrived["ts"]
        assert rows[sent["pid"], sent["tid"]] == "functions"
        assert rows[arrived["pid"], arrived["tid"]].startswith("arrivals")
        for e in (sent, arrived):  # within an event of the row
            row = [o for o in complete if (o["pid"], o["tid"]) == (e["pid"], e["tid"])]
            assert any(o["ts"] <= e["ts"] <= o["ts"] + o["dur"] for o in row)
