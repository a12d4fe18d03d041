"""The law of programs: no plan is below the search's bound, and the objective is what is spent.

Of a training step without annotations, and of the same step with random layouts of its arguments:

    bound <= objective       of the search
    objective = lowered      the time of the lowered program, in the report, one op after the other
    bound <= written         the same time of plans that are written down: data parallel, ZeRO-3,
                             and random layouts of the arguments; propagation completes them
    free <= annotated        the bound without annotations, and the objective with some
"""

from itertools import pairwise
from random import Random

from xdsl.dialects.builtin import ModuleOp

from bench.plans import PLANS, laid_out, seconds
from bench.ratios import ratio
from shardir import compile
from shardir.algebra.layout import Shape
from shardir.algebra.mesh import Axes, Mesh, SizedAxes
from shardir.analysis.functions import mesh_of, values
from shardir.cost import report
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import found_by_search
from shardir.syntax.parser import parse

SEARCH = "inline-calls,distributed-autodiff,search-strategies"
AFTERWARDS = (
    "insert-redistributions,recompute,lower-to-spmd,simplify-communication,fuse-communication"
)

COMPLETION = "inline-calls,propagate-strategies"
COMPLETED = "insert-redistributions,distributed-autodiff," + AFTERWARDS.partition(",")[2]
"""The passes that give a written plan all of its layouts, and those after them."""


def random_rule(random: Random):
    """Return a rule by which each axis splits a dimension of an argument evenly, or none."""

    def rule(mesh: Mesh, shape: Shape) -> tuple[Axes, ...]:
        dims: list[Axes] = [() for _ in shape]
        for axis in mesh.names:
            d = random.randrange(-1, len(shape))
            if d >= 0 and shape[d] % mesh.extent((*dims[d], axis)) == 0:
                dims[d] = (*dims[d], axis)
        return tuple(map(mesh.simplify, dims))

    return rule


def uneven_rule(random: Random):
    """Return a rule by which an axis splits a dimension of an argument, or none, whether its size
    divides it or not; sometimes into shards of explicit sizes."""

    def rule(mesh: Mesh, shape: Shape) -> tuple[Axes, ...]:
        dims: list[Axes] = [() for _ in shape]
        for axis in mesh.names:
            d = random.randrange(-1, len(shape))
            if d >= 0 and shape[d] >= 2 * mesh.size:
                dims[d] = (*dims[d], axis)
        dims = [*map(mesh.simplify, dims)]
        for d, axes in enumerate(dims):
            if axes and random.random() < 0.2:
                cuts = sorted(random.sample(range(1, shape[d]), mesh.extent(axes) - 1))
                sizes = tuple(b - a for a, b in pairwise([0, *cuts, shape[d]]))
                dims[d] = SizedAxes(axes, sizes)
        return tuple(dims)

    return rule


def searched(module: ModuleOp) -> tuple[dict[str, float], dict[str, float]]:
    """Return the figures of a search, and the ratios of the claims about them."""
    plan = compile(module, SEARCH).module
    ((f, _),) = bodies(plan)
    found = found_by_search(f)
    objective, spent = found["objective"], lowered_seconds(plan)
    return found, {
        "bound <= objective": ratio(found["bound"], objective),
        "objective = lowered": max(ratio(objective, spent), ratio(spent, objective)),
    }


def lowered_seconds(plan: ModuleOp) -> float:
    """Return the time of the lowered program of a plan, one op after the other."""
    lowered = compile(plan, "lower-plan{nearest=true}").module
    return sum(op.seconds for f in report(lowered) for op in f.ops)


def is_considered(completed: ModuleOp) -> bool:
    """Whether the search considers plans like one with all of its layouts: all axes split evenly
    and with all of their devices, and no op has a dimension split along which it moves elements."""
    ((f, block),) = bodies(completed)
    mesh = mesh_of(f, completed)
    assert mesh is not None
    laid = {v: l for v in values(block) if (l := layout_of(v)) is not None}
    if any(
        not l.even(mesh, unsharded_type(v).get_shape()) or any(a.size for a in l.used)
        for v, l in laid.items()
    ):
        return False
    for op in block.ops:
        if isinstance(op, TensorOp):
            factors = op.factors()
            moved = factors.moved | factors.sliding | factors.replicate
            for v, dims in zip(
                (*op.operands, *op.results), (*factors.operands, *factors.results), strict=True
            ):
                if v in laid and any(
                    axes and moved.intersection(names)
                    for axes, names in zip(laid[v].dims, dims, strict=True)
                ):
                    return False
    return True


def claims(text: str, random: Random) -> dict[str, float]:
    """Return the ratio of each claim for a program and its plans."""
    module = parse(text)
    free, found = searched(module)
    written = {name: PLANS[name](module) for name in ("data", "zero-3")}
    rule = random_rule(random)
    annotated = written["annotated"] = laid_out(module, rule, rule)
    spent = {}
    for name, plan in written.items():
        completed = compile(plan, COMPLETION).module
        if is_considered(completed):
            spent[name] = seconds(completed, COMPLETED)
    for name, each in spent.items():
        found[f"bound <= {name}"] = ratio(free["bound"], each)
    limited, more = searched(annotated)
    found |= {f"{name}, annotated": each for name, each in more.items()}
    if "annotated" in spent:
        found["bound <= written, annotated"] = ratio(limited["bound"], spent["annotated"])
    found["free <= annotated"] = ratio(free["bound"], limited["objective"])
    return found


def uneven_claims(text: str, random: Random) -> dict[str, float]:
    """Return the ratio of each claim for a program of uneven dimensions, and for the same with
    layouts that split some of them."""
    module = parse(text)
    _, found = searched(module)
    rule = uneven_rule(random)
    _, more = searched(laid_out(module, rule, rule))
    return found | {f"{name}, annotated": each for name, each in more.items()}
