"""The result of shard-calibrate: the cluster that fits the measured times best, and its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from xdsl.ir import Operation

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import COLLECTIVES as RECORDS
from shardir.algebra.collectives import AxisState, between
from shardir.backend.runs import RankCalls
from shardir.cost import Coefficients, clusters, report
from shardir.dialects import dist
from shardir.tools.collective_probes import COLLECTIVES
from shardir.tools.probe_functions import Probe
from shardir.tools.probes import OPS, REDUCE, SLOW, VIEWED, against

if TYPE_CHECKING:
    from shardir.api.compiled import Compiled

NO_BYTES = ("", "overhead", "interference", "occupancy", "skew", "f64", "bf16", "f16")
"""The subjects of probes that the fit of the relative model ignores."""

LEVEL = between(AxisState.SHARDED, AxisState.REPLICATED).name
"""The collective whose latency and bandwidth are the level's; other collectives have factors."""

IMPLAUSIBLE_RATE = 1e17
"""A rate in bytes/s or flop/s that no device has: a higher one had no influence on the fit."""

OF_LINKS = (
    "levels", "interference", "occupancy", "collectives", "bytes", "skew", "call", "packing",
)  # fmt: skip
"""The fields of a cluster that only communication influences."""

OPERANDS = ("f64", "f32")
"""The element types with products of both kinds: bound by flops, and bound by memory."""

UNMEASURED_SKEW = 5e-4
"""The start value of the skew, in seconds."""

UNMEASURED_CALL = 1e-4
"""The start value of the time of a collective's call, in seconds."""

UNMEASURED_PACKING = 1e-5
"""The start value of the time of an op that packs a value, in seconds."""


@dataclass(frozen=True)
class Calibration:
    """The fitted cluster, the relative model's coefficients (None without communication), and the
    ratio of predicted to measured time of each probe."""

    cluster: Cluster
    relative: Coefficients | None
    ratios: Mapping[Probe, float]

    def errors(self) -> dict[str, list[float]]:
        """Return the relative errors by subject of probes, ascending: 1 for twice or half."""
        by_subject: dict[str, list[float]] = {}
        for probe, ratio in self.ratios.items():
            by_subject.setdefault(probe.about, []).append(max(ratio, 1 / ratio) - 1)
        return {about: sorted(errors) for about, errors in by_subject.items()}


def fit_cluster(
    all_probes: Sequence[Probe], compiled: "Compiled", times: Mapping[str, float], start: Cluster,
    at_work: Mapping[str, float] | None = None,
) -> Calibration:  # fmt: skip
    """Fit a cluster to the seconds of each probe: of a call of its function, or of the op whose
    result has its name.

    Args:
        at_work: for each function, the seconds that a device itself works in its collectives
            (`working`). Without it, the device's computation hides collectives.
    """
    from shardir.cost.fit import fit, predict_functions

    probes = [p for p in all_probes if p.name != OPS]
    measured = [times[p.name] for p in probes]
    exposed = [p.exposed for p in probes if p.text]
    predict = predict_functions(compiled.module, [p.name for p in probes if not p.text], exposed)
    small = {
        i: at_work[p.name]
        for i, p in enumerate(probes)
        if p.about == "occupancy" and at_work and p.name in at_work
    }
    fitted = fit(predict, measured, start, against(probes), small)
    ratios = {
        p: float(predicted) / s
        for p, predicted, s in zip(probes, fitted.predicted, measured, strict=True)
        if p.about and s > 0
    }
    if any(p.text for p in probes):
        coefficients = relative(all_probes, compiled, times, fitted.cluster)
        return Calibration(fitted.cluster, coefficients, ratios)
    links = {name: getattr(start, name) for name in OF_LINKS}  # there was no communication
    return Calibration(replace(fitted.cluster, **links), None, ratios)


def medians(
    probes: Sequence[Probe], compiled: "Compiled", measured: Mapping[str, Sequence[float]],
    ranks: Sequence[RankCalls],
) -> dict[str, float]:  # fmt: skip
    """Return the median seconds of a call of each function, and of each op of OPS by the name of
    its result. For an exposed probe, the seconds of computation are subtracted; the rank's own work
    in collectives is the minimum."""
    medians = {name: median(seconds) for name, seconds in measured.items()}
    spent = _work_of_ops(compiled, ranks, list(measured))
    for name in (p.name for p in probes if p.exposed):
        own_work = _in_collectives(spent[name])
        medians[name] = max(medians[name] - sum(spent[name].values()) + own_work, own_work)
    ops = ((op.results[0].name_hint, s) for op, s in spent[OPS].items() if op.results)
    return medians | {name: s for name, s in ops if name}


def working(
    compiled: "Compiled", measured: Mapping[str, Sequence[float]], ranks: Sequence[RankCalls]
) -> dict[str, float]:
    """Return the seconds that a rank itself works in the collectives of each function."""
    spent = _work_of_ops(compiled, ranks, list(measured))
    return {name: _in_collectives(ops) for name, ops in spent.items()}


def _in_collectives(spent: Mapping[Operation, float]) -> float:
    return sum(s for op, s in spent.items() if isinstance(op, dist.CollectiveOp | dist.WaitOp))


def _work_of_ops(
    compiled: "Compiled", ranks: Sequence[RankCalls], functions: Sequence[str]
) -> dict[str, dict[Operation, float]]:
    """Return the median seconds of work of each op, by function, in recorded calls."""
    from shardir.backend.torch.measured import ProgramLines

    lines = ProgramLines(compiled.module)
    return {f: lines.medians(call for rank in ranks for call in rank[f]) for f in functions}


def relative(
    all_probes: Sequence[Probe], compiled: "Compiled", times: Mapping[str, float], cluster: Cluster
) -> Coefficients:
    """Fit the coefficients of the relative model.

    The model has neither latencies nor flops, so only the largest f32 probes of each kind count. Of
    a probe that communicates, only the share of communication counts, by the time model.
    """
    from shardir.cost.fit import fit_relative, terms_of

    probes = [p for p in all_probes if p.name != OPS]
    largest = {p.about: max(q.size for q in all_probes if q.about == p.about) for p in all_probes}
    costs = [c for c in report(compiled.module, cluster) if c.name != OPS]
    ops = [p.name for p in probes if not p.text]
    exposed = {p.name for p in all_probes if p.exposed}
    shares = [
        sum(op.seconds for op in c.ops if op.communicates)
        / (c.seconds - (c.computation if c.name in exposed else 0.0))
        for c in costs
    ] + [1.0] * len(ops)
    terms, seconds = [], []
    for probe, term, share in zip(probes, terms_of(compiled.module, ops), shares, strict=True):
        counts = probe.about not in (*NO_BYTES, *dict(cluster.ops))
        if counts and probe.size == largest[probe.about] and times[probe.name] > 0:
            communicates = any(term.bytes[1:])
            terms.append(replace(term, cal=0) if communicates else term)
            seconds.append(times[probe.name] * (share if communicates else 1.0))
    return fit_relative(terms, seconds)


def initial_cluster(ranks: int, memory: int, links: Cluster | None = None) -> Cluster:
    """Return the start of the fit. A single device has the links of the cluster `links`."""
    like = clusters.load("gloo")
    device = replace(
        like, memory=memory,
        operands=tuple((element, like.memory_bandwidth or 1e10) for element in OPERANDS),
        ops=tuple((kind, 1.0) for kind in (*(f"nn.{k}" for k in (*SLOW, *VIEWED)), REDUCE)),
    )  # fmt: skip
    if links:
        return replace(device, host=links.host, **{name: getattr(links, name) for name in OF_LINKS})
    (level,) = like.levels
    kinds = dict.fromkeys(kind for kind, *_ in COLLECTIVES if kind != LEVEL)
    return replace(
        device, levels=(Level("machine", ranks, level.bandwidth, level.latency),),
        interference=0.5, skew=UNMEASURED_SKEW, call=UNMEASURED_CALL,
        packing=UNMEASURED_PACKING, collectives=tuple((kind, 1.0) for kind in kinds),
        bytes=tuple((kind, 1.0) for kind in kinds if RECORDS[kind].reduces),
    )  # fmt: skip


def text(name: str, calibration: Calibration, about: Sequence[str]) -> str:
    """Return the text of the cluster file."""
    every = [error for errors in calibration.errors().values() for error in errors]
    error = round(median(every), 2) if every else None
    lines = [
        *about,
        "Relative errors of the model, median and largest (1: twice or half):",
    ]
    for subject, errors in calibration.errors().items():
        lines.append(f"  {subject}: {median(errors):.2f}, {errors[-1]:.2f} of {len(errors)}")
    if unfitted := _unfitted_rates(calibration.cluster):
        lines.append(f"Too fast to be measured: {', '.join(unfitted)}; use a larger --most")
    if c := calibration.relative:
        lines.append(
            f"Relative model, seconds per byte: alpha = {c.alpha:.3g}, beta1 = {c.beta1:.3g}, "
            f"beta2 = {c.beta2:.3g}, gamma = {c.gamma:.3g}"
        )
    return (
        "".join(f"// {line}\n" for line in lines)
        + f"dist.cluster @{name} <{replace(_short(calibration.cluster), error=error)}>\n"
    )


def _unfitted_rates(c: Cluster) -> list[str]:
    """Return the names of the rates that had no influence on the fit."""
    rates = [*c.flops, *((f"operands in {name}", rate) for name, rate in c.operands)]
    rates += [("memory", c.memory_bandwidth), *((l.name, l.bandwidth) for l in c.levels)]
    return [name for name, rate in rates if rate and rate > IMPLAUSIBLE_RATE]


def _short(c: Cluster) -> Cluster:
    """Round numbers to three digits, and shares to two: the measured precision."""

    def short(x: float) -> float:
        return float(f"{x:.3g}")

    return replace(
        c,
        levels=tuple(
            l._replace(bandwidth=short(l.bandwidth), latency=short(l.latency)) for l in c.levels
        ),
        flops=tuple((name, short(rate)) for name, rate in c.flops),
        memory_bandwidth=c.memory_bandwidth and short(c.memory_bandwidth),
        overhead=short(c.overhead),
        interference=round(c.interference, 2),
        occupancy=round(c.occupancy, 2),
        skew=short(c.skew),
        call=short(c.call),
        packing=short(c.packing),
        operands=tuple((name, short(rate)) for name, rate in c.operands),
        collectives=tuple((name, short(times)) for name, times in c.collectives),
        bytes=tuple((name, short(times)) for name, times in c.bytes),
        ops=tuple((name, short(times)) for name, times in c.ops),
    )
