"""Fits a cluster's numbers to measured times.

The time model is linear in the reciprocals of rates, in latencies and in the overhead, piece by
piece: which piece holds says the roofline's maximum and the minimum over a collective's forms.
(Interference alone, a share of a collective's seconds, is a factor of others.) So its tangent at
some numbers is the model there, or next to it, and the best numbers by that are those of a linear
least-squares problem, nonnegative (Lawson and Hanson, 1974); from there again, until it stays.
Whatever the formulas are, they are asked and not repeated here.

What is made least is the mean of log(predicted / measured)^2: half and twice the time are as far
off, whatever the time. (By relative errors half is nearer, so where the model has one number for
unlike things, such a fit would take the quickest of them.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import nnls
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Cluster
from shardir.cost.functions import functions, on_cluster
from shardir.cost.schedule import elapsed
from shardir.cost.seconds import OpCost, cost_of
from shardir.cost.terms import REDUCTIONS, Coefficients, Terms

Array = np.ndarray
Predict = Callable[[Cluster], Sequence[float]]
"""The modelled seconds of each measurement on a cluster."""

ROUNDS = 30
SLOPE = 1e-6
"""How far, relatively, a number is moved to see its slope."""

SETTLED = 1e-6
"""When the error falls by less, relatively, it has fallen."""

LEAST = 1e-18
"""For a number that has no influence: 1 EB/s or Eflop/s, or no time at all."""


@dataclass(frozen=True)
class Fitted:
    """A cluster, the seconds of a call of anything at all, and what the model then says of each
    measurement."""

    cluster: Cluster
    call: float
    predicted: Array


def fit(predict: Predict, measured: Sequence[float] | Array, start: Cluster) -> Fitted:
    """The numbers with which the model comes nearest to what was measured.

    Args:
        start: what is fitted are the numbers that it states, and where they begin.
    """
    y = np.asarray(measured)

    def slopes(x: Array) -> Array:
        return np.column_stack([_slopes(predict, start, x[:-1]), np.ones_like(y)])

    def say(x: Array) -> Array:
        return np.asarray(predict(_cluster(start, x[:-1]))) + x[-1]

    x = _least(slopes, say, np.append(_vector(start), LEAST), y)
    return Fitted(_cluster(start, x[:-1]), float(x[-1]), say(x))


def fit_relative(terms: Sequence[Terms], measured: Sequence[float]) -> Coefficients:
    """The coefficients, in seconds per byte, with which the relative model comes nearest."""
    columns, y = np.array([t.bytes for t in terms], dtype=float), np.asarray(measured)
    start = np.full(4, np.sum(y) / np.sum(columns))
    return Coefficients(*map(float, _least(lambda x: columns, lambda x: columns @ x, start, y)))


def terms_of(module: ModuleOp) -> list[Terms]:
    """What the functions of a module in the local view have of each term: an all-reduce over all
    devices as if it were of gradients, other reductions as within an op, other collectives as
    between ops."""
    found = []
    for f, mesh in functions(module):
        mesh, row = on_cluster(mesh, None), [0, 0, 0, 0]
        for cost in (c for op in f.body.block.ops if (c := cost_of(op, mesh)) is not None):
            row[_term(cost, mesh.extent(cost.axes) == mesh.size)] += cost.bytes
        found.append(Terms(*row))
    return found


def _term(cost: OpCost, everywhere: bool) -> int:
    """To which of the four terms an op's bytes belong."""
    if not cost.communicates:
        return 0
    kind = cost.op.name.removeprefix("dist.")
    if kind not in REDUCTIONS:
        return 2
    return 3 if kind == "all_reduce" and everywhere else 1


def of_functions(module: ModuleOp) -> Predict:
    """What the model says of the functions of a module in the local view, in their order."""
    found = [(list(f.body.block.ops), mesh) for f, mesh in functions(module)]

    def predict(cluster: Cluster) -> list[float]:
        meshes = [on_cluster(mesh, cluster) for _, mesh in found]
        return [
            elapsed((c for op in ops if (c := cost_of(op, mesh)) is not None), mesh)
            for (ops, _), mesh in zip(found, meshes, strict=True)
        ]

    return predict


def _least(
    slopes: Callable[[Array], Array], say: Callable[[Array], Array], x: Array, y: Array
) -> Array:
    """The numbers, none of them negative, with which what `say` says is nearest to y: by its
    tangent, from x on."""
    columns, predicted = slopes(x), np.maximum(say(x), LEAST)
    rest = predicted - columns @ x
    best, least = x, np.inf
    for _ in range(ROUNDS):
        weights = _weights(predicted, y)
        x = np.maximum(nnls(columns * weights[:, None], (y - rest) * weights)[0], LEAST)
        predicted = np.maximum(say(x), LEAST)
        error = float(np.mean(np.log(predicted / y) ** 2))
        settled = least - error < SETTLED * (SETTLED + error)
        if error < least:
            best, least = x, error
        if not np.allclose(columns @ x + rest, predicted, rtol=SLOPE, atol=0):
            columns = slopes(x)
            rest = predicted - columns @ x
        elif settled:
            break
    return best


def _weights(p: Array, y: Array) -> Array:
    """Those with which least squares pull as the squared logarithms do: d/dp log(p / y)^2 is
    2 w^2 (p - y)."""
    off = p / y - 1
    near = np.abs(off) < SLOPE
    off[near] = 1.0
    return np.where(near, 1.0, np.sqrt(np.log1p(off) / off)) / np.sqrt(p * y)


def _slopes(predict: Predict, start: Cluster, x: Array) -> Array:
    """How fast each prediction grows with each number."""
    here = np.asarray(predict(_cluster(start, x)))
    columns = []
    for i, n in enumerate(x):
        moved = x.copy()
        moved[i] = n * (1 + SLOPE)
        columns.append((np.asarray(predict(_cluster(start, moved))) - here) / (moved[i] - n))
    return np.column_stack(columns)


def _vector(c: Cluster) -> Array:
    """Latencies, seconds per byte of levels, per flop, per byte of memory, interference,
    overhead."""
    numbers = [l.latency for l in c.levels] + [1 / l.bandwidth for l in c.levels]
    numbers += [1 / rate for _, rate in c.flops]
    if c.memory_bandwidth:
        numbers.append(1 / c.memory_bandwidth)
    if c.interference:
        numbers.append(c.interference)
    return np.maximum(np.array([*numbers, c.overhead]), LEAST)


def _cluster(like: Cluster, x: Array) -> Cluster:
    """The cluster of such numbers."""
    numbers = iter(map(float, x))
    levels = [l._replace(latency=next(numbers)) for l in like.levels]
    levels = tuple(l._replace(bandwidth=1 / next(numbers)) for l in levels)
    flops = tuple((name, 1 / next(numbers)) for name, _ in like.flops)
    memory = 1 / next(numbers) if like.memory_bandwidth else None
    interference = min(next(numbers), 1.0) if like.interference else 0.0
    return replace(
        like, levels=levels, flops=flops, memory_bandwidth=memory, overhead=next(numbers),
        interference=interference,
    )  # fmt: skip
