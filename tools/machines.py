"""`--hosts`, `--start` and `--slurm` of shard-run: its command on several machines."""

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace

from shardir.backend.runs import LaunchError, Nodes, Options

OWN = ("hosts", "start", "slurm", "nnodes", "node_rank", "rdzv", "nproc")
"""The options for the placement of ranks, which each machine's command replaces."""


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
    program: Sequence[str], parser: argparse.ArgumentParser, options: argparse.Namespace
) -> int | None:
    """Print or start the commands of all machines. Return the exit code; None without these
    options.

    Args:
        program: the words that start shard-run on a machine.

    Raises:
        LaunchError: the options contradict each other or the program.
    """
    if options.hosts is None and not options.slurm:
        if options.start:
            raise LaunchError("--start: expected --hosts A,B, the machines")
        return None
    from shardir.backend.torch.launch import machines
    from shardir.backend.torch.launch.start import check_nodes, read_plan

    flag = "--slurm" if options.slurm else "--hosts"
    for name in ("node_rank", "rdzv") if options.slurm else ("node_rank",):
        if getattr(options, name) != parser.get_default(name):
            raise LaunchError(f"{flag}: expected no --{name.replace('_', '-')}, which it finds")
    if options.slurm and options.hosts is not None:
        raise LaunchError("--slurm: expected no --hosts, which Slurm chooses")
    if not os.path.isdir(options.program):
        raise LaunchError(
            f"{flag}: expected a directory that shard-opt wrote, got {options.program}"
        )
    hosts = [] if options.slurm else machines.hosts_of(options.hosts)
    nodes = Nodes(options.nnodes)
    if hosts and options.nnodes == parser.get_default("nnodes"):
        nodes = Nodes(len(hosts))
    if hosts and nodes.high != len(hosts):
        raise LaunchError(f"--nnodes: expected {len(hosts)}, as --hosts has, got {nodes}")
    plan = read_plan(options.program, options.nproc)
    run_options = replace(Options.parsed(options), nnodes=nodes, rdzv="found:1", node_rank=0)
    check_nodes(plan, run_options)
    words = [*program, *words_of(parser, options, OWN)]
    if options.slurm:
        ranks = plan.size // nodes.high
        print(machines.slurm(words, nodes, ranks, run_options.backend == "nccl"), end="")
        return 0
    lines = machines.lines_of(hosts, words, nodes, options.rdzv, options.start)
    if options.start:
        return machines.start(lines, run_options.timeout, sys.stdout)
    for host, line in lines.items():
        print(f"# on {host}", line, sep="\n")
    return 0


def words_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace, without: Collection[str]
) -> list[str]:
    """Return the command-line words of all options except those in `without`."""
    positional, flags = [], []
    for action in parser._actions:
        value = getattr(options, action.dest, action.default)
        if action.dest in without or value is None or value == action.default:
            continue
        if not action.option_strings:
            text = str(value)
            positional.append(os.path.join(".", text) if text.startswith("-") else text)
            continue
        flag = action.option_strings[-1]
        if value is True:
            flags.append(flag)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            flags += [f"{flag}={word}" for word in values]
    return [*positional, *flags]
