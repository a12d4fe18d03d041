"""Fits a cluster's numbers to measured times.

What is made least is the sum of log(predicted / measured)^2: half and twice the time are as far
off, whatever the time. (By relative errors half is nearer, so where the model has one number for
unlike things, such a fit would take the quickest of them.) The numbers are positive, and of all
sizes, so their logarithms are looked for, by scipy's least squares. Whatever the formulas are, they
are asked and not repeated here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from xdsl.dialects.builtin import ModuleOp

from shardir.algebra.cluster import Cluster
from shardir.algebra.collectives import COLLECTIVES
from shardir.cost.functions import functions, on_cluster
from shardir.cost.schedule import elapsed
from shardir.cost.seconds import OpCost, cost_of
from shardir.cost.terms import Coefficients, Terms

Array = np.ndarray
Predict = Callable[[Cluster], list[float]]
"""The modelled seconds of each measurement on a cluster."""

LEAST = 1e-18
"""For a number that has no influence: 1 EB/s or Eflop/s, or no time at all."""

CALL = 1e-5
"""Where the seconds of a call begin."""

ROUNDS, SETTLED = 30, 1e-6
"""It ends when the numbers, the error or its slope change by less, or after so many rounds."""


@dataclass(frozen=True)
class Fitted:
    """A cluster, the seconds of a call of anything at all, and what the model then says of each
    measurement."""

    cluster: Cluster
    call: float
    predicted: Array


def fit(
    predict: Predict, measured: Sequence[float] | Array, start: Cluster,
    against: Mapping[int, int] | None = None,
) -> Fitted:  # fmt: skip
    """The numbers with which the model comes nearest to what was measured.

    Args:
        start: what is fitted are the numbers that it states, and where they begin; one that is 0
            stays so.
        against: of measurements with something under way those of the same one after the other.
            Their ratios show the interference, by which these come nearest when all else is found,
            and neither counts for anything else.
    """
    y, pairs = np.asarray(measured), dict(against or {})
    beside, apart = list(pairs), list(pairs.values())
    alone = np.setdiff1d(np.arange(len(y)), [*beside, *apart])

    def say(cluster: Cluster, call: float) -> Array:
        seconds = call + np.asarray(predict(cluster))
        seconds[beside] *= y[apart] / seconds[apart]
        return seconds

    x = _nearest(
        lambda x: say(_cluster(start, x[1:]), x[0])[alone],
        np.array([CALL, *_vector(start)]), y[alone],
    )  # fmt: skip
    found, call = _cluster(start, x[1:]), float(x[0])
    if pairs and start.interference:
        (share,) = _nearest(
            lambda share: say(replace(found, interference=float(share[0])), call)[beside],
            np.array([start.interference]), y[beside], most=1.0,
        )  # fmt: skip
        found = replace(found, interference=float(share))
    return Fitted(found, call, say(found, call))


def fit_relative(terms: Sequence[Terms], measured: Sequence[float]) -> Coefficients:
    """The coefficients, in seconds per byte, with which the relative model comes nearest."""
    columns, y = np.array([t.bytes for t in terms], dtype=float), np.asarray(measured)
    start = np.full(4, np.sum(y) / np.sum(columns))
    return Coefficients(*map(float, _nearest(lambda x: columns @ x, start, y)))


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
    if not (kind in COLLECTIVES and COLLECTIVES[kind].reduces):
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


def _nearest(say: Callable[[Array], Array], start: Array, y: Array, most: float = np.inf) -> Array:
    """The numbers, at most `most`, with which what `say` says is nearest to y."""

    def off(z: Array) -> Array:
        return np.log(np.maximum(say(np.exp(z)), LEAST) / y)

    found = least_squares(
        off, np.log(start), bounds=(np.log(LEAST / 2), np.log(most)), xtol=SETTLED, ftol=SETTLED,
        gtol=SETTLED, max_nfev=ROUNDS,
    )  # fmt: skip
    return np.exp(found.x)


def _vector(c: Cluster) -> Array:
    """Latencies, seconds per byte of levels, per flop, per byte of memory, times of collectives,
    overhead."""
    numbers = [l.latency for l in c.levels] + [1 / l.bandwidth for l in c.levels]
    numbers += [1 / rate for _, rate in c.flops]
    if c.memory_bandwidth:
        numbers.append(1 / c.memory_bandwidth)
    numbers += [times for _, times in c.collectives] + [c.overhead]
    return np.maximum(numbers, LEAST)


def _cluster(like: Cluster, x: Array) -> Cluster:
    """The cluster of such numbers."""
    numbers = iter(map(float, x))
    levels = [l._replace(latency=next(numbers)) for l in like.levels]
    levels = tuple(l._replace(bandwidth=1 / next(numbers)) for l in levels)
    flops = tuple((name, 1 / next(numbers)) for name, _ in like.flops)
    memory = 1 / next(numbers) if like.memory_bandwidth else None
    collectives = tuple((name, next(numbers)) for name, _ in like.collectives)
    return replace(
        like, levels=levels, flops=flops, memory_bandwidth=memory, collectives=collectives,
        overhead=next(numbers),
    )  # fmt: skip
