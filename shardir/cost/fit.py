"""The fit of a cluster's parameters to measured times.

The objective is the sum of log(predicted / measured)^2: half and twice the time are equal errors.
(By relative error half would be better, and where one parameter serves different ops the fit would
follow the fastest of them.) Parameters are positive and differ by many magnitudes, so scipy's least
squares fits their logarithms. The time model itself is called; no formula is repeated here. The
occupancy is measured, not fitted.
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
"""A cluster and the numbers of some measurements -> their modelled seconds."""

Model = Callable[[Array, Indices], Array]
"""Parameters and the numbers of some measurements -> their modelled seconds."""

NEGLIGIBLE = 1e-18
"""The seconds of a parameter without influence: 1 EB/s or Eflop/s, or no latency."""

PROBE = np.log(1e6)
"""How far the logarithm of a parameter is moved to see whether a measurement depends on it."""

STEP = 1.5e-8
"""The relative step of a numerical derivative: the root of the rounding of a float."""

MAX_EVALUATIONS, TOLERANCE = 30, 1e-6
"""Bounds the fit: it ends once the parameters, the error or its gradient change by less than the
tolerance, which is far below the noise of measurements, or after 30 evaluations."""


@dataclass(frozen=True)
class Fitted:
    """A fitted cluster, and the predicted seconds of each measurement."""

    cluster: Cluster
    predicted: Array


def fit(
    predict: Predict, measured: Sequence[float] | Array, start: Cluster,
    against: Mapping[int, int] | None = None, at_work: Mapping[int, float] | None = None,
) -> Fitted:  # fmt: skip
    """Return the cluster for which the model is closest to the measurements.

    Args:
        predict: the time model of the measurements.
        measured: seconds; a measurement of 0 s is ignored.
        start: the initial cluster; a missing parameter is not fitted, and one that is 0 stays 0.
        against: from the number of a measurement with a collective in flight to the number of the
            measurement of its ops one after the other. Their ratios determine the interference, and
            nothing else; it is fitted last.
        at_work: from the number of a measurement with several small collectives in flight to the
            seconds in which the device works in them. The median share of these seconds in the
            modelled time of the collectives one after the other is the occupancy; these
            measurements determine nothing else.
    """
    y, given, small = np.asarray(measured), dict(against or {}), dict(at_work or {})
    pairs = {i: j for i, j in given.items() if y[i] > 0 and y[j] > 0}
    beside, apart = np.array([*pairs], dtype=int), np.array([*pairs.values()], dtype=int)
    numbers = np.arange(len(y))
    alone = np.setdiff1d(numbers[y > 0], [*given, *given.values(), *small])

    def seconds_of(cluster: Cluster, rows: Indices) -> Array:
        return np.asarray(predict(cluster, rows.tolist()))

    cluster = _with_parameters(start, _least_squares(
        lambda x, rows: seconds_of(_with_parameters(start, x), alone[rows]),
        _parameters(start), y[alone],
    ))  # fmt: skip
    if small:
        # one after the other, and with no other device that is late
        modelled = predict(replace(cluster, skew=0.0, occupancy=1.0), [*small])
        shares = [s / m for s, m in zip(small.values(), modelled, strict=True)]
        cluster = replace(cluster, occupancy=min(1.0, float(np.median(shares))))
    scale = y[apart] / seconds_of(cluster, apart)
    if pairs and start.interference:
        (share,) = _least_squares(
            lambda share, rows: scale[rows] * seconds_of(
                replace(cluster, interference=float(share[0])), beside[rows]
            ),
            np.array([start.interference]), y[beside], upper=1.0,
        )  # fmt: skip
        cluster = replace(cluster, interference=float(share))
    predicted = seconds_of(cluster, numbers)
    predicted[beside] *= scale
    return Fitted(cluster, predicted)


def fit_relative(terms: Sequence[Terms], measured: Sequence[float]) -> Coefficients:
    """Return the coefficients, in seconds per byte, for which the relative model is closest to the
    measured seconds."""
    columns, y = np.array([t.bytes for t in terms], dtype=float), np.asarray(measured)
    start = np.full(4, np.sum(y) / np.sum(columns))
    coefficients = _least_squares(lambda x, rows: columns[rows] @ x, start, y)
    return Coefficients(*map(float, coefficients))


def terms_of(module: ModuleOp, ops: Sequence[str] = ()) -> list[Terms]:
    """Return the relative terms of the measurements of `predict_functions`.

    An all-reduce over all devices counts as D_dp, another reduction as D_inner, another collective
    as D_inter.
    """
    terms = []
    called, single = _measured_ops(module, ops)
    for group, mesh in [*called, *(([op], mesh) for op, mesh in single)]:
        mesh, row = on_cluster(mesh, None), [0, 0, 0, 0]
        for cost in (w.cost(mesh) for w in works_of(group, mesh)):
            row[_term(cost, mesh.extent(cost.axes) == mesh.size)] += cost.bytes
        terms.append(Terms(*row))
    return terms


def _measured_ops(
    module: ModuleOp, names: Sequence[str]
) -> tuple[list[tuple[list[Operation], Mesh]], list[tuple[Operation, Mesh]]]:
    """Return the measured ops of a module, with their meshes.

    Args:
        names: of results, all in one function; their ops are measured one by one.

    Returns:
        The ops of each other function, which is measured as a whole; and the ops of `names`.
    """
    called, single = [], {}
    for f, mesh in functions(module):
        ops = list(f.body.block.ops)
        by_name = {op.results[0].name_hint: op for op in ops if op.results}
        if names and by_name.keys() >= set(names):
            single = {name: (by_name[name], mesh) for name in names}
        else:
            called.append((ops, mesh))
    return called, [single[name] for name in names]


def _term(cost: OpCost, everywhere: bool) -> int:
    """Return the index of the term (`Terms.bytes`) to which an op's bytes belong.

    Args:
        everywhere: the op is over all devices.
    """
    if not cost.axes:
        return 0
    kind = cost.op.name.removeprefix("dist.")
    if not (kind in COLLECTIVES and COLLECTIVES[kind].reduces):
        return 2
    return 3 if kind == "all_reduce" and everywhere else 1


def predict_functions(
    module: ModuleOp, ops: Sequence[str] = (), exposed: Sequence[bool] = ()
) -> Predict:
    """Return the time model of the functions of a module in the local view.

    Measurements are the functions in their order, then the ops of `ops`, without the function that
    has these ops.

    Args:
        ops: names of results.
        exposed: for each function, whether its time counts beyond that of its computation only.
    """
    called, single = _measured_ops(module, ops)
    parts = exposed or [False] * len(called)
    mesh_of = [mesh for _, mesh in (*called, *single)]
    meshes = {*mesh_of}
    works: dict[tuple[int, ...], list[list[Work]]] = {}
    """By the units of a cluster, on which alone they depend, the works of each measurement."""

    def predict(cluster: Cluster, numbers: Sequence[int]) -> list[float]:
        on = {mesh: on_cluster(mesh, cluster) for mesh in meshes}
        if cluster.units not in works:
            works[cluster.units] = [
                *(list(works_of(group, on[mesh])) for group, mesh in called),
                *(list(works_of([op], on[mesh])) for op, mesh in single),
            ]
        seconds = list[float]()
        for i in numbers:
            mesh = on[mesh_of[i]]
            costs = [w.cost(mesh) for w in works[cluster.units][i]]
            if i >= len(called):
                seconds.append(sum(c.seconds for c in costs))
                continue
            computed = sum(c.seconds for c in costs if not c.communicates) if parts[i] else 0.0
            seconds.append(seconds_in_order(costs, mesh) - computed)
        return seconds

    return predict


def _least_squares(model: Model, start: Array, y: Array, upper: float = np.inf) -> Array:
    """Return the parameters, at most `upper`, for which `model` is closest to y.

    A parameter on which no measurement depends keeps its start value: otherwise it would drift.
    """
    from scipy.optimize import least_squares

    begin, numbers = np.log(start), np.arange(len(y))

    def error(z: Array, rows: Indices = numbers) -> Array:
        return np.log(np.maximum(model(np.exp(z), rows), NEGLIGIBLE) / y[rows])

    def shift(z: Array, i: int, by: float) -> Array:
        """Return z with z[i] shifted by `by`, or by -by if it would exceed the upper bound."""
        z = z.copy()
        z[i] += by if z[i] + by <= np.log(upper) else -by
        return z

    at_start = error(begin)

    def dependent_rows(i: int) -> Indices:
        """Return the numbers of the measurements that depend on parameter i."""
        found = error(shift(begin, i, PROBE)) != at_start
        rest = np.flatnonzero(~found)
        found[rest] = error(shift(begin, i, -PROBE), rest) != at_start[rest]
        return np.flatnonzero(found)

    def with_free(values: Array) -> Array:
        """Return the logarithms of all parameters, from those that are fitted."""
        z = begin.copy()
        z[free] = values
        return z

    def jacobian(values: Array) -> Array:
        """Return the derivatives of the errors, from the rows that depend on each parameter."""
        z = with_free(values)
        now, slopes = error(z), np.zeros((len(y), len(free)))
        for column, i in enumerate(free):
            shifted, rows = shift(z, i, STEP * max(1.0, abs(z[i]))), dependent[i]
            slopes[rows, column] = (error(shifted, rows) - now[rows]) / (shifted[i] - z[i])
        return slopes

    dependent = {i: dependent_rows(i) for i in range(len(begin))}
    free = [i for i, rows in dependent.items() if rows.size]
    solution = least_squares(
        lambda values: error(with_free(values)), begin[free], jacobian,
        bounds=(np.log(NEGLIGIBLE / 2), np.log(upper)),
        xtol=TOLERANCE, ftol=TOLERANCE, gtol=TOLERANCE, max_nfev=MAX_EVALUATIONS,
    )  # fmt: skip
    return np.exp(with_free(solution.x))


def _parameters(c: Cluster) -> Array:
    """Return the parameters of a cluster: the latency of each level; the seconds per byte of each
    level, per flop and per byte of memory; the ratios of collectives, of their bytes and of ops;
    the overhead; the seconds per byte of operands; skew, call and packing."""
    numbers = [l.latency for l in c.levels] + [1 / l.bandwidth for l in c.levels]
    numbers += [1 / rate for _, rate in c.flops]
    if c.memory_bandwidth:
        numbers.append(1 / c.memory_bandwidth)
    numbers += [times for _, times in c.collectives + c.bytes + c.ops] + [c.overhead]
    numbers += [*(1 / rate for _, rate in c.operands), c.skew, c.call, c.packing]
    return np.maximum(numbers, NEGLIGIBLE)


def _with_parameters(like: Cluster, x: Array) -> Cluster:
    """Return the cluster `like` with the parameters x, in the order of `_parameters`."""
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
