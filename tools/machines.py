"""`--hosts`, `--start` and `--slurm` of shard-run: its command on each of several machines."""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from shardir.backend.runs import LaunchError, Nodes, Options

OWN = ("hosts", "start", "slurm", "nnodes", "node_rank", "rdzv", "nproc")
"""The options of where the command runs, from which the options of each machine follow."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add(
        "--hosts", metavar="A,B",
        help="print the line for each of these machines, and run nothing",
    )  # fmt: skip
    add("--start", action="store_true", help="start the lines of --hosts, by ssh")
    add("--slurm", action="store_true", help="print a job for sbatch, and run nothing")


def on_machines(
    program: Sequence[str], parser: argparse.ArgumentParser, given: argparse.Namespace
) -> int | None:
    """Print or start the lines of all machines. Returns the exit code; None without these options.

    Args:
        program: the words that start shard-run on a machine.

    Raises:
        LaunchError: the command cannot run so.
    """
    if given.hosts is None and not given.slurm:
        if given.start:
            raise LaunchError("--start: expected --hosts A,B, the machines")
        return None
    from shardir.backend.torch.launch import machines
    from shardir.backend.torch.launch.start import check_nodes, read_plan

    flag = "--slurm" if given.slurm else "--hosts"
    for wrong in ("node_rank", "rdzv") if given.slurm else ("node_rank",):
        if getattr(given, wrong) != parser.get_default(wrong):
            raise LaunchError(f"{flag}: expected no --{wrong.replace('_', '-')}, which it finds")
    if given.slurm and given.hosts is not None:
        raise LaunchError("--slurm: expected no --hosts, which Slurm chooses")
    if not os.path.isdir(given.program):
        raise LaunchError(f"{flag}: expected a directory that shard-opt wrote, got {given.program}")
    hosts = [] if given.slurm else machines.hosts_of(given.hosts)
    nodes = Nodes(given.nnodes)
    if hosts and given.nnodes == parser.get_default("nnodes"):
        nodes = Nodes(len(hosts))
    if hosts and nodes.high != len(hosts):
        raise LaunchError(f"--nnodes: expected {len(hosts)}, as --hosts has, got {nodes}")
    plan = read_plan(given.program, given.nproc)
    options = replace(Options.parsed(given), nnodes=nodes, rdzv="found:1", node_rank=0)
    check_nodes(plan, options)
    words = [*program, *words_of(parser, given, OWN)]
    if given.slurm:
        ranks = plan.size // nodes.high
        print(machines.slurm(words, nodes, ranks, options.backend == "nccl"), end="")
        return 0
    lines = machines.lines_of(hosts, words, nodes, given.rdzv, given.start)
    if given.start:
        return machines.start(lines, options.timeout, sys.stdout)
    for host, line in lines.items():
        print(f"# on {host}", line, sep="\n")
    return 0


def words_of(
    parser: argparse.ArgumentParser, given: argparse.Namespace, without: Collection[str]
) -> list[str]:
    """Return the words of the given options, without some options."""
    places, found = [], []
    for action in parser._actions:
        value = getattr(given, action.dest, action.default)
        if action.dest in without or value is None or value == action.default:
            continue
        if not action.option_strings:
            text = str(value)
            places.append(os.path.join(".", text) if text.startswith("-") else text)
            continue
        flag = action.option_strings[-1]
        if value is True:
            found.append(flag)
        else:
            several = value if isinstance(value, list | tuple) else [value]
            found += [f"{flag}={one}" for one in several]
    return [*places, *found]
