"""search-mesh: against every mesh, and the links that a plan's bytes cross."""

from collections.abc import Iterator
from functools import cache
from itertools import permutations, product
from math import isclose
from typing import NamedTuple

import pytest
from support.extent import extent
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Cluster
from shardir.algebra.forms import levels_of
from shardir.algebra.mesh import Mesh
from shardir.analysis.functions import mesh_of
from shardir.cost import report
from shardir.cost.seconds import cost_of
from shardir.dialects import dist
from shardir.passes import PASSES
from shardir.passes.search_mesh import SearchMesh
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.meshes.meshes import MeshEstimate, fastest_mesh, shapes
from shardir.search.problem.solver import DEFAULT_GAP
from shardir.syntax.parser import parse
from shardir.syntax.source import collect_warnings
from shardir.tools import bench

search, programs = bench.load("search"), bench.load("programs")

NODES = 4, 2
FAST, SLOW = "{bandwidth = 1e+11, latency = 1e-06}", "{bandwidth = 1e+10, latency = 1e-05}"
LINKS = {"near is fast": (FAST, SLOW), "far is fast": (SLOW, FAST)}


def on_cluster(annotated: str, nodes: tuple[int, int], links: tuple[str, str]) -> str:
    """Return the program without layouts, on a cluster of two levels and a mesh of one axis."""
    text = search.LAYOUT.sub("", annotated)
    (near, far), (inner, outer) = nodes, links
    cluster = (
        f"dist.cluster @c <levels [node = {near} {inner}, pod = {far} {outer}], "
        "memory = 8000000000 {bandwidth = 1e+12}, flops {f32 = 1e+11}>\n"
    )
    return cluster + text.replace("<dp = 2, tp = 4>", f"<d = {near * far}> on @c")


SMALL = {"batch": 4, "seq": 8, "hidden": 64, "heads": 8, "vocab": 64}


@cache
def fastest_on(text: str) -> float:
    """Return the estimated time of the plan that search-strategies finds for a program."""
    return planned(parse(text))


def planned(module: ModuleOp) -> float:
    """Find a plan by search-strategies; return its estimated time."""
    for name in ("distributed-autodiff", "search-strategies"):
        PASSES[name]()().apply(Context(), module)
    ((f, _),) = bodies(module)
    return found_by_search(f)["objective"]


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_shapes_are_all_factorisations(axes: int):
    found = list(shapes(24, axes))
    assert len(found) == len(set(found))
    wanted = {
        tuple(n for n in (a, b, 24 // a // b) if n > 1)
        for a in range(1, 25) if 24 % a == 0
        for b in range(1, 25) if 24 // a % b == 0
    }  # fmt: skip
    assert set(found) == {s for s in wanted if len(s) <= axes}


PROGRAMS = {
    "gpt": search.gpt(layers=1, **SMALL),
    "mlp": programs.mlp(layers=1, batch=16, dim=32, hidden=64),
}
CHOICES = extent([("mlp", 2, "far is fast")], [*product(PROGRAMS, (1, 2, 3), LINKS)])


def axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} = {size}" for name, size in axes)


@pytest.mark.parametrize(("program", "axes", "links"), CHOICES, ids=str)
def test_no_mesh_of_all_is_better(program: str, axes: int, links: str):
    """Of 8, 2 x 4, 4 x 2 and 2 x 2 x 2, those of at most `axes` axes."""
    text = on_cluster(PROGRAMS[program], NODES, LINKS[links])
    names: tuple[str, ...] = "a", "b", "c"
    meshes = {tuple(zip(names, shape, strict=False)) for shape in shapes(8, axes)}
    seconds = {m: fastest_on(text.replace("d = 8", axes_text(m))) for m in meshes}
    module = parse(text)
    SearchMesh(axes=axes).apply(Context(), module)
    (mesh,) = (op.mesh for op in module.body.ops if isinstance(op, dist.MeshOp))
    assert isclose(seconds[mesh.axes], min(seconds.values()))


def test_of_meshes_that_are_equally_fast_up_to_rounding_the_first_is_chosen():
    """Of meshes that the fast search finds equally fast too; a faster one is found everywhere."""
    meshes = [Mesh("m", (("a", n), ("b", 24 // n))) for n in (2, 3, 4, 6)]
    for seconds in permutations((1 - 3e-16, 1 - 6e-16, 1.0, 1.5)):
        times = dict(zip(meshes, seconds, strict=True))

        def estimate(mesh: Mesh, times: dict[Mesh, float] = times) -> MeshEstimate:
            return MeshEstimate(times[mesh], times[mesh])

        equal = [m for m in meshes if times[m] < 1.5]
        assert fastest_mesh(meshes, estimate, estimate, str) == equal[0]
        times[equal[-1]] = 1 - 1e-6
        assert fastest_mesh(meshes, estimate, estimate, str) == equal[-1]


def test_searches_on_meshes_do_not_warn():
    """A scalar is replicated on every mesh; the search that is to be compiled tells of it once."""
    module = parse("""
    func.func @f(%x: tensor<f32>) -> tensor<f32> {
      %y = nn.tanh %x : (tensor<f32>) -> tensor<f32>
      func.return %y : tensor<f32>
    }
    """)
    with collect_warnings() as found:
        SearchMesh(devices=12).apply(Context(), module)
        assert not found
        PASSES["search-strategies"]()().apply(Context(), module)
    assert len(found) == 1


LOWERING = (
    "insert-redistributions", "recompute", "lower-to-spmd", "simplify-communication",
    "fuse-communication",
)  # fmt: skip


LARGE = {
    "mlp": programs.mlp(layers=1, batch=512, dim=512, hidden=1024),
    "gpt": search.gpt(layers=1, batch=8, seq=128, hidden=512, heads=8, vocab=1024),
}


@pytest.mark.parametrize("program", extent(["mlp"], [*LARGE]))
def test_plans_are_made_for_their_links(program: str, capfd: pytest.CaptureFixture[str]):
    """On two nodes of four devices, with fast links within nodes or between them.

    1. On each cluster its own plan is the faster one, to within the gap of the search.
    2. The slow links carry the fewest bytes that the groups of the plan allow: where links within
       nodes are fast, each byte enters a node once; where links between nodes are, no group is
       within a node.
    """
    found: dict[str, tuple[ModuleOp, Mesh]] = {}
    for name, links in LINKS.items():
        module = parse(on_cluster(LARGE[program], NODES, links))
        SearchMesh().apply(Context(), module)
        assert "search-mesh: @m <" in capfd.readouterr().err
        planned(module)
        for p in LOWERING:
            PASSES[p]()().apply(Context(), module)
        ((f, _),) = bodies(module)
        mesh = mesh_of(f, module)
        assert mesh is not None
        found[name] = module, mesh
    for name, (_, mesh) in found.items():
        times = {n: estimated(module, mesh.cluster) for n, (module, _) in found.items()}
        assert times[name] <= min(times.values()) * (1 + DEFAULT_GAP)
    near, far = ([*received(*found[name])] for name in LINKS)
    assert any(r.between for r in near) and any(r.within for r in near)
    assert all(isclose(r.between, r.entering) for r in near)
    assert any(r.between for r in far) and not any(r.within for r in far)


def estimated(module: ModuleOp, cluster: Cluster | None) -> float:
    """Return the estimated time of a program on a cluster."""
    return sum(f.seconds for f in report(module, cluster))


class Received(NamedTuple):
    """The bytes that a device receives of a collective, over the links within its node and over
    those between nodes; and the fewest that can enter its node, for each of the node's devices."""

    within: float
    between: float
    entering: float


def received(module: ModuleOp, mesh: Mesh) -> Iterator[Received]:
    """Yield the bytes of each collective, by its form.

    Of n devices on k nodes each receives n - 1 shards. Those of the other nodes, n (k - 1) / k,
    enter a node at least once: k - 1 for each of its n / k devices. In the hierarchical form of an
    all-gather, and reversed of a reduce-scatter, they do so exactly once, and in that of an
    all-reduce, which is one after the other, twice. In all other forms all shards cross the
    outermost links of the group.
    """
    for op in module.walk():
        cost = cost_of(op, mesh) if isinstance(op, dist.CollectiveOp) else None
        if cost is None or not cost.bytes:
            continue
        n, levels = mesh.extent(cost.axes), levels_of(mesh, cost.axes)
        nodes = levels[-1][0] if mesh.level(cost.axes) else 1
        entering = cost.bytes * (nodes - 1) / (n - 1)
        between = cost.bytes if mesh.level(cost.axes) else 0.0
        if cost.form == "hierarchical":
            assert isinstance(op, dist.AllGatherOp | dist.ReduceScatterOp | dist.AllReduceOp)
            between = entering
        yield Received(cost.bytes - between, between, entering)
