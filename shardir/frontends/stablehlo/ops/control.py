"""Calls, loops and branches: all are inlined. A loop is unrolled; the torch backend writes equal
blocks of ops as a loop again (`outline-blocks`). So the layouts and collectives of its first and
last run may be their own.

A loop whose number of runs depends on values becomes `nn.while`, of which each device computes the
whole, and so does a longer loop around one."""

from collections.abc import Sequence

from shardir.build import Value, nn
from shardir.frontends.stablehlo.form import expression
from shardir.frontends.stablehlo.regions import inlined, of_tensors
from shardir.frontends.stablehlo.translation import HloEntry, OpTranslation
from shardir.frontends.stablehlo.types import is_float

MAX_RUNS = 4096
"""Bounds the runs of a loop."""

MAX_LOOPS = 4
"""Bounds the runs of a loop that is unrolled although each run has a loop whose number of runs
depends on values."""


STOP_GRADIENT = "shardir_stop_gradient"
"""The name of the identity that stands for jax.lax.stop_gradient in a loss."""

RELU = "maximum(0, broadcast_in_dim(0.0))"
"""The body of jax.nn.relu, whose gradient at 0 is not that of a maximum."""


def _call(t: OpTranslation, *operands: Value) -> Sequence[Value]:
    """Return the results of a called function. Calls of functions of JAX, by their names, are the
    ops with their gradients."""
    name = t["callee"] if t["callee"] is not None else t["decomposition"]
    body = t.callee(name)
    if name.startswith(STOP_GRADIENT):
        return [nn.stop_gradient(x) if is_float(x.dtype) else x for x in operands]
    if name.startswith("relu") and expression(body) == RELU:
        return [nn.relu(*operands)]
    return t.run(body, operands)


def _while(t: OpTranslation, *first: Value) -> Sequence[Value]:
    condition, body = t.op.regions
    carried: Sequence[Value] = first
    loops = t.facts.loops
    for value, before, after in zip(carried, body.arguments, body.results, strict=True):
        if before is after:
            t.facts.invariant.add(value.ssa)
    for runs in range(MAX_RUNS):
        (goes_on,) = t.run(condition, carried)
        number = t.number(goes_on)
        if number is None or (runs == MAX_LOOPS and t.facts.loops > loops):
            return t.loop(first)
        if not number:
            place = t.op.location
            t.facts.runs[place] = max(runs, t.facts.runs.get(place, 0))
            return carried
        carried = tuple(t.run(body, carried))
    t.refuse(f"a loop of more than {MAX_RUNS} runs")


def _case(t: OpTranslation, index: Value) -> Sequence[Value]:
    """All branches are computed, and one is selected."""
    regions = t.op.regions
    number = t.number(index)
    if t.op.name == "stablehlo.if":
        regions, number = regions[::-1], None if number is None else int(number)
    if number is not None:  # an index outside of the branches is that of the last one
        return t.run(regions[int(number) if 0 <= number < len(regions) else -1], ())
    branches = [t.run(r, ()) for r in regions]
    results = list(branches[-1])
    for i, branch in reversed([*enumerate(branches[:-1])]):
        is_it = nn.not_(index) if index.dtype == "i1" else nn.compare(index, i, how="eq")
        results = [nn.select(is_it, x, y) for x, y in zip(branch, results, strict=True)]
    return results


def _map(t: OpTranslation, *xs: Value) -> Sequence[Value]:
    """A computation of scalars, of all elements."""
    body = inlined(t.op.regions[0], t.callee)
    if any(op.regions for op in body.ops):
        t.refuse("a computation of elements that has regions")
    return t.run(of_tensors(body, t.shape), xs)


TABLE: dict[str, HloEntry] = {
    "func.call": _call,
    "stablehlo.composite": _call,
    "stablehlo.while": _while,
    "stablehlo.case": _case,
    "stablehlo.if": _case,
    "stablehlo.map": _map,
    "stablehlo.optimization_barrier": lambda t, *xs: xs,
}
