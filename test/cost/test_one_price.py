"""One price: the planner, the search and the report estimate the same seconds.

On every ready-made cluster and on a mesh without one, for random layouts and small programs:

1. The planner's seconds are those of the lowered redistribution, and not below its bound.
2. The search's bound <= its objective = the seconds of the lowered program, and no plan that is
   written by hand, lowered, is below the bound. Within a limit of memory too the objective is
   what the lowered program takes.
3. Between layouts of full axes that split a tensor evenly, no path through a third is faster.
4. A result of a strategy moves to its users at no more than with any annotation of its layout; to
   one user, in one redistribution.
5. fuse-communication makes no program slower, and no two collectives that it leaves are faster as
   one.
"""

from dataclasses import replace
from itertools import combinations, pairwise
from math import prod
from random import Random

import pytest
from support.extent import extent, sampled
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp

from shardir import compile, plan_redistribution
from shardir.algebra.bound import seconds_bound
from shardir.algebra.cluster import DEFAULT, Cluster
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.moves import RedistributionProblem
from shardir.cost import memory_of, report
from shardir.cost.clusters import load, names
from shardir.cost.seconds import cost_of
from shardir.dialects.dist import FusibleOp, RedistributeOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.syntax.parser import parse
from shardir.tools import bench

plans, steps, laws = bench.load("plans"), bench.load("random_steps"), bench.load("laws")
program_laws, declared, random_step = bench.load("program_laws"), steps.declared, steps.random_step

SIZES = {
    None: [(2, 2), (5,), (4, 6)],
    "gloo": [(4,), (2, 4), (3, 4)],
    "h100": [(16,), (2, 8)],
    "h200": [(16,), (2, 8), (4, 4)],
    "ascend910": [(8,), (2, 4)],
    "pod2048": [(8, 8), (16, 4), (64,)],
    "shm": [(4,), (2, 4), (3, 4)],
}
"""The axes of meshes without a cluster, and on the first devices of each; those of one axis, and
4 x 4 and 8 x 8, have one that crosses levels. Of 24 devices there are fewer on `gloo` and `shm`."""

CLUSTERS = pytest.mark.parametrize("cluster", sampled([None, *names()], 2))


def meshes(cluster: str | None) -> list[Mesh]:
    def on(devices: int) -> Cluster | None:
        return load(cluster).part(devices) if cluster else None

    return [
        Mesh("m", tuple(zip("ab", sizes, strict=False)), on(prod(sizes)))
        for sizes in SIZES[cluster]
    ]


def random_layout(mesh: Mesh, rank: int, random: Random) -> Layout:
    """Each axis splits a dimension, or is partial, or neither."""
    uses: list[list[Axis]] = [[] for _ in range(rank + 2)]
    for name in random.sample(mesh.names, len(mesh.names)):
        random.choice(uses).append(name)
    *dims, partial, _ = map(tuple, uses)
    return Layout("m", tuple(dims)).with_partial(tuple(sorted(partial, key=mesh.order)), "sum")


def random_shape(mesh: Mesh, random: Random) -> tuple[int, ...]:
    """A shape that all axes together split evenly, or not."""
    each = mesh.size if random.random() < 0.7 else 1
    return tuple(each * random.choice([1, 5, 64]) for _ in range(random.choice([1, 2, 2, 3])))


def lowered(mesh: Mesh, shape: tuple[int, ...], source: Layout, target: Layout) -> float:
    """The seconds of the collectives of one redistribution in the report."""
    t = f"tensor<{'x'.join(map(str, shape))}xf32, #dist.layout<{{}}>>"
    a, b = t.format(source), t.format(target)
    module = compile(
        f"{declared(mesh)}\n"
        f"func.func @f(%x: {a}) -> {b} {{\n"
        f"  %y = dist.redistribute %x : ({a}) -> {b}\n  func.return %y : {b}\n}}",
        "lower-to-spmd",
    ).module
    return sum(c.seconds for f in report(module) for c in f.ops)


def test_clusters() -> None:
    assert set(SIZES) == {None, *names()}
    assert load("gloo") == DEFAULT


@CLUSTERS
def test_the_planner_and_the_report_agree(cluster: str | None) -> None:
    random = Random(str(cluster))
    for _ in range(extent(15, 150)):
        mesh = random.choice(meshes(cluster))
        shape = random_shape(mesh, random)
        source, target = (random_layout(mesh, len(shape), random) for _ in range(2))
        planned = plan_redistribution(shape, "f32", mesh, source, target).seconds
        assert lowered(mesh, shape, source, target) == pytest.approx(planned, rel=1e-9, abs=1e-15)
        problem = RedistributionProblem.of(mesh, shape, source, target)
        minimum = seconds_bound(mesh, shape, problem.source, problem.target, 4)
        assert minimum <= planned * (1 + 1e-9)


@CLUSTERS
def test_no_path_through_a_third_layout_is_faster(cluster: str | None) -> None:
    random = Random(str(cluster))
    for _ in range(extent(150, 25000)):
        mesh = random.choice(meshes(cluster))
        shape = tuple(mesh.size * random.choice([1, 5, 64]) for _ in range(random.choice([1, 2])))
        a, b, c = (random_layout(mesh, len(shape), random) for _ in range(3))

        def seconds(x: Layout, y: Layout, shape=shape, mesh=mesh) -> float:
            return plan_redistribution(shape, "f32", mesh, x, y).seconds

        assert seconds(a, c) <= (seconds(a, b) + seconds(b, c)) * (1 + 1e-9)


def moved(
    mesh: Mesh, n: int, product: tuple[str, str], users: list[str], annotation: str = ""
) -> float:
    """The seconds of the collectives of a product with a strategy, whose result has users."""
    unlaid = f"tensor<{n}x{n}xf32>"
    laid = f"tensor<{n}x{n}xf32, #dist.layout<@m, [{{}}]>>"
    x, w = map(laid.format, product)
    y = laid.format(annotation) if annotation else unlaid
    made = [laid.format(u) for u in users]
    relus = [
        f"  %z{i} = nn.relu %y strategy<(({u}),)> : ({y}) -> {t}"
        for i, (u, t) in enumerate(zip(users, made, strict=True))
    ]
    outs = ", ".join(f"%z{i}" for i in range(len(users)))
    module = compile("\n".join([
        declared(mesh), f"func.func @f(%x: {x}, %w: {w}) -> ({', '.join(made)}) {{",
        f"  %y = nn.matmul %x, %w strategy<(({product[0]}), ({product[1]}))> : ({x}, {w}) -> {y}",
        *relus, f"  func.return {outs} : {', '.join(made)}", "}",
    ]), "propagate-strategies,insert-redistributions").module  # fmt: skip
    if len(users) == 1 and not annotation:
        assert sum(isinstance(op, RedistributeOp) for op in module.walk()) <= 1
    lowered = compile(module, "lower-to-spmd").module
    return sum(c.seconds for f in report(lowered) for c in f.ops if c.communicates)


@CLUSTERS
def test_a_result_of_a_strategy_moves_to_its_users_at_minimum_cost(cluster: str | None) -> None:
    random = Random(str(cluster))
    for _ in range(extent(6, 200)):
        mesh = random.choice(meshes(cluster))
        n = mesh.size * random.choice([1, 16, 64])
        i, k, j = (text(axes) for axes in random_layout(mesh, 3, random).dims)
        users = [
            ", ".join(map(text, random_layout(mesh, 2, random).dims))
            for _ in range(random.choice([1, 1, 2, 3]))
        ]
        product = f"{i}, {k}", f"{k}, {j}"
        inferred = moved(mesh, n, product, users)
        for annotation in dict.fromkeys((f"{i}, {j}", *users)):
            assert inferred <= moved(mesh, n, product, users, annotation) * (1 + 1e-9)


def text(axes: Axes) -> str:
    return f"{{{', '.join(map(str, axes))}}}"


@CLUSTERS
def test_bound_objective_and_lowered_programs_agree(cluster: str | None) -> None:
    """Of random programs, with and without layouts of their arguments."""
    random = Random(str(cluster))
    for _ in range(extent(1, 60)):
        holds(random_step(unlimited(random.choice(meshes(cluster))), random, extent(2, 3)), random)


def test_no_plan_is_below_the_bound_where_an_axis_crosses_levels() -> None:
    """An MLP on 16 devices of two nodes, for which data parallel was a tenth below the bound."""
    mesh = unlimited(Mesh("m", (("d", 16),), load("h200").part(16)))
    holds(program(mesh, 65536, [4096, 4096, 4096]), Random(0))


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_bound_objective_and_lowered_programs_agree_without_latency() -> None:
    """On links without latency a move may cost nothing, and no bucket gains."""
    gloo = load("gloo").part(8)
    levels = tuple([level._replace(latency=0.0) for level in gloo.levels])
    mesh = Mesh("m", (("a", 2), ("b", 4)), replace(gloo, levels=levels))
    for seed in (4, 6):
        _, found = program_laws.searched(parse(random_step(mesh, Random(seed), 1)))
        assert max(found.values()) <= 1 + 1e-9


@pytest.mark.parametrize("cluster, sizes, rows, widths", sampled([
    ("h200", (2, 2), 1024, [1024, 256, 1024]),
    ("h200", (4,), 256, [1024, 256, 256, 4096]),
    ("ascend910", (2, 2), 256, [1024, 256, 256, 4096]),
], 1))  # fmt: skip
def test_objective_and_lowered_programs_agree_within_memory(
    cluster: str, sizes: tuple[int, ...], rows: int, widths: list[int]
) -> None:
    """Of MLPs, with 97 % of the memory of the fastest plan."""
    mesh = unlimited(Mesh("m", tuple(zip("ab", sizes, strict=False)), load(cluster).part(4)))
    step = compile(program(mesh, rows, widths), "inline-calls,distributed-autodiff").module

    def searched(memory: int) -> tuple[float, ModuleOp]:
        options = f"search-strategies{{overlap=false memory={memory}}}"
        plan = compile(step, options).module
        ((f, _),) = bodies(plan)
        return found_by_search(f)["objective"], plan

    _, fastest = searched(1 << 50)
    ((f, _),) = bodies(compile(fastest, "lower-plan").module)
    objective, plan = searched(int(0.97 * memory_of(f, mesh).peak))
    assert program_laws.lowered_seconds(plan) == pytest.approx(objective, rel=1e-9)


def unlimited(mesh: Mesh) -> Mesh:
    """Return a mesh on devices of any memory."""
    return (
        mesh if mesh.cluster is None else replace(mesh, cluster=replace(mesh.cluster, memory=None))
    )


def holds(text: str, random: Random) -> None:
    for claim, ratio in program_laws.claims(text, random).items():
        assert ratio <= 1 + 1e-9, claim


def program(mesh: Mesh, rows: int, widths: list[int]) -> str:
    """The training step of an MLP without annotations."""
    x = f"tensor<{rows}x{widths[0]}xf32>"
    weights = [f"tensor<{m}x{n}xf32>" for m, n in pairwise(widths)]
    made = [f"tensor<{rows}x{n}xf32>" for n in widths[1:]]
    given = [f"%x0: {x} {{train.input = #train.init<normal>}}"]
    given += [
        f'%w{i}: {t} {{train.parameter = "w{i}", train.init = #train.init<normal>}}'
        for i, t in enumerate(weights)
    ]
    body, before = [], x
    for i, (w, y) in enumerate(zip(weights, made, strict=True)):
        body += [f"  %y{i} = nn.matmul %x{i}, %w{i} : ({before}, {w}) -> {y}"]
        body += [f"  %x{i + 1} = nn.relu %y{i} : ({y}) -> {y}"]
        before = y
    body += [f"  %l = nn.reduce <mean> %x{len(made)} dims <0, 1> : ({before}) -> tensor<f32>"]
    return "\n".join([
        declared(mesh),
        f"func.func private @loss({', '.join(given)}) -> tensor<f32> {{", *body,
        "  func.return %l : tensor<f32>", "}", "train.step @step of @loss <sgd, lr = 0.1>",
    ])  # fmt: skip


def collectives(f: FuncOp) -> list[FusibleOp]:
    return [op for op in f.body.block.ops if isinstance(op, FusibleOp)]


def faster_as_one(f: FuncOp, mesh: Mesh) -> list[tuple[FusibleOp, FusibleOp]]:
    """The pairs of equal collectives that may be one, and then make the function faster."""
    at = {op: i for i, op in enumerate(f.body.block.ops)}
    found: list[tuple[FusibleOp, FusibleOp]] = []
    for a, b in combinations(collectives(f), 2):
        types = {unsharded_type(v).element_type for v in (*a.values, *b.values)}
        uses = [at[use.operation] for v in a.results for use in v.uses]
        if type(a) is type(b) and a.properties == b.properties and len(types) == 1 and (
            min(uses, default=len(at)) > at[b]
        ):  # fmt: skip
            one = type(a).create(
                operands=[*a.operands, *b.operands], properties=dict(a.properties),
                result_types=[v.type for v in (*a.results, *b.results)],
            )  # fmt: skip
            f.body.block.insert_op_after(one, b)
            costs = [cost_of(op, mesh) for op in (a, b, one)]
            one.detach()
            first, second, fused = (c.seconds if c else 0.0 for c in costs)
            if fused < (first + second) * (1 - 1e-9):
                found.append((a, b))
    return found


@CLUSTERS
def test_fusing_collectives_never_makes_a_program_slower(cluster: str | None) -> None:
    random = Random(str(cluster))
    for _ in range(extent(2, 60)):
        mesh = random.choice(meshes(cluster))
        widths = [mesh.size * random.choice([1, 2, 16, 64]) for _ in range(random.randint(3, 6))]
        text = program(mesh, mesh.size * random.choice([1, 64]), widths)
        for name in ("data", "zero-3"):
            written = plans.PLANS[name](parse(text))
            module = compile(written, UNFUSED).module
            before = sum(f.seconds for f in report(module))
            for limit in (1 << 40, 1 << 16):
                fused = compile(module, f"fuse-communication{{max_bytes={limit}}}").module
                assert sum(f.seconds for f in report(fused)) <= before * (1 + 1e-9)
                if limit > 1 << 16:
                    assert not [pair for f, _ in bodies(fused) for pair in faster_as_one(f, mesh)]


UNFUSED = (
    "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
    "lower-to-spmd,simplify-communication"
)
