"""shard-calibrate: measure this machine with several ranks, and write its cluster file.

It measures products by element type, other ops by size, mixed as in a program, and collectives by
size and by the size of their group, on all ranks at once. It writes the parameters for which the
time model is closest, for `shard-opt --cost=FILE` and `shardir.cost.clusters.load`, and the errors
as comments.
"""

import argparse
import os
import platform
import re
import signal
import sys
from pathlib import Path

from shardir.backend.runs import LaunchError, Options, RankCalls
from shardir.cost import clusters
from shardir.diagnostics import ShardirError, counted, print_error
from shardir.syntax.files import scratch_folder, write_text
from shardir.tools.arguments import ToolParser, output_file, positive, seconds
from shardir.tools.commands import command
from shardir.tools.fitted_cluster import (
    Calibration,
    fit_cluster,
    initial_cluster,
    medians,
    text,
    working,
)
from shardir.tools.probe_functions import SMALLEST
from shardir.tools.probes import module, probes

EXAMPLES = """\
shard-calibrate --ranks 4 -o here.ir     one to two minutes, on a quiet machine
shard-opt net.ir -p train --cost=here.ir
"""

GROUPS = {
    "what is measured": ("output", "ranks", "backend", "links", "name"),
    "how": ("rounds", "turn", "most", "timeout"),
}
"""The arguments of shard-calibrate by what they are for."""

MAX_LOAD = 0.5
"""The number of other running processes per core above which times are unreliable: latencies are
then several times as long."""

LARGEST_MESSAGE = {"gloo": 1 << 22, "shm": 1 << 22, "nccl": 1 << 28}
"""The default of --most, in bytes, by backend."""


def main(arguments: list[str] | None = None) -> int:
    """Calibrate. Exit codes: 0 success, 1 a rank failed, 2 no start or no output, 3 the machine was
    too busy (the file is still written)."""
    parsed = parser()
    options = parsed.parse_args(arguments)
    if (options.ranks == 1) != (options.links is not None):
        got = "one rank without" if options.ranks == 1 else f"{options.ranks} ranks with"
        parsed.error(f"expected 2 ranks or more, or --ranks 1 with --links, got {got} --links")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        calibration, about, load = _measure(options)
    except ImportError as error:
        print_error(f"shard-calibrate requires {error.name}; use pip install 'shardir[calibrate]'")
        return 2
    except LaunchError as error:
        print_error(str(error))
        return error.exit_code
    except ShardirError as error:
        print_error(str(error))
        return 2
    result = text(options.name, calibration, about)
    if options.output is None:
        sys.stdout.write(result)
    else:
        try:
            write_text(options.output, result)
        except ShardirError as error:
            print_error(str(error))
            return 2
    if load > MAX_LOAD:
        print_error(
            f"expected a quiet machine, got {load:.1f} other running processes for each core; "
            "measure again when it is quiet"
        )
        return 3
    return 0


def parser() -> ToolParser:
    """Return the parser of shard-calibrate's arguments."""
    parser = ToolParser(
        "shard-calibrate", usage="[options] -o FILE", groups=GROUPS, examples=EXAMPLES,
        description=(__doc__ or "").replace("shard-calibrate: m", "M", 1),
    )  # fmt: skip
    add = parser.add_argument
    add(
        "-o",
        "--output",
        type=output_file,
        metavar="FILE",
        help="the cluster file (standard output)",
    )
    add("--name", type=_name, default="here", help="the name of the cluster in the file (here)")
    add("--ranks", type=positive, default=4, metavar="N", help="the number of devices (4)")
    add(
        "--links",
        metavar="CLUSTER",
        help="with one rank, whose links cannot be measured: the cluster, ready-made or a file, "
        "that has them",
    )
    add(
        "--backend",
        choices=tuple(LARGEST_MESSAGE),
        default="gloo",
        help="gloo or shm on CPUs, nccl on GPUs (gloo)",
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
    parser.arrange()
    return parser


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
    """Return a lower bound on the number of other running processes per core, from the load average
    before and after the ranks and this process ran."""
    return max(before, after - ranks - 1) / cores


def _measure(options: argparse.Namespace) -> tuple[Calibration, list[str], float]:
    """Return the calibration, a description of the machine, and the load of other processes per
    core."""
    import scipy  # noqa: F401 - before anything is measured
    import torch

    from shardir.api.compilation import compile
    from shardir.backend.torch.launch.measure import times

    links = clusters.load(options.links) if options.links else None
    cpu = options.backend != "nccl"
    most = options.most or LARGEST_MESSAGE[options.backend]
    all_probes = probes(options.ranks, most, cpu)
    compiled = compile(module(all_probes, options.ranks), "", "probes.ir")
    before = os.getloadavg()[0]
    with (
        scratch_folder() as folder,
        counted("measuring", options.rounds) as show,
    ):
        program = compiled.save(folder / "program")
        run = Options(backend=options.backend, timeout=options.timeout)
        traces = list[list[RankCalls]]()
        measured = times([program], options.rounds, options.turn, run, show, traces.extend)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = other_load(before, os.getloadavg()[0], options.ranks, cores or 1)
    memory = _memory() // options.ranks if cpu else torch.cuda.get_device_properties(0).total_memory
    seconds = medians(all_probes, compiled, measured[0], traces[0])
    at_work = working(compiled, measured[0], traces[0]) if cpu and not links else None
    start = initial_cluster(options.ranks, memory, links)
    calibration = fit_cluster(all_probes, compiled, seconds, start, at_work)
    device = _processor() if cpu else torch.cuda.get_device_name(0)
    about = [
        f"shard-calibrate: {options.ranks} rank{'s' * (options.ranks > 1)} on {options.backend}, "
        f"{cores} cores, {device}, torch {torch.__version__}",
        f"{len(all_probes)} probes on all ranks at once, messages of up to {most} B, medians of "
        f"{options.rounds} rounds",
        f"Other running processes for each core: {load:.1f}; above {MAX_LOAD:g}, latencies grow",
    ]
    return calibration, about, load


def _memory() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    """Return the processor's name, if the system reports it, as text for a comment."""
    name = platform.processor() or platform.machine()
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return re.sub(r"[^ -~]", "?", match[1].strip() if match else name)


if __name__ == "__main__":
    sys.exit(command("calibrate"))
