"""search-mesh: against every mesh, and the links that a plan's bytes cross."""

from itertools import product
from math import isclose

import pytest
from extent import extent
from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.forms import levels_of
from shardir.cost.seconds import cost_of
from shardir.dialects import dist
from shardir.dialects.dist import layout_of
from shardir.passes import PASSES
from shardir.passes.search_mesh import SearchMesh
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.search.meshes import shapes
from shardir.syntax.parser import parse
from shardir.tools import bench

search, programs = bench.load("search"), bench.load("programs")

NODES = 4, 2
FAST, SLOW = "{bandwidth = 1e+11, latency = 1e-06}", "{bandwidth = 1e+10, latency = 1e-05}"
LINKS = {"near is fast": (FAST, SLOW), "far is fast": (SLOW, FAST)}


def gpt(nodes: tuple[int, int], links: tuple[str, str], **sizes: int) -> str:
    return on_cluster(search.gpt(layers=1, **sizes), nodes, links)


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
LARGE = {"batch": 8, "seq": 128, "hidden": 512, "heads": 8, "vocab": 1024}


def objective(module: ModuleOp) -> float:
    """Return the estimated time of the plan of search-strategies."""
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
CHOICES = [*product(PROGRAMS, (1, 2, 3), LINKS)]
CHOICES = extent([c for c in CHOICES if c[0] == "mlp" or c[1] == 1] + [CHOICES[2]], CHOICES)


@pytest.mark.parametrize(("program", "axes", "links"), CHOICES, ids=str)
def test_no_mesh_of_all_is_better(program: str, axes: int, links: str):
    """Of 8, 2 x 4, 4 x 2 and 2 x 2 x 2, those of at most `axes` axes."""
    text = on_cluster(PROGRAMS[program], NODES, LINKS[links])
    names = [", ".join(f"x{i} = {n}" for i, n in enumerate(shape)) for shape in [*shapes(8, axes)]]
    fastest = min(objective(parse(text.replace("d = 8", mesh))) for mesh in names)
    module = parse(text)
    SearchMesh(axes=axes).apply(Context(), module)
    assert isclose(objective(module), fastest)


@pytest.mark.parametrize("links", LINKS.values(), ids=LINKS)
def test_most_bytes_cross_fast_links(links: tuple[str, str], capfd: pytest.CaptureFixture[str]):
    """Two nodes of four: tensor parallel within, data parallel across; the other way round where
    nodes are nearer to each other than the devices of one."""
    module = parse(gpt(NODES, links, **LARGE))
    SearchMesh().apply(Context(), module)
    assert "search-mesh: @m <" in capfd.readouterr().err
    objective(module)
    for name in ("insert-redistributions", "lower-to-spmd", "simplify-communication"):
        PASSES[name]()().apply(Context(), module)
    received = by_level(module)
    fast = links.index(FAST)
    assert received[fast] > 2 * received[1 - fast]


def by_level(module: ModuleOp) -> list[float]:
    """Return the bytes that a device receives within its node, and from the other node.

    A hierarchical all-gather crosses nodes with one shard for each other node, and the rest stays
    within; so does a reduce-scatter, reversed. All other forms send everything over the outermost
    links that the group spans.
    """
    found = [0.0, 0.0]
    for op in module.walk():
        if not isinstance(op, dist.CollectiveOp) or (layout := layout_of(op.results[0])) is None:
            continue
        mesh = dist.find_mesh(op, layout.mesh)
        cost = cost_of(op, mesh)
        assert cost is not None
        levels = levels_of(mesh, op.axes.data)
        if not levels or not cost.bytes:
            continue
        outer = mesh.level(op.axes.data)
        share = 1.0
        if cost.form == "hierarchical":
            assert isinstance(op, dist.AllGatherOp | dist.ReduceScatterOp), op.name
            n, nodes = mesh.extent(op.axes.data), levels[-1][0]
            share = (nodes - 1) / (n - 1)
        found[outer] += cost.bytes * share
        found[0] += cost.bytes * (1 - share)
    return found
