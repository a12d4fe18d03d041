"""The fit of a cluster's parameters to measured times.

The objective is the sum of log(predicted / measured)^2: half and twice the time are equal errors,
whatever the time. (With relative errors half is better, so where the model has one parameter for
different things, the fit would choose the fastest of them.) The parameters are positive, and of all
magnitudes, so their logarithms are fitted, by scipy's least squares. The model is called, so no
formula is repeated here. The occupancy is no fit: it is measured.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import least_squares
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster
from shardir.algebra.collectives import COLLECTIVES
from shardir.algebra.mesh import Mesh
from shardir.cost.functions import functions, on_cluster
from shardir.cost.schedule import elapsed
from shardir.cost.seconds import OpCost, Work, works_of
from shardir.cost.terms import Coefficients, Terms
from shardir.dialects.nn.base import Array

Predict = Callable[[Cluster], list[float]]
"""The modelled seconds of each measurement on a cluster."""

NEGLIGIBLE = 1e-18
"""The seconds of a parameter without influence: 1 EB/s or Eflop/s, or no latency."""

CALL = 1e-5
"""The start value of the seconds of a call."""

REACH = np.log(1e6)
"""How far a parameter is moved to see whether a measurement depends on it."""

MAX_EVALUATIONS, TOLERANCE = 30, 1e-6
"""The fit ends when the parameters, the error or its slope change by less than the tolerance."""


@dataclass(frozen=True)
class Fitted:
    """A cluster, the fixed seconds of a call, and the predicted seconds of each measurement."""

    cluster: Cluster
    call: float
    predicted: Array


def fit(
    predict: Predict, measured: Sequence[float] | Array, start: Cluster,
    against: Mapping[int, int] | None = None, called: Sequence[bool] | None = None,
    at_work: Mapping[int, float] | None = None,
) -> Fitted:  # fmt: skip
    """Return the cluster for which the model is closest to the measurements.

    Args:
        start: the start values; a parameter that it lacks is not fitted, and one that is 0 stays 0.
        against: from measurements with a collective in flight to those of the same ops one after
            the other. The interference is fitted last, to their ratios; they count for nothing
            else.
        at_work: of some of them, of small values, the seconds in which a device is itself at work
            in the collective. The median of their shares of its time is the occupancy.
        called: which of the measurements are of calls, by default all; others are of ops.
    """
    y, pairs = np.asarray(measured), dict(against or {})
    beside, apart = list(pairs), list(pairs.values())
    of_call = np.ones(len(y)) if called is None else np.asarray(called, dtype=float)
    alone = np.setdiff1d(np.arange(len(y)), [*beside, *apart])

    def seconds_of(cluster: Cluster, call: float) -> Array:
        seconds = call * of_call + np.asarray(predict(cluster))
        seconds[beside] *= y[apart] / seconds[apart]
        return seconds

    x = _nearest(
        lambda x: seconds_of(_cluster(start, x[1:]), x[0])[alone],
        np.array([CALL, *_vector(start)]), y[alone],
    )  # fmt: skip
    found, call = _cluster(start, x[1:]), float(x[0])
    if at_work:
        modelled = predict(replace(found, skew=0.0))  # for the last device no other is at work
        shares = [s / modelled[i] for i, s in at_work.items()]
        found = replace(found, occupancy=min(1.0, float(np.median(shares))))
    if pairs and start.interference:
        (share,) = _nearest(
            lambda share: seconds_of(replace(found, interference=float(share[0])), call)[beside],
            np.array([start.interference]), y[beside], most=1.0,
        )  # fmt: skip
        found = replace(found, interference=float(share))
    return Fitted(found, call, seconds_of(found, call))


def fit_relative(terms: Sequence[Terms], measured: Sequence[float]) -> Coefficients:
    """Return the coefficients, in seconds per byte, for which the relative model is closest."""
    columns, y = np.array([t.bytes for t in terms], dtype=float), np.asarray(measured)
    start = np.full(4, np.sum(y) / np.sum(columns))
    return Coefficients(*map(float, _nearest(lambda x: columns @ x, start, y)))


def terms_of(module: ModuleOp, ops: Sequence[str] = ()) -> list[Terms]:
    """Return the terms of each function of a module in the local view, and then of the ops of these
    names (see `of_functions`).

    An all-reduce over all devices counts as one of gradients, other reductions as within an op,
    other collectives as between ops.
    """
    found = []
    called, apart = _measured(module, ops)
    for group, mesh in [*called, *(([op], mesh) for op, mesh in apart)]:
        mesh, row = on_cluster(mesh, None), [0, 0, 0, 0]
        for cost in (w.cost(mesh) for w in works_of(group, mesh)):
            row[_term(cost, mesh.extent(cost.axes) == mesh.size)] += cost.bytes
        found.append(Terms(*row))
    return found


def _measured(
    module: ModuleOp, names: Sequence[str]
) -> tuple[list[tuple[list[Operation], Mesh]], list[tuple[Operation, Mesh]]]:
    """Return the ops of each function, with its mesh, but for a function that has ops by the names
    of their results, of which these are measured; and these."""
    places, called, found = {name: i for i, name in enumerate(names)}, [], {}
    for f, mesh in functions(module):
        ops = list(f.body.block.ops)
        mine = {op.results[0].name_hint: op for op in ops if op.results}
        if mine.keys() >= places.keys() and places:
            found = {name: (mine[name], mesh) for name in names}
        else:
            called.append((ops, mesh))
    return called, [found[name] for name in names]


def _term(cost: OpCost, everywhere: bool) -> int:
    """Return the index of the term that an op's bytes belong to."""
    if not cost.axes:
        return 0
    kind = cost.op.name.removeprefix("dist.")
    if not (kind in COLLECTIVES and COLLECTIVES[kind].reduces):
        return 2
    return 3 if kind == "all_reduce" and everywhere else 1


def of_functions(
    module: ModuleOp, ops: Sequence[str] = (), exposed: Sequence[bool] = ()
) -> Predict:
    """Return the model of the functions of a module in the local view, in their order, and then of
    the ops whose results have these names, in place of the function that has them.

    Args:
        exposed: of which functions it is that of what they take beyond their computation; by
            default of none.
    """
    called, apart = _measured(module, ops)
    parts = exposed or [False] * len(called)
    meshes = {mesh for _, mesh in (*called, *apart)}
    counted: dict[tuple[int, ...], tuple[list[list[Work]], list[Work]]] = {}
    """The work of each function and op, by the units of the cluster: it depends on nothing else of
    it."""

    def predict(cluster: Cluster) -> list[float]:
        on = {mesh: on_cluster(mesh, cluster) for mesh in meshes}
        if cluster.units not in counted:
            counted[cluster.units] = (
                [list(works_of(group, on[mesh])) for group, mesh in called],
                [work for op, mesh in apart for work in works_of([op], on[mesh])],
            )
        calls, alone = counted[cluster.units]
        seconds = list[float]()
        for works, (_, mesh), part in zip(calls, called, parts, strict=True):
            costs = [w.cost(on[mesh]) for w in works]
            computed = sum(c.seconds for c in costs if not c.communicates) if part else 0.0
            seconds.append(elapsed(costs, on[mesh]) - computed)
        costs = (w.cost(on[mesh]) for w, (_, mesh) in zip(alone, apart, strict=True))
        return [*seconds, *(cost.seconds for cost in costs)]

    return predict


def _nearest(
    model: Callable[[Array], Array], start: Array, y: Array, most: float = np.inf
) -> Array:
    """Return the parameters, at most `most`, for which `model` is closest to y. One that no
    measurement depends on keeps its start value: else it would drift."""
    begin = np.log(start)

    def error(z: Array) -> Array:
        return np.log(np.maximum(model(np.exp(z)), NEGLIGIBLE) / y)

    at_start = error(begin)

    def counts(i: int) -> bool:
        trials = (np.where(np.arange(len(begin)) == i, begin + d, begin) for d in (REACH, -REACH))
        return any((error(np.minimum(z, np.log(most))) != at_start).any() for z in trials)

    def at(some: Array) -> Array:
        z = begin.copy()
        z[free] = some
        return z

    free = [i for i in range(len(begin)) if counts(i)]
    found = least_squares(
        lambda some: error(at(some)), begin[free], bounds=(np.log(NEGLIGIBLE / 2), np.log(most)),
        xtol=TOLERANCE, ftol=TOLERANCE, gtol=TOLERANCE, max_nfev=MAX_EVALUATIONS,
    )  # fmt: skip
    return np.exp(at(found.x))


def _vector(c: Cluster) -> Array:
    """Return the parameters: latencies, seconds per byte of levels, per flop and per byte of
    memory, factors of collectives, of their bytes and of ops, overhead, seconds per byte of
    operands, skew."""
    numbers = [l.latency for l in c.levels] + [1 / l.bandwidth for l in c.levels]
    numbers += [1 / rate for _, rate in c.flops]
    if c.memory_bandwidth:
        numbers.append(1 / c.memory_bandwidth)
    numbers += [times for _, times in c.collectives + c.bytes + c.ops] + [c.overhead]
    numbers += [*(1 / rate for _, rate in c.operands), c.skew]
    return np.maximum(numbers, NEGLIGIBLE)


def _cluster(like: Cluster, x: Array) -> Cluster:
    """Return the cluster with these parameters."""
    numbers = iter(map(float, x))
    levels = [l._replace(latency=next(numbers)) for l in like.levels]
    levels = tuple(l._replace(bandwidth=1 / next(numbers)) for l in levels)
    flops = tuple((name, 1 / next(numbers)) for name, _ in like.flops)
    memory = 1 / next(numbers) if like.memory_bandwidth else None
    collectives = tuple((name, next(numbers)) for name, _ in like.collectives)
    bytes = tuple((name, next(numbers)) for name, _ in like.bytes)
    ops = tuple((name, next(numbers)) for name, _ in like.ops)
    return replace(
        like, levels=levels, flops=flops, memory_bandwidth=memory, collectives=collectives,
        bytes=bytes, ops=ops, overhead=next(numbers),
        operands=tuple((name, 1 / next(numbers)) for name, _ in like.operands), skew=next(numbers),
    )  # fmt: skip
