"""The result of shard-calibrate: the cluster for which the time model is closest to measured times,
and its file."""

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
    from shardir.api import Compiled

NO_BYTES = ("", "overhead", "interference", "occupancy", "skew", "f64", "bf16", "f16")
"""The subjects of probes that the relative model is not fitted to."""

LEVEL = between(AxisState.SHARDED, AxisState.REPLICATED).name
"""The collective with the latency and bandwidth of the level; other collectives have a factor."""

IMPLAUSIBLE_RATE = 1e17
"""Bytes/s or flop/s, above those of any device: the rate had no influence on the fit."""

OF_LINKS = (
    "levels", "interference", "occupancy", "collectives", "bytes", "skew", "call", "packing",
)  # fmt: skip
"""The fields of a cluster that only devices that communicate have an influence on."""

OPERANDS = ("f64", "f32")
"""The element types whose products are measured with sizes bound by flops, and bound by memory."""

UNMEASURED_SKEW = 5e-4
"""The start value of the skew, in seconds."""

UNMEASURED_CALL = 1e-4
"""The start value of the time of a collective's call, in seconds."""

UNMEASURED_PACKING = 1e-5
"""The start value of the time of an op that packs a value, in seconds."""


@dataclass(frozen=True)
class Calibration:
    """The fitted cluster, the relative model's coefficients (None where nothing communicates), and
    predicted / measured of each probe."""

    cluster: Cluster
    relative: Coefficients | None
    ratios: Mapping[Probe, float]

    def errors(self) -> dict[str, list[float]]:
        """Return the relative errors by subject of probes, ascending: 1 for twice or half."""
        found: dict[str, list[float]] = {}
        for probe, ratio in self.ratios.items():
            found.setdefault(probe.about, []).append(max(ratio, 1 / ratio) - 1)
        return {about: sorted(errors) for about, errors in found.items()}


def fit_cluster(
    given: Sequence[Probe], compiled: "Compiled", times: Mapping[str, float], start: Cluster,
    at_work: Mapping[str, float] | None = None,
) -> Calibration:  # fmt: skip
    """Return the calibration from the seconds of each probe: of calls of its function, or of the op
    whose result has its name.

    Args:
        at_work: the seconds in which a device itself works in the collectives of a function
            (`working`). Without it, computation of the device hides them.
    """
    from shardir.cost.fit import fit, predict_functions

    probes = [p for p in given if p.name != OPS]
    measured = [times[p.name] for p in probes]
    exposed = [p.exposed for p in probes if p.text]
    predict = predict_functions(compiled.module, [p.name for p in probes if not p.text], exposed)
    small = {
        i: at_work[p.name]
        for i, p in enumerate(probes)
        if p.about == "occupancy" and at_work and p.name in at_work
    }
    found = fit(predict, measured, start, against(probes), small)
    ratios = {
        p: float(predicted) / s
        for p, predicted, s in zip(probes, found.predicted, measured, strict=True)
        if p.about and s > 0
    }
    if any(p.text for p in probes):
        coefficients = relative(given, compiled, times, found.cluster)
        return Calibration(found.cluster, coefficients, ratios)
    links = {name: getattr(start, name) for name in OF_LINKS}  # nothing has communicated
    return Calibration(replace(found.cluster, **links), None, ratios)


def medians(
    given: Sequence[Probe], compiled: "Compiled", measured: Mapping[str, Sequence[float]],
    ranks: Sequence[RankCalls],
) -> dict[str, float]:  # fmt: skip
    """Return the median seconds of calls of each function, or what these take beyond the work of
    their computation, but at least the rank's own work, if they are exposed; and the seconds of
    work of the ops of OPS, by the names of their results."""
    found = {name: median(seconds) for name, seconds in measured.items()}
    spent = _work_of_ops(compiled, ranks, list(measured))
    for name in (p.name for p in given if p.exposed):
        mine = _in_collectives(spent[name])
        found[name] = max(found[name] - sum(spent[name].values()) + mine, mine)
    ops = ((op.results[0].name_hint, s) for op, s in spent[OPS].items() if op.results)
    return found | {name: s for name, s in ops if name}


def working(
    compiled: "Compiled", measured: Mapping[str, Sequence[float]], ranks: Sequence[RankCalls]
) -> dict[str, float]:
    """Return the seconds in which a rank is itself at work in the collectives of each function."""
    spent = _work_of_ops(compiled, ranks, list(measured))
    return {name: _in_collectives(ops) for name, ops in spent.items()}


def _in_collectives(spent: Mapping[Operation, float]) -> float:
    return sum(s for op, s in spent.items() if isinstance(op, dist.CollectiveOp | dist.WaitOp))


def _work_of_ops(
    compiled: "Compiled", ranks: Sequence[RankCalls], functions: Sequence[str]
) -> dict[str, dict[Operation, float]]:
    """Return the median seconds of work of each op in recorded calls of functions."""
    from shardir.backend.torch.measured import ProgramLines

    lines = ProgramLines(compiled.module)
    return {f: lines.medians(call for rank in ranks for call in rank[f]) for f in functions}


def relative(
    given: Sequence[Probe], compiled: "Compiled", times: Mapping[str, float], cluster: Cluster
) -> Coefficients:
    """Return the relative model's coefficients.

    The model has neither latencies nor flops, so only the largest probes of each kind count, of f32
    alone. Of a probe that communicates, the share of communication by the time model counts.
    """
    from shardir.cost.fit import fit_relative, terms_of

    probes = [p for p in given if p.name != OPS]
    largest = {p.about: max(q.size for q in given if q.about == p.about) for p in given}
    costs = [c for c in report(compiled.module, cluster) if c.name != OPS]
    ops = [p.name for p in probes if not p.text]
    exposed = {p.name for p in given if p.exposed}
    shares = [
        sum(op.seconds for op in c.ops if op.communicates)
        / (c.seconds - (c.computation if c.name in exposed else 0.0))
        for c in costs
    ] + [1.0] * len(ops)
    terms, seconds = [], []
    for probe, found, share in zip(probes, terms_of(compiled.module, ops), shares, strict=True):
        bound = probe.about not in (*NO_BYTES, *dict(cluster.ops))
        if bound and probe.size == largest[probe.about] and times[probe.name] > 0:
            apart = any(found.bytes[1:])
            terms.append(replace(found, cal=0) if apart else found)
            seconds.append(times[probe.name] * (share if apart else 1.0))
    return fit_relative(terms, seconds)


def initial_cluster(ranks: int, memory: int, links: Cluster | None = None) -> Cluster:
    """Return the cluster at which the fit begins. A single device has the links of `links`."""
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


def text(name: str, found: Calibration, about: Sequence[str]) -> str:
    """Return the text of the cluster file."""
    lines = [
        *about,
        "Relative errors of the model, median and largest (1: twice or half):",
    ]
    for what, errors in found.errors().items():
        lines.append(f"  {what}: {median(errors):.2f}, {errors[-1]:.2f} of {len(errors)}")
    if unseen := _unfitted_rates(found.cluster):
        lines.append(f"Too fast to be measured: {', '.join(unseen)}; use a larger --most")
    if c := found.relative:
        lines.append(
            f"Relative model, seconds per byte: alpha = {c.alpha:.3g}, beta1 = {c.beta1:.3g}, "
            f"beta2 = {c.beta2:.3g}, gamma = {c.gamma:.3g}"
        )
    return (
        "".join(f"// {line}\n" for line in lines)
        + f"dist.cluster @{name} <{_short(found.cluster)}>\n"
    )


def _unfitted_rates(c: Cluster) -> list[str]:
    """Return the names of the rates that had no influence on the fit."""
    rates = [*c.flops, *((f"operands in {name}", rate) for name, rate in c.operands)]
    rates += [("memory", c.memory_bandwidth), *((l.name, l.bandwidth) for l in c.levels)]
    return [name for name, rate in rates if rate and rate > IMPLAUSIBLE_RATE]


def _short(c: Cluster) -> Cluster:
    """Round each number to three digits, and the share to two: more were not measured."""

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
