"""Processes that are forked from one that has imported torch: see fork_server.py.

with forks(options) as here:
    rank = here.start(["program.py", "--steps", "3"], environment(options), log.fileno())
    rank.wait()
"""

import json
import math
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from shardir.backend.runs import LaunchError, Options
from shardir.backend.torch.shardir_runtime.plan.program import START_SECONDS
from shardir.syntax.descriptors import keep_from_forks, release

CHUNK = 1 << 16
END_SECONDS = 10.0
"""The longest wait for the end of the fork server and its processes, in seconds."""

_SHARED: ContextVar["Forks | None"] = ContextVar("shared", default=None)


@contextmanager
def forks(options: Options, shares: bool = True) -> Iterator["Forks"]:
    """Start the process that forks ranks, unless there is one in this context. It imports torch
    while the caller goes on.

    Args:
        shares: whether others in this context use a process that is started here.

    Raises:
        LaunchError: it cannot be started.
    """
    found = _SHARED.get()
    if found is not None and found.python == options.python:
        yield found
        return
    try:
        started = Forks(options.python, environment(options), START_SECONDS + options.timeout)
    except OSError as error:
        raise LaunchError(f"the ranks cannot be started: {error.strerror or error}") from None
    try:
        with share_forks(started) if shares else nullcontext():
            yield started
    finally:
        started.close()


@contextmanager
def share_forks(by: "Forks") -> Iterator[None]:
    """Let all runs in this context fork their ranks from one process."""
    token = _SHARED.set(by)
    try:
        yield
    finally:
        _SHARED.reset(token)


def environment(options: Options) -> dict[str, str]:
    """Return the environment that all ranks have."""
    return {
        "OMP_NUM_THREADS": "1" if options.on_cpus else "4",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        **os.environ,
    }


class Forks:
    """A process that forks ranks.

    Attributes:
        script: the file that it runs.

    Args:
        python: the interpreter of the process and the ranks.
        environment: the environment in which it imports torch.
        timeout: the longest time of the import of torch, in seconds.

    Raises:
        OSError: the process cannot be started.
    """

    script = Path(__file__).with_name("fork_server.py")

    def __init__(self, python: str, environment: Mapping[str, str], timeout: float):
        self.python, self.timeout = python, timeout
        self._codes: dict[int, int] = {}
        self._text, self._used, self._ended = b"", False, False
        self._socket, other = socket.socketpair()
        keep_from_forks(self._socket.fileno())
        with other:
            try:
                self.process = self._server(other, environment)
            except OSError:
                release(self._socket.fileno())
                self._socket.close()
                raise

    def _server(self, other: socket.socket, environment: Mapping[str, str]) -> Any:
        return subprocess.Popen(
            [self.python, "-P", self.script, str(os.getpid()), str(other.fileno())],
            env=environment, pass_fds=[other.fileno()], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], output: int,
        files: Sequence[int] = (),
    ) -> "Fork":  # fmt: skip
        """Start `python argv...`, in a session of its own.

        Args:
            output: the descriptor of the file that it writes to.
            files: descriptors of this process that it has too.

        Raises:
            OSError: it cannot be started.
        """
        self._used = True
        request = {
            "argv": argv, "env": dict(environment), "cwd": os.getcwd(), "fds": files,
            "open_files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }  # fmt: skip
        answer = self._ask(request, [output, *files])
        if "error" in answer:
            raise OSError(0, answer["error"])
        return Fork(self, answer["pid"])

    def import_runtime(self, folder: Path) -> None:
        """Make the process import the runtime beside a program, whose ranks it then forks."""
        self._send({"import": str(folder.absolute())})

    def code(self, pid: int, seconds: float = 0.0) -> int | None:
        """Return the exit code of a process that ends within some seconds; else None."""
        if pid not in self._codes:
            self._answers(seconds)
        return self._codes.get(pid, -signal.SIGKILL if self._ended else None)

    def reap(self, pid: int) -> None:
        """Let go of the number of a process that has ended."""
        self._codes.pop(pid, None)
        with suppress(OSError):
            self._ask({"reap": pid})

    def close(self) -> None:
        """End all processes."""
        release(self._socket.fileno())
        self._socket.close()
        if not self._used:  # it imports torch
            self.process.kill()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        """Return the answer of a request.

        Raises:
            OSError: there is none.
        """
        until, answers = time.monotonic() + self.timeout, list[dict[str, Any]]()
        self._send(request, files)
        while not answers:
            if self._ended:
                raise OSError(0, "the process that it is a fork of has ended")
            if time.monotonic() > until:
                raise OSError(0, f"torch was not imported within {self.timeout:g} s")
            answers = self._answers(until - time.monotonic())
        return answers[0]

    def _send(self, request: dict[str, Any], files: Sequence[int] = ()) -> None:
        line = json.dumps(request).encode() + b"\n"
        self._socket.settimeout(self.timeout)
        with suppress(OSError):  # where it has ended, there will be no answer
            sent = socket.send_fds(self._socket, [line], files) if files else 0
            self._socket.sendall(line[sent:])

    def _answers(self, seconds: float) -> list[dict[str, Any]]:
        """Read the messages of some seconds. Record exit codes, and return other messages."""
        if self._ended:
            return []
        self._socket.settimeout(max(0.0, seconds))
        try:
            data = self._socket.recv(CHUNK)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            data = b""
        self._ended = not data  # Linux has killed all that it has forked
        *lines, self._text = (self._text + data).split(b"\n")
        rest = []
        for line in lines:
            answer = json.loads(line)
            if "code" in answer:
                self._codes[answer["pid"]] = answer["code"]
            else:
                rest.append(answer)
        return rest


class Fork:
    """A process with the interface of `subprocess.Popen`. No other process gets its number before
    `wait` returns."""

    def __init__(self, forks: Forks, pid: int):
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None
        self._reaped = False

    def poll(self) -> int | None:
        """Return the exit code, -N if signal N has ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._forks.code(self.pid)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Wait for the end; return the exit code.

        Raises:
            subprocess.TimeoutExpired: it does not end within `timeout` seconds.
        """
        until = time.monotonic() + timeout
        while self.poll() is None:
            left = until - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            self._forks.code(self.pid, min(left, 1.0))
        if not self._reaped:
            self._reaped = True
            self._forks.reap(self.pid)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """Kill the process and all processes of its session."""
        if not self._reaped:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
