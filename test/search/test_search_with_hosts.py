"""The search for layouts within memory where states may be in host memory: against the search
without it, and against all layouts of the parameters."""

from functools import cache
from math import prod

import pytest
from support.extent import long_form
from xdsl.context import Context

import shardir
from shardir.analysis.functions import mesh_of
from shardir.api.compiled import Compiled
from shardir.diagnostics import ShardirError
from shardir.dialects import train
from shardir.dialects.nn.types import size_of
from shardir.passes.distributed_autodiff import DistributedAutodiff
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.graph.candidates import CandidateSource
from shardir.search.graph.cost_graph import CostGraph
from shardir.search.graph.graph_bytes import live_bytes
from shardir.search.graph.value_layouts import tied_values
from shardir.search.measure.strategy_plan import LoweredPlans
from shardir.search.problem.memory import live
from shardir.syntax.parser import parse

ROWS, WIDTH, DEVICES = 32, 64, 2
STATES = 2 * 2 * 4 * WIDTH * 4 * WIDTH
"""The bytes of the two moments of both parameters of AdamW, in f32, on all devices together."""


def model(host: float = 1e10) -> str:
    wide = f"tensor<{ROWS}x{4 * WIDTH}xf32>"
    x, u, v = (f"tensor<{a}x{b}xf32>" for a, b in (
        (ROWS, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))  # fmt: skip
    return f"""
dist.cluster @c <levels [node = {DEVICES} {{bandwidth = 1.0e+10, latency = 5.0e-06}}],
    memory = 80000000000 {{bandwidth = 1.0e+11}}, flops {{f32 = 1.0e+12}},
    host {{bandwidth = {host}, latency = 5.0e-06}}>
dist.mesh @m <d = {DEVICES}> on @c
func.func private @loss(
    %x: {x} {{train.input = #train.init<normal>}},
    %u: {u} {{train.parameter = "u", train.init = #train.init<normal, std = 0.1>}},
    %v: {v} {{train.parameter = "v", train.init = #train.init<normal, std = 0.1>}}
) -> tensor<f32> {{
  %h = nn.matmul %x, %u : ({x}, {u}) -> {wide}
  %a = nn.tanh %h : ({wide}) -> {wide}
  %y = nn.matmul %a, %v : ({wide}, {v}) -> {x}
  %s = nn.square %y : ({x}) -> {x}
  %loss = nn.reduce <mean> %s dims <0, 1> : ({x}) -> tensor<f32>
  func.return %loss : tensor<f32>
}}
train.step @step of @loss <adamw, lr = 0.01>
"""


@cache
def found(limit: int, offload: bool, host: float = 1e10) -> Compiled | None:
    """The program within a limit; None if there is none."""
    try:
        return shardir.compile(model(host), mode="auto", recompute=limit, offload=offload)
    except ShardirError as e:
        assert f"expected a plan within {limit} B on a device" in str(e)
        return None


def test_states_leave_the_device_where_nothing_else_fits() -> None:
    """Without host memory a device holds a quarter of the states at fewest, and the error says what
    would help."""
    with pytest.raises(ShardirError, match="or offload=true") as e:
        shardir.compile(model(), mode="auto", recompute=1000)
    fewest = int(str(e.value).split(" got ")[1].split(" B ")[0])
    compiled = found(fewest - STATES // DEVICES, True)
    assert compiled is not None
    memory = compiled.cost().memory
    assert memory.peak <= fewest - STATES / DEVICES
    assert memory.parts.get("states", 0) < STATES / DEVICES


def test_states_that_may_be_in_host_memory_do_not_count() -> None:
    """At each op a search counts as many bytes less as the states have in their layouts."""
    module = parse(model())
    DistributedAutodiff().apply(Context(), module)
    ((f, block),) = bodies(module)
    mesh = mesh_of(f, module)
    assert mesh is not None
    graph = CostGraph(block, CandidateSource(mesh), tied_values(f, block), counts_memory=True)
    arguments = zip(block.args, train.arguments(f), strict=True)
    states = [v for v, a in arguments if a.role is train.Role.STATE and size_of(v) > 8]
    for offload in (False, True):
        lowered = LoweredPlans(module, f, mesh, offload=offload)
        for chosen in range(2):
            choice = [min(chosen, len(u) - 1) for u in graph.problem.unary]
            all, some = (live(live_bytes(graph, v), choice) for v in ((), lowered.hosted))
            layouts = [graph.layouts[v][choice[graph.value_variable[v]]] for v in states]
            parts = [prod(mesh.extent(axes) for axes in layout.dims) for layout in layouts]
            assert set(all - some) == {sum(STATES / 4 / n for n in parts) if offload else 0}


@long_form
@pytest.mark.parametrize("host", [1e8, 1e9, 1e10, 1e11, 1e12])
def test_no_program_is_slower_with_host_memory(host: float) -> None:
    fastest = found(10**9, False, host)
    assert fastest is not None
    steps = list[float]()
    for share in (1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5):
        limit = int(share * fastest.cost().memory.peak)
        without, with_hosts = (found(limit, offload, host) for offload in (False, True))
        if without is not None:
            assert with_hosts is not None
            assert with_hosts.cost().seconds <= without.cost().seconds * (1 + 1e-9)
        if with_hosts is not None:
            ((f, _),) = [b for b in bodies(with_hosts.module) if found_by_search(b[0])]
            assert found_by_search(f)["bound"] <= with_hosts.cost().seconds
            assert with_hosts.cost().memory.peak <= limit
            steps.append(with_hosts.cost().seconds)
    assert len(steps) > 1
    assert steps == sorted(steps)
