"""Ranks that are forked, as `subprocess.Popen` starts them: see rank_server.py.

`Forked` has the part of the interface of `Popen` that the launcher uses, and SUBPROCESS that of the
module; `run_ranks` runs a script of the tests on several ranks.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from extent import extent

POLL_SECONDS, ANSWER_SECONDS = 0.01, 60


class Server:
    """The server of this process, and the exit codes of its ranks."""

    def __init__(self) -> None:
        self.socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.codes: dict[int, int] = {}
        self.process = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "rank_server.py", str(other.fileno())],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, pass_fds=[other.fileno()],
        )  # fmt: skip
        other.close()
        atexit.register(self.close)

    def start(self, argv: list[str], env: dict[str, str], output: int, fds: tuple[int, ...]) -> int:
        request = {"argv": argv, "env": env, "cwd": os.getcwd(), "fds": fds}
        socket.send_fds(self.socket, [json.dumps(request).encode()], [output, *fds])
        while "code" in (answer := self.answer(ANSWER_SECONDS)):
            pass
        self.codes.pop(answer["pid"], None)  # that of an earlier process of the same number
        return answer["pid"]

    def answer(self, seconds: float) -> dict[str, int]:
        """Return the next message; raise TimeoutError where none arrives within `seconds`."""
        self.socket.settimeout(seconds)
        answer = json.loads(self.socket.recv(1 << 16))
        if "code" in answer:
            self.codes[answer["pid"]] = answer["code"]
        return answer

    def code(self, pid: int) -> int | None:
        """Return the exit code of a rank; None while it runs."""
        while True:
            try:
                self.answer(0)
            except BlockingIOError:
                return self.codes.get(pid)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


server = cache(Server)


def spent() -> float:
    """Return the CPU seconds of the server, if there is one, and of its ranks that have ended."""
    if not server.cache_info().currsize:
        return 0.0
    _, _, fields = Path(f"/proc/{server().process.pid}/stat").read_text().rpartition(")")
    return sum(map(int, fields.split()[11:15])) / os.sysconf("SC_CLK_TCK")


class Forked:
    """A rank, as a `subprocess.Popen`."""

    def __init__(self, argv: list[Any], env: dict[str, str], stdout: Any, pass_fds=(), **_: object):
        python, *argv = map(str, argv)
        assert python == sys.executable
        self.returncode: int | None = None
        self.pid = server().start(argv, env, stdout.fileno(), tuple(pass_fds))

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = server().code(self.pid)
        return self.returncode

    def wait(self, timeout: float = ANSWER_SECONDS) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_SECONDS)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.killpg(self.pid, 9)


SUBPROCESS = SimpleNamespace(
    Popen=Forked, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT,
    TimeoutExpired=subprocess.TimeoutExpired,
)  # fmt: skip
"""In place of the module `subprocess`."""


def in_agents() -> dict[str, Any]:
    """Return replacements of names of torch's module subprocess_handler, so that its agent forks
    ranks. The server reaps one that has ended, which is then unknown."""

    def started(args: list[Any], env: dict[str, str], stdout: Any, **_: object) -> Forked:
        return Forked(args, env, stdout)

    def killpg(pid: int, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)

    return {"Popen": started, "os": SimpleNamespace(environ=os.environ, killpg=killpg)}


def run_ranks(script: Path, count: int, arguments: list[Any], seconds: float) -> list[str]:
    """Run `script *arguments RANK` for `count` ranks; return the output of each.

    Ranks that have not ended after `seconds` are killed. In the long form torch compares their
    collectives."""
    debug = extent("OFF", "DETAIL")
    env = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": debug, "GLOO_SOCKET_IFNAME": "lo"}
    logs = [tempfile.TemporaryFile() for _ in range(count)]  # noqa: SIM115 - read below
    ranks = [
        Forked([sys.executable, script, *arguments, rank], env, log)
        for rank, log in enumerate(logs)
    ]
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
