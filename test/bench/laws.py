"""Laws that hold on every ready-made cluster: random cases, violations, the worst ratio.

A law is a function of a cluster's name and a source of random numbers. It draws one tensor or
program, and returns the cases that this has: of each case a ratio for each of its claims, at most 1
where the claim holds. LAWS has them all.

    triangle    planned from A to C, over planned from A to B and from B to C: random layouts over
                sub-axes, split and partial, of tensors with even and uneven shards; the cases of a
                tensor are the 24 triangles of four layouts, whose twelve plans share tables
    programs    the bound of the search, its objective, and the times of lowered programs: random
                programs (random_steps.py), with and without layouts (program_laws.py)
    layers      the same of programs in which some layers are repeated
    uneven      the same objective and times of programs with dimensions that few numbers divide,
                without layouts and with some that split these, also into shards of explicit sizes
    presets     the time of the mode auto, over that of presets, with overlap: random programs and
                products of presets (preset_laws.py)
    memory      plans within a limit of memory, against a mixed-integer linear program
                (memory_laws.py); graphs of 10 to 200 variables, on up to 16 devices

What is drawn is known by its number: `--law triangle --cluster h200 --seed 17 --cases 1` draws
number 17. The first triangle of each tensor is that of the first three layouts.
"""

import time
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from math import perm, prod
from operator import itemgetter
from random import Random
from typing import Any, NamedTuple

from bench import preset_laws, program_laws
from bench.drawn_layouts import random_layout
from bench.random_steps import OPTIMIZERS, random_step
from bench.ratios import ratio
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.redistribution import estimated_seconds
from shardir.cost.clusters import load, names
from shardir.search.graph.candidates import MAX_UNEVEN_AXES
from shardir.syntax.parser import parse

MESHES = {
    "ascend910": [(4,), (8,), (2, 4), (4, 2), (2, 2, 2)],
    "gloo": [(4,), (6,), (8,), (2, 4), (3, 4), (4, 4), (2, 2, 2), (2, 3, 2)],
    "h100": [(8,), (2, 8), (4, 4), (2, 2, 4)],
    "h200": [(8,), (16,), (2, 8), (4, 4), (2, 2, 4), (8, 8)],
    "pod2048": [(8,), (32,), (8, 4), (8, 8), (4, 16), (2, 2, 8)],
    "shm": [(4,), (6,), (2, 4), (3, 4), (2, 2, 2)],
}
"""The axes of meshes on the first devices of each cluster; some cross its levels."""

Ratios = dict[str, float]
"""A ratio of each claim about one case, at most 1 where it holds."""

TOLERANCE = 1e-9
"""The relative difference by which sums of the same terms differ."""


ALL_OPTIMIZERS = [*OPTIMIZERS, "adafactor, lr = 0.1"]

MAX_LAYERS = 6
"""The layers of random programs, at most."""

MAX_PRODUCTS = 6
"""The products of presets that a program is compared with, at most."""

PROGRESS = 50
"""After this many draws the progress is reported."""

LAYOUTS = 4
"""The layouts of one tensor between which all redistributions are planned."""


def random_mesh(cluster: str, random: Random) -> Mesh:
    sizes = random.choice(MESHES[cluster])
    return Mesh("m", tuple(zip("abc", sizes, strict=False)), load(cluster).part(prod(sizes)))


def random_shape(mesh: Mesh, random: Random) -> Shape:
    """A shape that all axes together split evenly, or any."""
    rank, even = random.choice([1, 2, 2, 2, 3]), random.random() < 0.7
    some = [1, 16, 500] if even else [1, 7, 100, 5000]
    return tuple((mesh.size if even else 1) * random.choice(some) for _ in range(rank))


def triangles(cluster: str, random: Random) -> list[Ratios]:
    mesh = random_mesh(cluster, random)
    shape = random_shape(mesh, random)
    layouts = [random_layout(mesh, len(shape), random) for _ in range(LAYOUTS)]
    found = list[Ratios]()
    for a, b, c in permutations(layouts, 3):
        direct = estimated_seconds(shape, mesh, a, c, 4)
        detour = sum(estimated_seconds(shape, mesh, x, y, 4) for x, y in ((a, b), (b, c)))
        found.append({"triangle": ratio(direct, detour)})
    return found


class Law(NamedTuple):
    """A law, the number of its cases on each cluster, and that of each draw."""

    draw: Callable[[str, Random], list[Ratios]]
    cases: int
    each: int = 1


def programs(cluster: str, random: Random) -> list[Ratios]:
    mesh = unlimited(random_mesh(cluster, random))
    text = random_step(mesh, random, random.randint(1, MAX_LAYERS), ALL_OPTIMIZERS)
    return [program_laws.claims(text, random)]


def layers(cluster: str, random: Random) -> list[Ratios]:
    mesh, times = unlimited(random_mesh(cluster, random)), random.randint(3, 5)
    text = random_step(mesh, random, random.randint(1, 3), ALL_OPTIMIZERS, times)
    return [program_laws.claims(text, random)]


def uneven(cluster: str, random: Random) -> list[Ratios]:
    mesh = unlimited(random_mesh(cluster, random))
    while len(mesh.names) > MAX_UNEVEN_AXES:
        mesh = unlimited(random_mesh(cluster, random))
    text = random_step(mesh, random, random.randint(1, 4), ALL_OPTIMIZERS, nearly=True)
    return [program_laws.uneven_claims(text, random)]


def unlimited(mesh: Mesh) -> Mesh:
    """Return a mesh on devices of any memory."""
    assert mesh.cluster is not None
    return replace(mesh, cluster=replace(mesh.cluster, memory=None))


def presets(cluster: str, random: Random) -> list[Ratios]:
    text = random_step(random_mesh(cluster, random), random, random.randint(1, 3), OPTIMIZERS)
    module = parse(text)
    every = preset_laws.existing(module)
    some = random.sample(every, min(MAX_PRODUCTS, len(every)))
    found: Ratios = {}
    for claim, value in preset_laws.claims(module, some):
        found[claim] = max(value, found.get(claim, 0.0))
    return [found]


def memory(cluster: str, random: Random) -> list[Ratios]:
    from bench.memory_laws import claims  # requires scipy

    mesh = random_mesh(cluster, random)
    while len(mesh.names) > 2 or mesh.size > 16:
        mesh = random_mesh(cluster, random)
    return [claims(random_step(mesh, random, random.randint(1, 3)), random)]


LAWS = {
    "triangle": Law(triangles, 1200, perm(LAYOUTS, 3)),
    "programs": Law(programs, 250),
    "layers": Law(layers, 100),
    "uneven": Law(uneven, 100),
    "presets": Law(presets, 100),
    "memory": Law(memory, 50),
}


CLUSTERS = names()
SMOKE = {
    "LAWS": {name: LAWS[name]._replace(cases=1) for name in ("triangle", "programs", "presets")},
    "CLUSTERS": ["gloo"], "MAX_LAYERS": 1,
}  # fmt: skip


def check(
    name: str, cluster: str, numbers: Sequence[int], log: Callable[[str], object]
) -> list[dict[str, Any]]:
    """Return a record of each claim of a law on a cluster, for the cases of these draws."""
    start, found = time.process_time(), dict[str, list[tuple[float, int]]]()
    for count, i in enumerate(numbers, 1):
        for case in LAWS[name].draw(cluster, Random(f"{name} {cluster} {i}")):
            for claim, value in case.items():
                found.setdefault(claim, []).append((value, i))
                if value > 1 + TOLERANCE:
                    log(f"{name} on {cluster}: number {i} violates {claim}: {value:.6g}")
        if count % PROGRESS == 0:
            log(f"{name} on {cluster}: {count} of {len(numbers)} draws")
    spent, records = time.process_time() - start, []
    for claim, ratios in found.items():
        worst, number = max(ratios, key=itemgetter(0))
        records.append({
            "law": name,
            "cluster": cluster,
            "claim": claim,
            "drawn": len({i for _, i in ratios}),
            "cases": len(ratios),
            "violations": sum(r > 1 + TOLERANCE for r, _ in ratios),
            "worst": worst,
            "worst number": number,
            "CPU s": spent,
        })  # fmt: skip
    return records


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected at least 1 case, got {text}")
    return int(text)


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument("--law", choices=list(LAWS), help="only this law")
    parser.add_argument("--cluster", choices=names(), help="only this cluster")
    parser.add_argument(
        "--cases",
        type=_positive,
        metavar="N",
        help="the cases of each law on each cluster, at least",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="the number of the first draw (default: 0)"
    )


def records(
    log: Callable[[str], object],
    law: str | None = None,
    cluster: str | None = None,
    cases: int | None = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One record per law, cluster and claim: law, cluster, claim, drawn (tensors or programs),
    cases, violations, worst (ratio), worst number (of its draw), CPU s (of the law). Of each law
    there are at least so many cases."""
    found = []
    for name in [law] if law else LAWS:
        draws = -(-(LAWS[name].cases if cases is None else cases) // LAWS[name].each)
        numbers = range(seed, seed + draws)
        for one in [cluster] if cluster else CLUSTERS:
            found += check(name, one, numbers, log)
    return found
