"""The commands of a run on several machines: the line of each, its start over ssh, a job of Slurm.

All words of a command are quoted, whatever is in them.
"""

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Sequence
from typing import TextIO

from shardir.backend.runs import LaunchError, RunError

PORT = 29400
"""The port of a rendezvous that no --rdzv names."""

HOST = re.compile(r"([\w.][\w.+-]*@)?([\w.][\w.-]*)")
"""The name or address of a machine, as ssh takes it: it begins with no dash, as an option does."""

SECONDS = 10.0
"""The wait for machines that have been asked to end, beyond the time-out of the run."""

AFTER_INPUT = (
    "{ { %s\n} & run=$!; { cat; kill $run; } <&3 >/dev/null 2>&1 & watch=$!; wait $run; code=$?; "
    "kill $watch 2>/dev/null; exit $code; } 3<&0"
)
"""A line of a shell that asks a command to end when its input ends, as when ssh does."""


def hosts_of(text: str) -> list[str]:
    """Return the machines of `a,b`.

    Raises:
        LaunchError: it has other characters, or one machine twice.
    """
    hosts = text.split(",")
    for host in hosts:
        if not HOST.fullmatch(host):
            raise LaunchError(f"--hosts: expected names such as node1,me@node2, got {host!r}")
    if len(set(hosts)) < len(hosts):
        raise LaunchError(f"--hosts: expected each machine once, got {text}")
    return hosts


def lines_of(
    hosts: Sequence[str], words: Sequence[str], nnodes: str, rdzv: str | None, last: bool = False
) -> dict[str, str]:
    """Return the shell line of each machine.

    Args:
        words: the command, without the options that differ between machines.
        nnodes: the numbers of machines, `2` or `1:2`.
        rdzv: the rendezvous, by default at the first machine.
        last: whether the shell does nothing after the line, so that signals to it reach the run.
    """
    place = rdzv or f"{hosts[0].rpartition('@')[2]}:{PORT}"
    found, run_as = {}, "exec " if last else ""
    for k, host in enumerate(hosts):
        node = [f"--nnodes={nnodes}", f"--node-rank={k}", f"--rdzv={place}"]
        run = shlex.join([*words, *node])
        found[host] = f"cd {shlex.quote(os.getcwd())} && {run_as}{run}"
    return found


def start(lines: dict[str, str], timeout: float, out: TextIO) -> int:
    """Run the line of each machine by ssh, until all end. Print the output of the first machine,
    and of the other machines with their names in front. A signal ends all, as in a run on one
    machine.

    Args:
        timeout: the time-out of the run, in seconds.

    Returns:
        The exit code of the first machine if it is not 0, else the first other code.

    Raises:
        LaunchError: there is no ssh; RunError: it fails.
    """
    running: dict[str, subprocess.Popen[str]] = {}
    readers = []
    try:
        for host, line in lines.items():
            wrapped = AFTER_INPUT % line
            argv = ["ssh", "-o", "BatchMode=yes", host, f"sh -c {shlex.quote(wrapped)}"]
            try:
                ssh = subprocess.Popen(
                    argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    text=True, errors="replace", start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise LaunchError(f"--start: cannot run ssh: {error.strerror or error}") from None
            label = f"{host}: " if running else ""
            running[host] = ssh
            readers.append(threading.Thread(target=_copy, args=(ssh, label, out), daemon=True))
            readers[-1].start()
        codes = _codes(running)
    finally:
        for ssh in running.values():
            assert ssh.stdin is not None
            ssh.stdin.close()
        for ssh in running.values():
            try:
                ssh.wait(timeout + SECONDS)
            except subprocess.TimeoutExpired:
                ssh.kill()
        for reader in readers:
            reader.join(SECONDS)
    for host, code in codes.items():
        if code == 255:
            raise RunError(f"--start: ssh to {host} failed; try `ssh {host} true`")
    return next((code for code in codes.values() if code), 0)


def _copy(ssh: "subprocess.Popen[str]", label: str, out: TextIO) -> None:
    assert ssh.stdout is not None
    for line in ssh.stdout:
        print(f"{label}{line}", end="", file=out, flush=True)


def _codes(running: dict[str, "subprocess.Popen[str]"]) -> dict[str, int]:
    """Wait for all; where ssh itself fails, for no other one."""
    codes = dict[str, int]()
    while len(codes) < len(running):
        for host, ssh in running.items():
            if host in codes:
                continue
            try:
                codes[host] = ssh.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
            if codes[host] == 255:
                return codes
    return codes


SLURM = """\
#!/bin/bash
#SBATCH --job-name=shardir
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
{resources}#SBATCH --signal=TERM@120
# Other options, such as --partition, --time and --mem: give them to sbatch, or add them here.
set -eu
cd {folder}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
exec srun {srun}bash -c 'exec "$@" --node-rank="$SLURM_NODEID"' node \\
    {command} \\
    --nnodes={nnodes} --rdzv="$first:$port"
"""


def slurm(words: Sequence[str], nnodes: str, ranks: int, gpus: bool) -> str:
    """Return a job for sbatch: one task on each machine, which runs the command.

    Args:
        words: the words of the command.
        nnodes: the numbers of machines, `2` or `1:2`.
        ranks: of a machine; `gpus`: each has a GPU.
    """
    low, _, high = nnodes.rpartition(":")
    # Without a machine the run continues on the rest, if --nnodes allows it.
    spare = bool(low) and low != high
    resources = [f"--gpus-per-node={ranks}"] if gpus else []
    resources += [f"--cpus-per-task={ranks * (4 if gpus else 1)}"]
    resources += ["--no-kill"] if spare else []
    return SLURM.format(
        nodes=high, resources="".join(f"#SBATCH {option}\n" for option in resources),
        folder=shlex.quote(os.getcwd()), command=shlex.join(words),
        srun="--no-kill --kill-on-bad-exit=0 " if spare else "", nnodes=nnodes,
    )  # fmt: skip
