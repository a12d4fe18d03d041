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
from xdsl.dialects.builtin import ModuleOp
from xdsl.ir import Operation

from shardir.algebra.arrays import Indices
from shardir.algebra.cluster import Cluster
from shardir.algebra.collectives import COLLECTIVES
from shardir.algebra.mesh import Mesh
from shardir.cost.functions import functions, on_cluster
from shardir.cost.schedule import seconds_in_order
from shardir.cost.seconds import OpCost, Work, works_of
from shardir.cost.terms import Coefficients, Terms
from shardir.dialects.nn.base import Array

Predict = Callable[[Cluster, Sequence[int]], list[float]]
"""The modelled seconds of some measurements, by their numbers, on a cluster."""

Model = Callable[[Array, Indices], Array]
"""The same for some parameters."""

NEGLIGIBLE = 1e-18
"""The seconds of a parameter without influence: 1 EB/s or Eflop/s, or no latency."""

REACH = np.log(1e6)
"""How far a parameter is moved to see whether a measurement depends on it."""

STEP = 1.5e-8
"""The relative step of a slope: the root of the rounding of a float."""

MAX_EVALUATIONS, TOLERANCE = 30, 1e-6
"""The fit ends when the parameters, the error or its slope change by less than the tolerance."""


@dataclass(frozen=True)
class Fitted:
    """A cluster, and the predicted seconds of each measurement."""

    cluster: Cluster
    predicted: Array


def fit(
    predict: Predict, measured: Sequence[float] | Array, start: Cluster,
    against: Mapping[int, int] | None = None, at_work: Mapping[int, float] | None = None,
) -> Fitted:  # fmt: skip
    """Return the cluster for which the model is closest to the measurements.

    Args:
        measured: seconds; one of 0 is of no more work than its marks, and counts for nothing.
        start: the start values; a parameter that it lacks is not fitted, and one that is 0 stays 0.
        against: from measurements with a collective in flight to those of the same ops one after
            the other. The interference is fitted last, to their ratios; they count for nothing
            else.
        at_work: of those with several collectives in flight together, of small values, the seconds
            in which a device is itself at work in them. The median of their shares of the time of
            such collectives one after the other is the occupancy; they count for nothing else.
    """
    y, given, small = np.asarray(measured), dict(against or {}), dict(at_work or {})
    pairs = {i: j for i, j in given.items() if y[i] > 0 and y[j] > 0}
    beside, apart = np.array([*pairs], dtype=int), np.array([*pairs.values()], dtype=int)
    every = np.arange(len(y))
    alone = np.setdiff1d(every[y > 0], [*given, *given.values(), *small])

    def seconds_of(cluster: Cluster, some: Indices) -> Array:
        return np.asarray(predict(cluster, some.tolist()))

    found = _cluster(start, _nearest(
        lambda x, some: seconds_of(_cluster(start, x), alone[some]), _vector(start), y[alone]
    ))  # fmt: skip
    if small:
        # one after the other, and with no other device that is late
        modelled = predict(replace(found, skew=0.0, occupancy=1.0), [*small])
        shares = [s / m for s, m in zip(small.values(), modelled, strict=True)]
        found = replace(found, occupancy=min(1.0, float(np.median(shares))))
    scale = y[apart] / seconds_of(found, apart)
    if pairs and start.interference:
        (share,) = _nearest(
            lambda share, some: scale[some] * seconds_of(
                replace(found, interference=float(share[0])), beside[some]
            ),
            np.array([start.interference]), y[beside], most=1.0,
        )  # fmt: skip
        found = replace(found, interference=float(share))
    predicted = seconds_of(found, every)
    predicted[beside] *= scale
    return Fitted(found, predicted)


def fit_relative(terms: Sequence[Terms], measured: Sequence[float]) -> Coefficients:
    """Return the coefficients, in seconds per byte, for which the relative model is closest."""
    columns, y = np.array([t.bytes for t in terms], dtype=float), np.asarray(measured)
    start = np.full(4, np.sum(y) / np.sum(columns))
    found = _nearest(lambda x, some: columns[some] @ x, start, y)
    return Coefficients(*map(float, found))


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
    of = [mesh for _, mesh in (*called, *apart)]
    meshes = {*of}
    counted: dict[tuple[int, ...], list[list[Work]]] = {}
    """The work of each function and op, by the units of the cluster: it depends on nothing else of
    it."""

    def predict(cluster: Cluster, some: Sequence[int]) -> list[float]:
        on = {mesh: on_cluster(mesh, cluster) for mesh in meshes}
        if cluster.units not in counted:
            counted[cluster.units] = [
                *(list(works_of(group, on[mesh])) for group, mesh in called),
                *(list(works_of([op], on[mesh])) for op, mesh in apart),
            ]
        seconds = list[float]()
        for i in some:
            mesh = on[of[i]]
            costs = [w.cost(mesh) for w in counted[cluster.units][i]]
            if i >= len(called):
                seconds.append(sum(c.seconds for c in costs))
                continue
            computed = sum(c.seconds for c in costs if not c.communicates) if parts[i] else 0.0
            seconds.append(seconds_in_order(costs, mesh) - computed)
        return seconds

    return predict


def _nearest(model: Model, start: Array, y: Array, most: float = np.inf) -> Array:
    """Return the parameters, at most `most`, for which `model` is closest to y. One that no
    measurement depends on keeps its start value: else it would drift."""
    from scipy.optimize import least_squares

    begin, every = np.log(start), np.arange(len(y))

    def error(z: Array, some: Indices = every) -> Array:
        return np.log(np.maximum(model(np.exp(z), some), NEGLIGIBLE) / y[some])

    def moved(z: Array, i: int, by: float) -> Array:
        """The parameters with one that is moved, or moved back if it would be above `most`."""
        z = z.copy()
        z[i] += by if z[i] + by <= np.log(most) else -by
        return z

    at_start = error(begin)

    def depending(i: int) -> Indices:
        trials = (error(moved(begin, i, by)) != at_start for by in (REACH, -REACH))
        return np.flatnonzero(np.logical_or(*trials))

    def at(some: Array) -> Array:
        z = begin.copy()
        z[free] = some
        return z

    def jacobian(some: Array) -> Array:
        """The slopes of the errors, of each parameter those that depend on it alone."""
        z = at(some)
        now, slopes = error(z), np.zeros((len(y), len(free)))
        for column, i in enumerate(free):
            there, rows = moved(z, i, STEP * max(1.0, abs(z[i]))), depend[i]
            slopes[rows, column] = (error(there, rows) - now[rows]) / (there[i] - z[i])
        return slopes

    depend = {i: depending(i) for i in range(len(begin))}
    free = [i for i, rows in depend.items() if rows.size]
    found = least_squares(
        lambda some: error(at(some)), begin[free], jacobian,
        bounds=(np.log(NEGLIGIBLE / 2), np.log(most)),
        xtol=TOLERANCE, ftol=TOLERANCE, gtol=TOLERANCE, max_nfev=MAX_EVALUATIONS,
    )  # fmt: skip
    return np.exp(at(found.x))


def _vector(c: Cluster) -> Array:
    """Return the parameters: latencies, seconds per byte of levels, per flop and per byte of
    memory, factors of collectives, of their bytes and of ops, overhead, seconds per byte of
    operands, skew, call, packing."""
    numbers = [l.latency for l in c.levels] + [1 / l.bandwidth for l in c.levels]
    numbers += [1 / rate for _, rate in c.flops]
    if c.memory_bandwidth:
        numbers.append(1 / c.memory_bandwidth)
    numbers += [times for _, times in c.collectives + c.bytes + c.ops] + [c.overhead]
    numbers += [*(1 / rate for _, rate in c.operands), c.skew, c.call, c.packing]
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
        call=next(numbers), packing=next(numbers),
    )  # fmt: skip
