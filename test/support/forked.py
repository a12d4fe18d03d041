"""Ranks of tests, which are forked from one process: see rank_server.py.

`started` starts a script as `subprocess.Popen` does; `run_ranks` runs one on several ranks.
"""

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shardir.backend.torch.launch import fork_server
from shardir.backend.torch.launch.forks import Fork, Forks
from shardir.tools.bench import PATH
from support.extent import extent

SECONDS = 60


@cache
def servers() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    """The process that forks the servers of this process, and a socket on which it receives their
    sockets. It imports torch while the caller goes on."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).parent / "rank_server.py", str(os.getpid()),
             str(theirs.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=[theirs.fileno()],
            start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return ours, process


COMPILING = {
    "checkpoint_rank", "decode_rank", "disturbances", "generate_rank", "loader_rank", "loop_rank",
    "node_agent", "pipeline_step_rank", "profiled_rank", "ray_rank", "step_rank", "trainer_rank",
    "zero_rank",
}  # fmt: skip
"""The scripts that compile, or run torch's optimizers or DTensors, which import its compiler."""


SERVING: list[int] = []
"""The numbers of the servers of this process."""


class Server(Forks):
    """A process that forks ranks of this process' tests, whatever their programs.

    Args:
        compiles: whether it has imported the compilers of torch and of this project, which take a
            rank two seconds.
    """

    def __init__(self, compiles: bool = False) -> None:
        self.compiles = compiles
        super().__init__(sys.executable, {}, SECONDS)
        atexit.register(self.close)

    def _server(self, other: socket.socket, environment: Mapping[str, str]) -> "ForkOfServers":
        socket.send_fds(servers()[0], [b"c" if self.compiles else b"."], [other.fileno()])
        self._socket.settimeout(self.timeout)
        SERVING.append(int(self._socket.recv(len(str(2**64)))))
        return ForkOfServers(SERVING[-1])

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int,
        files: Sequence[int] = (),
    ) -> Fork:  # fmt: skip
        if not self.compiles and Path(argv[0]).stem in COMPILING:
            return server(compiles=True).start(argv, environment, output, files)
        return super().start(argv, environment, output, files)

    def import_runtime(self, folder: Path) -> None:
        pass


class ForkOfServers:
    """A process that ends when its socket is closed, as a `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid

    def poll(self) -> int | None:
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self, timeout: float) -> None:
        pass

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


@cache
def server(compiles: bool = False) -> Server:
    return Server(compiles)


class LateServer:
    """The server, which starts when a run looks at it. No module of tests has it as a name of its
    own, at which pytest would look."""

    def __getattr__(self, name: str) -> Any:
        return getattr(server(), name)


LATE_SERVER: Any = LateServer()


def fork() -> int:
    """Fork, and handle no signal meanwhile: what a handler raises in what modules have asked Python
    to call around a fork is printed and lost."""
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


class OwnForks(Forks):
    """A process that is itself forked from this one, which has imported torch, and forks others."""

    def _server(self, other: socket.socket, environment: Mapping[str, str]) -> "Child":
        parent, pid = os.getpid(), fork()
        if pid == 0:
            try:
                os.setsid()
                fork_server.end_with(parent)
                for number in (signal.SIGTERM, signal.SIGHUP):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                self._socket.close()
                fork_server.serve(other)
            finally:
                os._exit(0)
        return Child(pid)


class Child:
    """A process that is forked from this one, as a `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 1e9) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def spent() -> float:
    """Return the CPU seconds of the servers of this process, and of their ranks that have ended."""
    stats = [Path(f"/proc/{pid}/stat").read_text() for pid in SERVING]
    ticks = sum(int(n) for stat in stats for n in stat.rpartition(")")[2].split()[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def started(argv: list[Any], env: Mapping[str, str], stdout: Any) -> Fork:
    """Start `python argv...`, with the path that pytest has."""
    given = env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, [*map(str, PATH), given]))
    return server().start(
        [str(word) for word in argv], {**env, "PYTHONPATH": path}, stdout.fileno()
    )


def in_agents(by: Forks | None = None) -> dict[str, Any]:
    """Return replacements of names of torch's module subprocess_handler, so that its agent forks
    ranks. One that has ended may be unknown."""

    def popen(args: list[str], env: dict[str, str], stdout: Any, **_: object) -> Fork:
        return (by or server()).start(args[1:], env, stdout.fileno())

    def killpg(pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)

    return {"Popen": popen, "os": SimpleNamespace(environ=os.environ, killpg=killpg)}


def run_ranks(
    script: Path, count: int, arguments: list[Any], seconds: float, compared: bool = True
) -> list[str]:
    """Run `script *arguments RANK` for `count` ranks; return the output of each.

    Ranks that have not ended after `seconds` are killed. In the long form torch compares their
    collectives, if they are to be `compared`: it numbers messages with them, of which each rank of
    a group then has equally many."""
    debug = extent("OFF", "DETAIL") if compared else "OFF"
    env = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": debug, "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 - read below
    ranks = [started([script, *arguments, rank], env, log) for rank, log in enumerate(logs)]
    try:
        until = time.monotonic() + seconds
        for rank in ranks:
            rank.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.wait()
    out = []
    for rank, log in zip(ranks, logs, strict=True):
        log.seek(0)
        out.append(f"{log.read().decode(errors='replace')}\n(ended with {rank.returncode})")
        log.close()
    return out
