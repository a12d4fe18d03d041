"""The processes of a run on this machine: started, watched, and ended.

1. Every rank is a process group of its own; whatever happens, none is left when `run` returns.
   If the launcher itself is killed, Linux kills the ranks (they ask for it: runtime_process.py).
2. The first rank that fails ends the run at once; the error names the rank that is the cause, not
   the ones that lost their connection to it.
3. No wait is unbounded: a rank that stops or hangs ends the run after the time-out.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shardir.backend.interface import OnEvent, Options, RunError
from shardir.backend.torch.runtime.runtime_plan import START_SECONDS

POLL_SECONDS = 0.05
GRACE_SECONDS = 0.5  # for the other ranks' messages after the first failure
TERM_SECONDS = 2.0  # between asking a rank to end and killing it
TAIL_LINES, TAIL_BYTES = 15, 1 << 14


def arguments(options: Options) -> list[str]:
    """Return the options as the command line of runtime_process.py."""
    named = ("steps", "backend", "seed", "timeout", "threads")
    words = [word for name in named for word in (f"--{name}", str(getattr(options, name)))]
    return words + (["--dump", str(options.dump.resolve())] if options.dump else [])


class Ranks:
    """The processes of one run."""

    def __init__(self, program: Path, count: int, options: Options):
        self.program, self.count, self.options = program, count, options
        self.processes: list[subprocess.Popen] = []
        self.logs: list[Any] = []  # what each rank prints: files without a name
        self.errors: dict[int, dict[str, Any]] = {}  # the error event of each rank that sent one
        self._unread = b""
        self._ended = False  # no rank holds the other end of the events' pipe any more

    def run(self, on_event: OnEvent) -> None:
        """Start all ranks; return when all have ended. Raises RunError where one fails."""
        self._events, events = os.pipe()
        with socket.create_server(("127.0.0.1", 0), backlog=self.count + 8) as store:
            try:
                for rank in range(self.count):
                    self._start(rank, events, store)
                os.close(events)
                events = -1
                self._watch(on_event)
            finally:
                if events >= 0:
                    os.close(events)
                self.stop()
                os.close(self._events)
                for log in self.logs:
                    log.close()

    def _start(self, rank: int, events: int, store: socket.socket) -> None:
        environment = {
            "OMP_NUM_THREADS": "1" if self.options.backend == "gloo" else "4",
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            "SHARDIR_EVENTS": f"fd:{events}",
            "SHARDIR_LAUNCHER": str(os.getpid()),
            "SHARDIR_STORE_FD": str(store.fileno()),
        }
        self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115 - run() closes it
        self.processes.append(
            subprocess.Popen(
                [self.options.python, str(self.program), *arguments(self.options)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self.logs[rank],
                stderr=subprocess.STDOUT,
                pass_fds=(events, store.fileno()) if rank == 0 else (events,),
                start_new_session=True,
            )
        )

    def _watch(self, on_event: OnEvent) -> None:
        last_sign = time.monotonic() + START_SECONDS
        while True:
            states = [process.poll() for process in self.processes]
            events = self._read()
            for event in events:
                last_sign = time.monotonic()
                on_event(event)
            if any(states) or self.errors:
                self._fail(on_event)
            if None not in states and (self._ended or not events):
                return
            if time.monotonic() - last_sign > self.options.timeout + 5:
                raise RunError(self._stalled())

    def _read(self) -> list[dict[str, Any]]:
        """Return the events that arrive within a poll."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            if self._ended or not selector.select(POLL_SECONDS):
                time.sleep(POLL_SECONDS if self._ended else 0)
                return []
        data = os.read(self._events, 1 << 16)
        self._ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        events = []
        for line in lines:
            try:
                event = json.loads(line)
                kind = event["event"]
            except (ValueError, KeyError, TypeError):
                continue  # not ours: the program may write to any of its files
            if kind == "error":
                self.errors.setdefault(int(event["rank"]), event)
            else:
                events.append(event)
        return events

    # ---- what went wrong ----

    def _fail(self, on_event: OnEvent) -> None:
        """Wait briefly for the other ranks' messages; raise the error of the rank that is the
        cause."""
        until = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < until and not self._ended:
            for event in self._read():
                on_event(event)
        rank = self._cause()
        raise RunError(self._story(rank))

    def _cause(self) -> int:
        """Return the rank that is the cause: one that was killed, else the first that reported an
        error of its own, else one that ended without a message, else one that others wait
        for."""
        codes = [process.poll() for process in self.processes]
        own = sorted((e["time"], rank) for rank, e in self.errors.items() if e["kind"] != "peer")
        silent = [rank for rank, code in enumerate(codes) if rank not in self.errors]
        choices = [
            [rank for rank, code in enumerate(codes) if code is not None and code < 0],
            [rank for _, rank in own],
            [rank for rank in silent if codes[rank]],
            [rank for rank in silent if codes[rank] is None],
            sorted(self.errors, key=lambda rank: self.errors[rank]["time"]),
            [rank for rank, code in enumerate(codes) if code],
        ]
        return next(choice[0] for choice in choices if choice)

    def _story(self, rank: int) -> str:
        code, error = self.processes[rank].poll(), self.errors.get(rank)
        if error and error["kind"] == "plan":
            return error["message"]
        if code is None and not error:
            seconds = f"{self.options.timeout:g} s"
            return f"rank {rank} {self._doing(rank)}: the others waited for it for {seconds}"
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            memory = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
            headline = f"rank {rank} was killed by {name}{memory}"
        elif error:
            headline = f"rank {rank} failed: {error['message']}"
        else:
            headline = f"rank {rank} ended with exit code {code}"
        return "\n".join([headline, *(f"  | {line}" for line in self._tail(rank))])

    def _stalled(self) -> str:
        doing = ", ".join(
            f"rank {rank} {self._doing(rank)}"
            for rank, process in enumerate(self.processes)
            if process.poll() is None
        )
        return (
            f"nothing was heard of the ranks for {self.options.timeout:g} s ({doing}); if a step"
            " takes longer than that, give a longer --timeout"
        )

    def _doing(self, rank: int) -> str:
        """Return the state of a running rank, as the system reports it."""
        try:
            stat = Path(f"/proc/{self.processes[rank].pid}/stat").read_text()
            state = stat.rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = "?"
        names = {"T": "is stopped", "t": "is stopped by a debugger", "D": "waits for a device"}
        return names.get(state, "is alive but does not answer")

    def _tail(self, rank: int) -> list[str]:
        log = self.logs[rank].fileno()
        size = os.fstat(log).st_size
        text = os.pread(log, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-TAIL_LINES:]

    # ---- the end ----

    def stop(self) -> None:
        """End every rank and the processes that it started: terminate, then kill."""
        left = [process for process in self.processes if process.poll() != 0]
        try:
            for process in left:
                _signal(process, signal.SIGTERM)
                _signal(process, signal.SIGCONT)  # a stopped one would not hear the first
            until = time.monotonic() + TERM_SECONDS
            for process in left:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, until - time.monotonic()))
        finally:  # also if a second Ctrl-C comes meanwhile
            for process in left:
                _signal(process, signal.SIGKILL)  # its group: also what a dead rank had started
                process.wait()


def _signal(process: subprocess.Popen, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
