"""Collectives under way beside calculation: the schedule by hand, the parts of a buffer against all
ways to cut it, memory, and updates in place."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random

import pytest

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.cost import clusters, report
from shardir.cost.report import FunctionCost
from shardir.cost.schedule import cuts
from shardir.dialects import dist
from shardir.syntax.parser import parse
from shardir.tools import bench

plans, programs = bench.load("plans"), bench.load("programs")
placed = bench.load("auto").on

PAIR = Level("pair", 2, 1e3, 0.0)
MESH = "dist.mesh @m <a = 2, b = 2> on @c\n"
TYPES = """
#replicated = #dist.local<@m, [{}, {}]>
#rows = #dist.local<@m, [{b}, {}]>
#apart = #dist.local<@m, [{a}, {}]>
"""


def cost(body: str, latency: float = 0.0, interference: float = 0.0) -> FunctionCost:
    """Of a function of %x [2, 4], a part over b, %u [2, 4], a part over a, and %w [4, 4]. A product
    of 4 x 4 takes 0.128 s. To gather %x takes a latency and 0.032 s, as does %u."""
    links = f"{{bandwidth = 1e3, latency = {latency}}}"
    levels = ", ".join(f"{name} = 2 {links}" for name in ("pair", "shelf"))
    text = (
        f"dist.cluster @c <levels [{levels}], flops {{f32 = 1e3}}, interference = {interference}>\n"
        + MESH + TYPES
        + "func.func @f(%x: tensor<2x4xf32, #rows>, %u: tensor<2x4xf32, #apart>, "
        "%w: tensor<4x4xf32, #replicated>) -> tensor<4x4xf32, #replicated> {\n"
        + "".join(f"  {line}\n" for line in body.strip().splitlines())
        + "  func.return %w : tensor<4x4xf32, #replicated>\n}"
    )  # fmt: skip
    (found,) = report(shardir.compile(text, "").module)
    return found


W = "tensor<4x4xf32, #replicated>"
PRODUCT = f"nn.matmul %w, %w : ({W}, {W}) -> {W}"


def start(name: str, what: str = "x") -> str:
    axis, t = ("b", "#rows") if what == "x" else ("a", "#apart")
    types = f"(tensor<2x4xf32, {t}>) -> {W}"
    return f"%{name} = dist.all_gather %{what} dim 0 over <{axis}> async : {types}"


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
        # over the same links one behind the other
        ([start("g"), start("h"), wait("g"), wait("h")], 0.01, 0.0, 0.084),
        # over others at once
        ([start("g"), start("h", "u"), wait("g"), wait("h")], 0.01, 0.0, 0.042),
        # what is not waited for by then goes on to the end
        ([f"%p = {PRODUCT}", start("g"), wait("g")], 0.0, 0.0, 0.16),
    ],
)  # fmt: skip
def test_what_overlaps(
    lines: list[str], latency: float, interference: float, seconds: float
) -> None:
    found = cost("\n".join(lines), latency, interference)
    assert found.seconds == pytest.approx(seconds)
    assert found.overlapped == pytest.approx(sum(c.seconds for c in found.ops) - seconds)


def test_in_groups_of_one_device_nothing_is_under_way() -> None:
    """Neither in the model nor in the program."""
    part, whole = (f"tensor<4x4xf32, #dist.local<@m, [{{{a}}}, {{}}]>>" for a in ("a", ""))
    text = (
        f"dist.mesh @m <a = 1>\nfunc.func @f(%x: {part}) -> {whole} {{\n"
        f"  %g = dist.all_gather %x dim 0 over <a> async : ({part}) -> {whole}\n"
        f"  %y = dist.wait %g : ({whole}) -> {whole}\n  func.return %y : {whole}\n}}"
    )
    compiled = shardir.compile(text, "")
    assert report(compiled.module)[0].seconds == 0.0
    assert "return x" in compiled.program


def test_a_collective_that_waits_queues_behind_what_is_under_way() -> None:
    plain = start("h").replace(" async", "")
    assert cost("\n".join([start("g"), plain, wait("g")])).seconds == pytest.approx(0.064)


# ---- the parts of a buffer ----


@pytest.mark.parametrize("seed", range(60))
def test_the_cuts_of_a_buffer_are_the_best_of_all(seed: int) -> None:
    rng = Random(seed)
    count, latency, overhead = rng.randint(1, 8), rng.choice([0.0, 0.01, 0.1]), 1e-3
    interference = rng.choice([0.0, 0.5, 1.0])
    sending = [rng.choice([0.01, 0.02, 0.05, 0.4]) for _ in range(count)]
    ready = sorted(rng.uniform(0, 0.5) for _ in range(count))

    def end(behind: Sequence[int]) -> float:
        free = late = 0.0
        for i, j in pairwise((0, *behind)):
            free = max(free, ready[j - 1] + late) + latency + sum(sending[i:j])
            late += interference * sum(sending[i:j])
        return free + overhead * (len(behind) - 1)

    every = [(*c, count) for k in range(count) for c in combinations(range(1, count), k)]
    on = Cluster((PAIR,), overhead=overhead, interference=interference)
    assert end(cuts(sending, ready, latency, on)) == pytest.approx(min(map(end, every)))


# ---- memory ----

KEPT = """dist.mesh @m <a = 2>
#half = #dist.local<@m, [{a}, {}]>
#replicated = #dist.local<@m, [{}, {}]>
#sums = #dist.local<@m, [{}, {}], partial sum {a}>
func.func @step(
    %w: tensor<8x16xf32, #half> {train.parameter = "w", train.init = #train.init<normal>},
    %g: tensor<8x16xf32, #half> {train.input = #train.init<normal>}
) -> (tensor<16x16xf32, #replicated>, tensor<8x16xf32, #half> {train.updates = "w"}) attributes {train.step} {
  %all = dist.all_gather %w dim 0 over <a> async : (tensor<8x16xf32, #half>) -> tensor<16x16xf32, #replicated>
  %lr = nn.constant dense<0.1> : tensor<f64> -> tensor<f64, #dist.local<@m, []>>
  %new = train.sgd %w, %g, %lr weight_decay 0.0 : (tensor<8x16xf32, #half>, tensor<8x16xf32, #half>, tensor<f64, #dist.local<@m, []>>) -> tensor<8x16xf32, #half>
  %there = dist.wait %all : (tensor<16x16xf32, #replicated>) -> tensor<16x16xf32, #replicated>
  func.return %there, %new : tensor<16x16xf32, #replicated>, tensor<8x16xf32, #half>
}
"""  # noqa: E501


def test_what_is_under_way_is_not_overwritten() -> None:
    """The update stands between the start and the wait of what reads the parameter: it makes
    another one. Behind the wait it may overwrite it."""
    lines = KEPT.splitlines()
    update = next(line for line in lines if "train.sgd" in line)
    wait = next(line for line in lines if "dist.wait" in line)
    behind = KEPT.replace(f"{update}\n{wait}", f"{wait}\n{update}")
    texts = [shardir.compile(t, "").program for t in (KEPT, behind)]
    assert [" w.sub_(" in text for text in texts] == [False, True]
    between, after = (report(shardir.compile(t, "").module)[0].memory.peak for t in (KEPT, behind))
    part, lr = 8 * 16 * 4, 8
    assert between == 3 * part + 2 * part + 2 * part + lr  # w, g, new; all; copies to send
    assert after == between - part


# ---- steps ----


@pytest.mark.parametrize("cluster", ["gloo", "h200"])
@pytest.mark.parametrize("plan", ["annotated", "data", "zero-3", "2d"])
def test_a_step_takes_less_and_needs_no_more(plan: str, cluster: str) -> None:
    """No less than calculation takes, and no longer than without overlap; on a cluster that says
    nothing of memory it needs no more of it."""
    on = clusters.load(cluster).part(8)
    for memory in (None, on.memory):
        text = programs.gpt(layers=2, batch=8, seq=32, hidden=64, heads=4, vocab=96, mesh=(2, 4))
        module = plans.PLANS[plan](parse(placed(replace(on, memory=memory), text)))
        before, after = (
            report(shardir.compile(module, pipeline).module)[0]
            for pipeline in (plans.alone("train"), "train")
        )
        assert before.computation <= after.seconds <= before.seconds * (1 + 1e-9)
        assert plan != "zero-3" or any(dist.is_started(c.op) for c in after.ops)
        if memory is None:
            assert after.memory.peak <= before.memory.peak


SLOWER = """dist.cluster @c <levels [n = 2 {bandwidth = 1e6, latency = 1e-3}], flops {f32 = 1e7}>
dist.mesh @m <a = 2> on @c
#replicated = #dist.local<@m, [{}, {}]>
#sum = #dist.local<@m, [{}, {}], partial sum {a}>
func.func @f(%x: tensor<4x4xf32, #sum>, %w: tensor<4x4xf32, #replicated>) -> (tensor<4x4xf32, #replicated>, tensor<4x4xf32, #replicated>) {
  %y = nn.matmul %x, %w : (tensor<4x4xf32, #sum>, tensor<4x4xf32, #replicated>) -> tensor<4x4xf32, #sum>
  %a, %b = dist.all_reduce <sum> %x, %y over <a> : (tensor<4x4xf32, #sum>, tensor<4x4xf32, #sum>) -> (tensor<4x4xf32, #replicated>, tensor<4x4xf32, #replicated>)
  func.return %a, %b : tensor<4x4xf32, #replicated>, tensor<4x4xf32, #replicated>
}
"""  # noqa: E501


def test_what_gains_nothing_stays_as_it_is() -> None:
    """To cut the buffer would cost a latency, and the product is too short to hide it."""
    plain, passed = (shardir.compile(SLOWER, p).module for p in ("", "overlap-communication"))
    assert str(passed) == str(plain)
