"""shard-calibrate: measure this machine with several ranks, and write its cluster file.

It measures products by element type, other ops by size, between each other as in a program, and
collectives by size and by the size of their group, on all ranks at once. It writes the parameters
for which the time model is closest, for `shard-opt --cost=FILE` and `shardir.cost.clusters.load`,
and the errors as comments.
"""

import argparse
import os
import platform
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from shardir.algebra.cluster import Cluster, Level
from shardir.algebra.collectives import AxisState, between
from shardir.backend.runs import LaunchError, Options, RankCalls
from shardir.cost import Coefficients, clusters, report
from shardir.diagnostics import ShardirError
from shardir.syntax.files import scratch_folder, write_text
from shardir.tools.arguments import output_file, positive, seconds
from shardir.tools.commands import command
from shardir.tools.probes import (
    COLLECTIVES,
    OPS,
    REDUCE,
    SLOW,
    SMALLEST,
    VIEWED,
    Probe,
    against,
    module,
    probes,
)

if TYPE_CHECKING:
    from shardir.api import Compiled

EXAMPLE = """example:
  shard-calibrate --ranks 4 -o here.ir     one to two minutes, on a quiet machine
  shard-opt net.ir -p train --cost=here.ir
"""
NO_BYTES = ("", "overhead", "interference", "skew", "f64", "bf16", "f16")
"""The subjects of probes that the relative model is not fitted to."""

LEVEL = between(AxisState.SHARDED, AxisState.REPLICATED).name
"""The collective with the latency and bandwidth of the level; the others have a fitted factor."""

IMPLAUSIBLE_RATE = 1e17
"""Bytes/s or flop/s, above those of any device: the rate had no influence on the fit."""

MAX_LOAD = 0.5
"""The number of other processes that run, for each core, above which times are not to be believed:
latencies are several times as long then."""

OPERANDS = ("f64", "f32")
"""The element types whose products are measured in sizes at which the flops count more than the
operands, and in those at which they count less."""

UNMEASURED_SKEW = 5e-4
"""The start value of the skew, in seconds."""

LARGEST_MESSAGE = {"gloo": 1 << 22, "nccl": 1 << 28}
"""The default of --most, in bytes, by backend."""


@dataclass(frozen=True)
class Calibration:
    """The fitted cluster, the relative model's coefficients, and predicted / measured of each
    probe."""

    cluster: Cluster
    relative: Coefficients
    ratios: Mapping[Probe, float]

    def errors(self) -> dict[str, list[float]]:
        """Return the relative errors by subject of probes, ascending: 1 for twice or half."""
        found: dict[str, list[float]] = {}
        for probe, ratio in self.ratios.items():
            found.setdefault(probe.about, []).append(max(ratio, 1 / ratio) - 1)
        return {about: sorted(errors) for about, errors in found.items()}


def fitted(
    given: Sequence[Probe], compiled: "Compiled", times: Mapping[str, float], start: Cluster
) -> Calibration:
    """Return the calibration from the seconds of each probe: of calls of its function, or of the op
    whose result has its name."""
    from shardir.cost.fit import fit, of_functions

    probes = [p for p in given if p.name != OPS]
    measured = [times[p.name] for p in probes]
    predict = of_functions(compiled.module, [p.name for p in probes if not p.text])
    found = fit(predict, measured, start, against(probes), [bool(p.text) for p in probes])
    ratios = {
        p: float(ratio)
        for p, ratio in zip(probes, found.predicted / measured, strict=True)
        if p.about
    }
    return Calibration(found.cluster, _relative(given, compiled, times, found.cluster), ratios)


def medians(
    compiled: "Compiled", measured: Mapping[str, Sequence[float]], ranks: Sequence[RankCalls]
) -> dict[str, float]:
    """Return the median seconds of calls of each function, and the seconds of the ops of OPS."""
    found = {name: median(seconds) for name, seconds in measured.items()}
    return found | times_of_ops(compiled, ranks, found[OPS])


def times_of_ops(
    compiled: "Compiled", ranks: Sequence[RankCalls], seconds: float
) -> dict[str, float]:
    """Return the seconds of the ops of OPS by the names of their results, from recorded calls of
    the ranks, in seconds of the processor.

    Args:
        seconds: of a call, of which each op has the share that it has of the processor's seconds:
            where ranks share cores, an op takes longer than these by what the other ranks compute.
    """
    from shardir.backend.torch.measured import ProgramLines

    recorded = [call for rank in ranks for call in rank[OPS]]
    found = ProgramLines(compiled.module).medians(recorded)
    scale = seconds / sum(found.values())
    return {
        name: scale * spent
        for op, spent in found.items()
        if op.results and (name := op.results[0].name_hint)
    }


def _relative(
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
    shares = [1 - c.computation / c.seconds for c in costs] + [1.0] * len(ops)
    terms, seconds = [], []
    for probe, found, share in zip(probes, terms_of(compiled.module, ops), shares, strict=True):
        bound = probe.about not in (*NO_BYTES, *dict(cluster.ops))
        if bound and probe.size == largest[probe.about]:
            apart = any(found.bytes[1:])
            terms.append(replace(found, cal=0) if apart else found)
            seconds.append(times[probe.name] * (share if apart else 1.0))
    return fit_relative(terms, seconds)


def unmeasured(ranks: int, memory: int) -> Cluster:
    """Return the cluster at which the fit begins."""
    like = clusters.load("gloo")
    (level,) = like.levels
    kinds = dict.fromkeys(kind for kind, *_ in COLLECTIVES if kind != LEVEL)
    return replace(
        like, levels=(Level("machine", ranks, level.bandwidth, level.latency),), memory=memory,
        operands=tuple((element, like.memory_bandwidth or 1e10) for element in OPERANDS),
        interference=0.5, skew=UNMEASURED_SKEW, collectives=tuple((kind, 1.0) for kind in kinds),
        ops=tuple((kind, 1.0) for kind in (*(f"nn.{k}" for k in (*SLOW, *VIEWED)), REDUCE)),
    )  # fmt: skip


def text(name: str, found: Calibration, about: Sequence[str]) -> str:
    """Return the text of the cluster file."""
    lines = [
        *about,
        "Relative errors of the model, median and largest (1: twice or half):",
    ]
    for what, errors in found.errors().items():
        lines.append(f"  {what}: {median(errors):.2f}, {errors[-1]:.2f} of {len(errors)}")
    if unseen := _unseen(found.cluster):
        lines.append(f"Too fast to be measured: {', '.join(unseen)}; use a larger --most")
    c = found.relative
    lines.append(
        f"Relative model, seconds per byte: alpha = {c.alpha:.3g}, beta1 = {c.beta1:.3g}, "
        f"beta2 = {c.beta2:.3g}, gamma = {c.gamma:.3g}"
    )
    return (
        "".join(f"// {line}\n" for line in lines)
        + f"dist.cluster @{name} <{_short(found.cluster)}>\n"
    )


def _unseen(c: Cluster) -> list[str]:
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
        skew=short(c.skew),
        operands=tuple((name, short(rate)) for name, rate in c.operands),
        collectives=tuple((name, short(times)) for name, times in c.collectives),
        ops=tuple((name, short(times)) for name, times in c.ops),
    )


def main(arguments: list[str] | None = None) -> int:
    """Calibrate. Exit codes: 0 success, 1 a rank failed, 2 no start, or no output, 3 the machine
    was too busy; its file is written all the same."""
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        found, about, load = _measured(options)
    except ImportError as error:
        print(
            f"error: shard-calibrate requires {error.name}; use pip install 'shardir[calibrate]'",
            file=sys.stderr,
        )
        return 2
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except ShardirError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = text(options.name, found, about)
    if options.output is None:
        sys.stdout.write(result)
    else:
        try:
            write_text(options.output, result)
        except ShardirError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    if load > MAX_LOAD:
        print(
            f"error: expected a quiet machine, got {load:.1f} other running processes for each "
            "core; measure again when it is quiet",
            file=sys.stderr,
        )
        return 3
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="shard-calibrate",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE",
        help="the cluster file (standard output)",
    )
    add("--name", type=_name, default="here", help="the name of the cluster in the file (here)")
    add("--ranks", type=_ranks, default=4, metavar="N", help="the number of devices (4)")
    add(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="gloo on CPUs, nccl on GPUs (gloo)",
    )
    add(
        "--most",
        type=_bytes,
        metavar="BYTES",
        help="the bytes of the largest message (4 MiB; with nccl 256 MiB)",
    )
    add(
        "--rounds",
        type=positive,
        default=11,
        help="the number of turns of each probe; its time is their median (11)",
    )
    add(
        "--turn",
        type=seconds,
        default=0.01,
        metavar="S",
        help="the length of a turn in seconds (0.01)",
    )
    add(
        "--timeout",
        type=seconds,
        default=120.0,
        metavar="S",
        help="the maximum wait for a rank in seconds (120)",
    )
    return parser


def _ranks(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"expected 2 ranks or more, got {text}")
    return value


def _bytes(text: str) -> int:
    value = int(text)
    if value < SMALLEST:
        raise argparse.ArgumentTypeError(f"expected {SMALLEST} or more, got {text}")
    return value


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w$.]*", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"expected a name, got {text!r}; use letters, digits, _, $ and ."
        )
    return text


def other_load(before: float, after: float, ranks: int, cores: int) -> float:
    """Return the number of other running processes for each core, at least: by the load average
    before and after the ranks and this process ran."""
    return max(before, after - ranks - 1) / cores


def _measured(options: argparse.Namespace) -> tuple[Calibration, list[str], float]:
    """Return the calibration, a description of the machine, and the load of other processes for
    each core."""
    import scipy  # noqa: F401 - before anything is measured
    import torch

    from shardir.api import compile
    from shardir.backend.torch.launch.measure import times

    cpu = options.backend == "gloo"
    most = options.most or LARGEST_MESSAGE[options.backend]
    given = probes(options.ranks, most, cpu)
    compiled = compile(module(given, options.ranks), "", "probes.ir")
    before = os.getloadavg()[0]
    with (
        scratch_folder() as folder,
        _progress(options.rounds) as show,
    ):
        program = compiled.save(folder / "program")
        run = Options(backend=options.backend, timeout=options.timeout)
        traces = list[list[RankCalls]]()
        found = times(
            [program], options.rounds, options.turn, run, show, traces.extend, ["processor"]
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = other_load(before, os.getloadavg()[0], options.ranks, cores or 1)
    memory = _memory() // options.ranks if cpu else torch.cuda.get_device_properties(0).total_memory
    seconds = medians(compiled, found[0], traces[0])
    calibration = fitted(given, compiled, seconds, unmeasured(options.ranks, memory))
    device = _processor() if cpu else torch.cuda.get_device_name(0)
    about = [
        f"shard-calibrate: {options.ranks} ranks on {options.backend}, {cores} cores, {device}, "
        f"torch {torch.__version__}",
        f"{len(given)} probes on all ranks at once, messages of up to {most} B, medians of "
        f"{options.rounds} rounds",
        f"Other running processes for each core: {load:.1f}; above {MAX_LOAD:g}, latencies grow",
    ]
    return calibration, about, load


@contextmanager
def _progress(rounds: int) -> Any:
    """Show the number of completed rounds on stderr: a bar on a terminal, else a line each."""
    if not sys.stderr.isatty():
        yield lambda done: print(f"round {done}/{rounds}", file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=rounds)
        yield lambda done: bar.update(task, completed=done)


def _memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """Return the processor's name, if the system reports it, as text for a comment."""
    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return re.sub(r"[^ -~]", "?", found[1].strip() if found else name)


if __name__ == "__main__":
    sys.exit(command("calibrate"))
