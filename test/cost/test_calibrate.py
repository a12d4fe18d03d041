"""Calibration: known parameters are found again from modelled times; the file reads back."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.extent import extent, long_form

import shardir
from shardir.algebra.cluster import Cluster, Level
from shardir.cost import Coefficients, clusters, report
from shardir.cost.fit import Predict, fit, fit_relative, predict_functions, terms_of
from shardir.dialects import dist
from shardir.tools import fitted_cluster
from shardir.tools.probes import OPS, against, module, probes

FITTED = [kind for kind, _ in fitted_cluster.initial_cluster(4, 10**9).collectives]
SLOW = [kind for kind, _ in fitted_cluster.initial_cluster(4, 10**9).ops]
KNOWN = Cluster(
    (Level("machine", 4, 1.3e9, 2.1e-4),),
    10**9,
    (("f64", 1.1e10), ("f32", 3.3e10), ("bf16", 7e9), ("f16", 2e9)),
    6.5e9,
    4.2e-6,
    collectives=tuple(zip(FITTED, (0.6, 1.2, 0.9, 1.1, 0.8), strict=True)),
    ops=tuple((kind, 1.5 + i) for i, kind in enumerate(SLOW)),
    operands=(("f64", 3e9), ("f32", 5e9)),
    skew=1e-4,
    call=8e-5,
    packing=5e-6,
    bytes=(("all_reduce", 1.2), ("reduce_scatter", 1.5)),
)
GIVEN = probes(4, extent(1 << 16, 1 << 22))
PROBES = [p for p in GIVEN if p.name != OPS]
EXPOSED = [p.exposed for p in PROBES if p.text]
START = fitted_cluster.initial_cluster(4, 10**9)
PAIRS = against(PROBES)


def numbers(c: Cluster) -> list[float]:
    (level,) = c.levels
    assert c.memory_bandwidth is not None
    rates = [rate for _, rate in c.flops + c.operands]
    times = [times for _, times in c.collectives + c.bytes + c.ops]
    return [
        level.bandwidth, level.latency, *times, *rates, c.memory_bandwidth, c.overhead, c.skew,
        c.call, c.packing,
    ]  # fmt: skip


@cache
def compiled() -> shardir.Compiled:
    return shardir.compile(module(GIVEN, 4), "")


@cache
def model() -> Predict:
    return predict_functions(compiled().module, [p.name for p in PROBES if not p.text], EXPOSED)


def seconds_on(cluster: Cluster) -> np.ndarray:
    """The modelled seconds of each probe."""
    return np.array(model()(cluster, range(len(PROBES))))


# ---- the fit ----


TWO_LEVELS = (Level("node", 2, 2e9, 1e-5), Level("pod", 2, 1e9, 1e-4))


@pytest.mark.parametrize("known", [KNOWN, replace(KNOWN, levels=TWO_LEVELS, interference=0.5)])
def test_the_model_of_a_fit_is_that_of_reports(known: Cluster) -> None:
    reports = {f.name: f for f in report(compiled().module, known)}
    ops = {c.op.results[0].name_hint: c.seconds for c in reports[OPS].ops}
    reported = [
        reports[p.name].seconds - p.exposed * reports[p.name].computation if p.text
        else ops[p.name]
        for p in PROBES
    ]  # fmt: skip
    assert seconds_on(known) == pytest.approx(reported)


@pytest.mark.parametrize("interference", extent([0.3], [0.0, 0.3, 0.9, 1.0]))
def test_known_numbers_are_found_again(interference: float) -> None:
    """Each parameter that the probes show, also where an op or a function is too short for its
    marks: it is measured as 0."""
    known = replace(KNOWN, interference=interference)
    measured = seconds_on(known)
    shown = measured.copy()
    shown[[next(i for i, p in enumerate(PROBES) if not p.text), min(PAIRS)]] = 0.0
    found = fit(model(), shown, START, PAIRS)
    assert numbers(found.cluster) == pytest.approx(numbers(known), rel=1e-3)
    assert found.cluster.interference == pytest.approx(interference, abs=1e-2)
    assert found.predicted == pytest.approx(measured, rel=1e-3)


OTHERS = [(0.4, 0.8), (0.0, 1.3), (0.8, 1.3)]
"""An interference, and the ratio of the seconds of products beside gathers to those of others."""


@long_form
@pytest.mark.parametrize(("interference", "slower"), OTHERS)
def test_only_the_gain_of_overlap_shows_interference(interference: float, slower: float) -> None:
    """Products beside gathers are a fifth faster or a third slower than the other products. The fit
    starts at the other parameters, which test_known_numbers_are_found_again finds."""
    known = replace(KNOWN, interference=interference)
    rates = tuple((name, rate / slower) for name, rate in known.flops)
    usual, here = seconds_on(known), seconds_on(replace(known, flops=rates))
    times = {
        p.name: float(h if p.name.startswith(("apart", "beside")) else u)
        for p, u, h in zip(PROBES, usual, here, strict=True)
    }
    start = replace(known, interference=0.5)
    found = fitted_cluster.fit_cluster(GIVEN, compiled(), times, start).cluster
    assert found.interference == pytest.approx(interference, abs=0.25)
    assert numbers(found) == pytest.approx(numbers(known), rel=0.05)


@long_form
@pytest.mark.parametrize("seed", range(3))
def test_noise_averages_out(seed: int) -> None:
    """With measurements up to 20% off parameters are nearer to what they were than these are, by
    root mean squares, also those that few of them show."""
    noise = np.random.default_rng(seed).uniform(-0.2, 0.2, len(PROBES))
    found = fit(model(), seconds_on(KNOWN) * np.exp(noise), START, PAIRS)
    errors = np.log(np.array(numbers(found.cluster)) / numbers(KNOWN))
    assert np.mean(errors**2) < np.mean(noise**2)


@long_form
def test_no_numbers_near_are_better() -> None:
    """For measurements that no parameters explain, the result has the minimum error of all clusters
    that differ from it in one parameter or in two, by a little or by much."""
    rng = np.random.default_rng(7)
    measured = seconds_on(KNOWN) * np.exp(rng.normal(0, 0.7, len(PROBES)))
    found = fit(model(), measured, START, PAIRS)
    unused = {*PAIRS, *PAIRS.values()}
    alone = [i for i in range(len(PROBES)) if i not in unused]

    def error(c: Cluster) -> float:
        return float(np.sum(np.log(seconds_on(c) / measured)[alone] ** 2))

    minimum = error(found.cluster)
    for moved in neighbours(found.cluster, (0.5, 0.97, 1.03, 2.0)):
        assert error(moved) >= minimum * (1 - 1e-4)


def neighbours(c: Cluster, factors: Sequence[float]) -> list[Cluster]:
    (level,) = c.levels
    assert c.memory_bandwidth is not None
    found = []
    for k in factors:
        bandwidth = level._replace(bandwidth=level.bandwidth * k)
        latency = level._replace(latency=level.latency * k)
        found += [replace(c, levels=(l,)) for l in (bandwidth, latency)]
        found.append(replace(c, memory_bandwidth=c.memory_bandwidth * k))
        for i, (name, rate) in enumerate(c.flops):
            flops = (*c.flops[:i], (name, rate * k), *c.flops[i + 1 :])
            found += [replace(f, flops=flops) for f in (c, *found[-3:])]
        for i, (kind, times) in enumerate(c.collectives):
            all = (*c.collectives[:i], (kind, times * k), *c.collectives[i + 1 :])
            found += [replace(f, collectives=all) for f in (c, *found[:2])]
    return found


@pytest.mark.parametrize(("share", "found"), extent([(0.4, 0.4)], [(0.4, 0.4), (1.7, 1.0)]))
def test_the_occupancy_is_the_share_in_which_a_device_is_at_work(
    share: float, found: float
) -> None:
    """Of the seconds of as many gathers one after the other, without the wait for the last rank;
    ranks that share cores may be at work for longer. What several in flight take shows nothing
    else."""
    serial = seconds_on(replace(KNOWN, skew=0.0, occupancy=1.0))
    times, at_work = times_on(KNOWN), dict[str, float]()
    for p, s in zip(PROBES, serial, strict=True):
        if p.exposed:
            at_work[p.name] = share * float(s)
        if p.about == "occupancy":
            times[p.name] *= 3
    fitted = fitted_cluster.fit_cluster(GIVEN, compiled(), times, KNOWN, at_work).cluster
    assert fitted.occupancy == pytest.approx(found, rel=1e-2)
    assert numbers(fitted) == pytest.approx(numbers(KNOWN), rel=1e-2)


def test_half_and_twice_are_as_far_off() -> None:
    """One parameter for two measurements, 1 s and 4 s, becomes 2 s, not 1.2 s."""
    start = Cluster(START.levels, overhead=1.0)
    found = fit(lambda c, some: [c.overhead] * len(some), [1.0, 4.0], start)
    assert found.cluster.overhead == pytest.approx(2.0, rel=1e-3)


def test_coefficients_of_the_relative_model_are_found_again() -> None:
    """Seconds that are proportional to the bytes of each term, counted here from the ops."""
    known = Coefficients(2e-10, 3e-9, 5e-9, 4e-9)
    measured = []
    for f in report(compiled().module, KNOWN):
        total = 0.0
        for c in f.ops:
            sums = isinstance(c.op, dist.AllReduceOp | dist.ReduceScatterOp)
            everywhere = isinstance(c.op, dist.AllReduceOp) and f.mesh.extent(c.axes) == 4
            byte = known.beta1 if sums else known.beta2
            total += c.bytes * (
                known.gamma if everywhere else byte if c.communicates else known.alpha
            )
        measured.append(total)
    found = fit_relative(terms_of(compiled().module), measured)
    for name in ("alpha", "beta1", "beta2", "gamma"):
        assert getattr(found, name) == pytest.approx(getattr(known, name), rel=1e-3)


# ---- the file ----


def times_on(cluster: Cluster) -> dict[str, float]:
    """The modelled seconds of each probe, by its name."""
    return dict(zip((p.name for p in PROBES), seconds_on(cluster), strict=True))


@long_form
def test_the_file_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "here.ir"
    seen = fitted_cluster.fit_cluster(GIVEN, compiled(), times_on(KNOWN), START)
    path.write_text(fitted_cluster.text("here", seen, ["of a test"]))
    loaded = clusters.load(path)
    assert numbers(loaded) == pytest.approx(numbers(KNOWN), rel=6e-3)  # three digits
    assert loaded.memory == KNOWN.memory
    program = path.read_text() + "dist.mesh @m <d = 4> on @here\n"
    assert shardir.compile(program, "").text
    comments = [l for l in path.read_text().splitlines() if l.startswith("//")]
    assert comments[0] == "// of a test"
    count = sum("all_to_all" in p.name for p in GIVEN)
    assert any(f"all_to_all: 0.00, 0.00 of {count}" in l for l in comments)
    assert any("alpha = " in l and "gamma = " in l for l in comments)


@pytest.mark.parametrize("links", ["h200", "ascend910", "levels"])
def test_a_device_alone_is_measured_whatever_its_links(links: str, tmp_path: Path) -> None:
    """Also by a cluster that lacks what is fitted, and nothing drifts that is not measured."""
    if links == "levels":
        file = tmp_path / "levels.ir"
        file.write_text("dist.cluster @c <levels [a = 2 {bandwidth = 1e+09, latency = 1e-05}]>")
        links = str(file)
    given = probes(1, 1 << 22, False)
    made, known = shardir.compile(module(given, 1), ""), clusters.load("h100")
    names = [p.name for p in given if p.name != OPS]
    modelled = predict_functions(made.module, names)(known, range(len(names)))
    times = dict(zip(names, modelled, strict=True))
    start = fitted_cluster.initial_cluster(1, 10**9, clusters.load(links))
    found = fitted_cluster.fit_cluster(given, made, times, start).cluster
    assert dict(found.flops) == pytest.approx(dict(known.flops), rel=1e-3)
    assert dict(found.operands) == pytest.approx(dict(known.operands), rel=1e-3)
    assert found.memory_bandwidth == pytest.approx(known.memory_bandwidth, rel=1e-3)
    assert (found.levels, found.skew) == (start.levels, start.skew)


def test_rates_that_nothing_shows_are_named() -> None:
    seen = fitted_cluster.Calibration(KNOWN, Coefficients(1e-9, 1e-9, 1e-9, 1e-9), {})
    assert "Too fast" not in fitted_cluster.text("here", seen, [])
    free = replace(KNOWN, flops=(("f64", 1e18), *KNOWN.flops[1:]))
    told = fitted_cluster.text("here", replace(seen, cluster=free), [])
    assert "Too fast to be measured: f64;" in told


def test_the_largest_probes_give_the_relative_model() -> None:
    """A byte of a collective costs the time of the link, by its kind, and some more for latencies
    and copies; a byte of a computation costs the time of memory, or of its flops."""
    (link,) = (level._replace(latency=1e-6) for level in KNOWN.levels)
    known = replace(KNOWN, levels=(link,), skew=0.0, call=1e-7, packing=1e-7)
    c = fitted_cluster.relative(GIVEN, compiled(), times_on(known), known)
    times = known.byte_times
    between = [k for k in times if "reduce" not in k]
    for beta, kinds in (
        (c.beta1, ["all_reduce", "reduce_scatter"]), (c.beta2, between), (c.gamma, ["all_reduce"])
    ):  # fmt: skip
        low, high = (each(times[k] for k in kinds) for each in (min, max))
        assert low / link.bandwidth < beta < 2 * high / link.bandwidth
    assert known.memory_bandwidth is not None
    assert 1 / known.memory_bandwidth < c.alpha < 5 / known.memory_bandwidth
