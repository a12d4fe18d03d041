"""Collectives in flight beside computation: where buckets are cut, memory, and updates in place."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest
from support.extent import sampled
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation

import shardir
from shardir.algebra.cluster import Level
from shardir.cost import clusters, report
from shardir.cost.memory import LiveStorages
from shardir.cost.moved_memory import MovedMemory
from shardir.cost.report import FunctionCost
from shardir.cost.seconds import OpCost
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


COLUMNS = "tensor<4x8xf32, #dist.local<@m, [{}, {a}]>>"
ROWS = "tensor<8x4xf32, #dist.local<@m, [{a}, {}]>>"
PARTIAL = "tensor<4x4xf32, #dist.local<@m, [{}, {}], partial sum {a}>>"
REDUCED = "tensor<4x4xf32, #dist.local<@m, [{}, {}]>>"


def reductions(ends: Sequence[int], fusion: str, latency: float, interference: float) -> str:
    """Return a function of products, one after the other, that are then reduced in buckets, each of
    which ends before one of `ends`."""
    lines = [
        f"%p{i} = nn.matmul %x, %y : ({COLUMNS}, {ROWS}) -> {PARTIAL}" for i in range(ends[-1])
    ]
    for start, end in pairwise((0, *ends)):
        n = end - start
        values, results = (", ".join(f"%{name}{i}" for i in range(start, end)) for name in "pr")
        types = f"({', '.join([PARTIAL] * n)}) -> ({', '.join([REDUCED] * n)})"
        lines.append(f"{results} = dist.all_reduce <sum> {values} over <a>{fusion} : {types}")
    results, types = ", ".join(f"%r{i}" for i in range(ends[-1])), ", ".join([REDUCED] * ends[-1])
    return (
        f"dist.cluster @c <levels [pair = 2 {{bandwidth = 1e3, latency = {latency}}}], "
        f"flops {{f32 = 1e3}}, interference = {interference}>\ndist.mesh @m <a = 2> on @c\n"
        f"func.func @f(%x: {COLUMNS}, %y: {ROWS}) -> ({types}) {{\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"  func.return {results} : {types}\n}}"
    )


@pytest.mark.parametrize("interference", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("latency", [0.01, 0.1, 0.3])
def test_a_bucket_is_cut_as_is_best(latency: float, interference: float) -> None:
    """As in the best of all programs whose buckets, with a `fusion` index, stay as they are."""

    def overlapped(ends: Sequence[int], fusion: str = "") -> FunctionCost:
        text = reductions(ends, fusion, latency, interference)
        (found,) = report(shardir.compile(text, "overlap-communication").module)
        return found

    n = 4
    every = [(*c, n) for k in range(n) for c in combinations(range(1, n), k)]
    seconds = [overlapped(ends, " fusion 1").seconds for ends in every]
    assert overlapped((n,)).seconds == pytest.approx(min(seconds))
    assert min(seconds) < seconds[0] or interference == 1.0


@pytest.mark.parametrize("part", [0.04, 0.049, 0.051, 0.1])
def test_a_collective_is_started_if_a_twentieth_of_it_is_hidden(part: float) -> None:
    def ops(latency: float, pipeline: str) -> Sequence[OpCost]:
        (found,) = report(shardir.compile(gathers((2,), None, latency), pipeline).module)
        return found.ops

    before = ops(0.0, "")
    at = next(i for i, c in enumerate(before) if c.communicates)
    latency = sum(c.seconds for c in before[:at]) / part - before[at].seconds
    after = ops(latency, "overlap-communication")
    assert any(dist.is_started(c.op) for c in after) == (part > 0.05)


# ---- memory ----

RETAINED = """dist.mesh @m <a = 2>
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
"""  # noqa: E501 - the text of a program


def test_operands_in_flight_are_not_overwritten() -> None:
    """An update between the start and the wait of a gather of the parameter makes a new one; after
    the wait it may overwrite it."""
    lines = RETAINED.splitlines()
    update = next(line for line in lines if "train.sgd" in line)
    wait = next(line for line in lines if "dist.wait" in line)
    waited = RETAINED.replace(f"{update}\n{wait}", f"{wait}\n{update}")
    texts = [shardir.compile(t, "").program for t in (RETAINED, waited)]
    assert [" w.sub_(" in text for text in texts] == [False, True]
    between, after = (
        report(shardir.compile(t, "").module)[0].memory.peak for t in (RETAINED, waited)
    )
    part, lr = 8 * 16 * 4, 8
    assert between == 3 * part + 2 * part + lr  # w, g, new; all
    assert after == between - part


NUMBER = "tensor<f32, #dist.local<@m, []>>"


def gathers(rows: Sequence[int], memory: int | None, latency: float = 0.0) -> str:
    """Return a function that sums a matrix product, and then shards of 4 x `rows`, each gathered
    over two devices of `memory` bytes. To start the gathers early means to hold their buffers
    at once."""
    limit = "" if memory is None else f", memory = {memory} {{bandwidth = 1e30}}"
    square = "tensor<8x8xf32, #replicated>"
    lines = [
        f"%p = nn.matmul %w, %w : ({square}, {square}) -> {square}",
        f"%q = nn.matmul %p, %p : ({square}, {square}) -> {square}",
        f"%s0 = nn.reduce <sum> %q dims <0, 1> : ({square}) -> {NUMBER}",
    ]
    for i, n in enumerate(rows):
        full = f"tensor<4x{2 * n}xf32, #replicated>"
        lines += [
            f"%g{i} = dist.all_gather %x{i} dim 1 over <a> : (tensor<4x{n}xf32, #half>) -> {full}",
            f"%h{i} = nn.reduce <sum> %g{i} dims <0, 1> : ({full}) -> {NUMBER}",
            f"%s{i + 1} = nn.add %s{i}, %h{i} : ({NUMBER}, {NUMBER}) -> {NUMBER}",
        ]
    arguments = ", ".join(f"%x{i}: tensor<4x{n}xf32, #half>" for i, n in enumerate(rows))
    return (
        f"dist.cluster @c <levels [pair = 2 {{bandwidth = 1e3, latency = {latency}}}]{limit}, "
        "flops {f32 = 1e3}>\ndist.mesh @m <a = 2> on @c\n"
        "#replicated = #dist.local<@m, [{}, {}]>\n#half = #dist.local<@m, [{}, {a}]>\n"
        f"func.func @f({arguments}, %w: {square}) -> {NUMBER} {{\n"
        + "".join(f"  {line}\n" for line in lines)
        + f"  func.return %s{len(rows)} : {NUMBER}\n}}"
    )


@pytest.mark.parametrize("rows", [(2, 3), (4, 2, 1), (2, 2, 2, 2)])
def test_overlap_is_within_the_memory_of_a_device_and_uses_it(rows: Sequence[int]) -> None:
    """To the byte: one byte less than all started gathers need, and fewer are started."""

    def overlapped(memory: int | None, pipeline: str = "overlap-communication") -> FunctionCost:
        (found,) = report(shardir.compile(gathers(rows, memory), pipeline).module)
        return found

    def started(f: FunctionCost) -> int:
        return sum(dist.is_started(c.op) for c in f.ops)

    before, unlimited = overlapped(None, ""), overlapped(1 << 30)
    smallest, largest = before.memory.peak, unlimited.memory.peak
    assert started(unlimited) == len(rows) and smallest < largest
    limits = [None, smallest - 1, (smallest + largest) // 2, largest - 1, largest]
    found = [overlapped(limit) for limit in limits]
    for limit, f in zip(limits, found, strict=True):
        assert f.memory.peak <= max(smallest, limit or 0)
    for fewer, more in pairwise(found):
        assert started(fewer) <= started(more) and fewer.seconds >= more.seconds
    assert started(found[-2]) < started(found[-1]) == len(rows)


READ_BY_A_VIEW = f"""
dist.cluster @c <levels [pair = 2 {{bandwidth = 1e3, latency = 0}}], flops {{f32 = 1e3}}>
dist.mesh @m <a = 2> on @c
func.func @f(%x: {PARTIAL}, %w: {REDUCED} {{train.parameter = "w"}}) -> {REDUCED} {{
  %s = nn.add %x, %x : ({PARTIAL}, {PARTIAL}) -> {PARTIAL}
  %r = dist.all_reduce <sum> %s over <a> : ({PARTIAL}) -> {REDUCED}
  %p = nn.matmul %w, %w : ({REDUCED}, {REDUCED}) -> {REDUCED}
  %v = nn.transpose %r perm <1, 0> : ({REDUCED}) -> {REDUCED}
  %q = nn.matmul %p, %w : ({REDUCED}, {REDUCED}) -> {REDUCED}
  %t = nn.add %r, %q : ({REDUCED}, {REDUCED}) -> {REDUCED}
  %u = nn.matmul %t, %w : ({REDUCED}, {REDUCED}) -> {REDUCED}
  %y = nn.add %u, %v : ({REDUCED}, {REDUCED}) -> {REDUCED}
  func.return %y : {REDUCED}
}}"""
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MOVED = {
    "views": READ_BY_A_VIEW,
    "layers": programs.gpt(layers=2),
    "gathers": programs.gpt(layers=2, fsdp=True),
    "exchange": (EXAMPLES / "lamb.ir").read_text(),
    "copies": (EXAMPLES / "offload.ir").read_text(),
}


@pytest.mark.parametrize("text", MOVED.values(), ids=MOVED)
def test_memory_of_moved_ops_is_that_of_all_storages(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storages that no attempt touches are counted once: a count of all of them finds the same
    bytes at each op."""
    counted, attempts = MovedMemory.at_ops, []

    def checked(self: MovedMemory, ops: Sequence[Operation]) -> dict[Operation, int]:
        found = counted(self, ops)
        (f,) = {op.parent_op() for op in ops}
        assert isinstance(f, FuncOp)
        live = LiveStorages(f, mesh, ops)
        assert found == dict(zip(ops, live.needed, strict=True))
        attempts.append(found)
        return found

    monkeypatch.setattr(MovedMemory, "at_ops", checked)
    module = shardir.compile(text, plans.without_overlap("train")).module
    (mesh,) = dist.meshes_of(module).values()
    shardir.compile(module, "overlap-communication")
    assert attempts


# ---- steps ----


@pytest.mark.parametrize(
    ("plan", "cluster"),
    sampled(product(["annotated", "data", "zero-3", "2d"], ["gloo", "h200"]), 1),
)
def test_a_step_is_no_slower_and_needs_no_more_memory(plan: str, cluster: str) -> None:
    """It costs at least its computation. Peak memory is limited where the cluster has no memory."""
    on = clusters.load(cluster).part(8)
    for memory in (None, on.memory):
        text = programs.gpt(layers=2, batch=8, seq=32, hidden=64, heads=4, vocab=96, mesh=(2, 4))
        module = plans.PLANS[plan](parse(placed(replace(on, memory=memory), text)))
        before, after = (
            report(shardir.compile(module, pipeline).module)[0]
            for pipeline in (plans.without_overlap("train"), "train")
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
"""  # noqa: E501 - the text of a program


BUSY = gathers((2, 3), 1 << 20).replace("f32 = 1e3}", "f32 = 1e3}, interference = 1.0")


@pytest.mark.parametrize("text", [SLOWER, BUSY], ids=["cut", "started"])
def test_a_function_that_gains_nothing_stays_as_it_is(text: str) -> None:
    """To cut the bucket would cost a latency, and the product is too short to hide it. Gathers
    during which devices compute nothing, without latency, hide nothing."""
    before, after = (shardir.compile(text, p).module for p in ("", "overlap-communication"))
    assert str(after) == str(before)
