"""The processes of a run on this machine: started, watched, and ended.

1. Every rank is a process group, forked by a process that has imported torch (forks.py). None is
   left when `run` returns. If the launcher is killed, Linux kills that process, and so the ranks.
2. The first rank that fails ends the run at once. The error names the rank that is the cause, not a
   rank that lost its connection to it.
3. A run is complete when every rank has reported its end. A rank that exits earlier has failed,
   whatever its exit code.
4. Every wait is bounded: a rank that stops or hangs ends the run after the time-out.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardir.backend.runs import LaunchError, OnEvent, Options, RunError
from shardir.backend.torch.launch.forks import Fork, Forks, environment, forks
from shardir.backend.torch.launch.outcome import TAIL_BYTES, Outcome
from shardir.backend.torch.launch.positions import Records, Standing, WaitSamples
from shardir.backend.torch.shardir_runtime.collectives.position import POSITIONS
from shardir.backend.torch.shardir_runtime.plan.program import START_SECONDS
from shardir.backend.torch.shardir_runtime.run.events import FINISH, MAY_FINISH, event_of

if TYPE_CHECKING:
    from shardir.backend.torch.launch.feed import Pipes

POLL_SECONDS = 0.05
GRACE_SECONDS = 0.5  # after the first error, for the other ranks' messages
CAUSE_SECONDS = 5.0  # the same where the first rank lost a connection: the other one has ended
TERM_SECONDS = 2.0  # between asking a rank to end and killing it
OWN_FILES = 64  # open files beside one for each rank: in the launcher a log, in a rank a connection
UNREAD_BYTES = 1 << 24  # a line that is longer is no event
STOPPED = {"T": "is stopped", "t": "is stopped by a debugger"}
STATES = {**STOPPED, "D": "waits for a device"}


def allow_files(ranks: int) -> None:
    """Raise the limit of open files for this process and its ranks.

    Raises:
        LaunchError: the system does not allow the number of files that ranks need.
    """
    needed = ranks + OWN_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaunchError(
            f"expected a limit of at least {needed} open files for {ranks} ranks, got {hard}; "
            f"raise it (ulimit -n {needed}), or use a smaller mesh"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class Ranks:
    """The processes of one run.

    Args:
        variables: environment variables of all ranks, besides the variables of this process.
        stage: the number of ranks of a stage; by default all.
    """

    def __init__(
        self, program: Path, count: int, options: Options, feed: "Pipes | None" = None,
        variables: Mapping[str, str] | None = None, stage: int | None = None,
    ):  # fmt: skip
        self.program, self.count, self.options, self.feed = program, count, options, feed
        self.variables, self.stage = variables or {}, stage or count
        self.processes: list[Fork] = []
        self.logs: list[Any] = []  # the output of each rank: files without a name
        self.outcome = Outcome()
        self.waits = WaitSamples(self.stage)
        self._started = False  # the ranks have met
        self._unread = b""
        self._ended = False  # no rank holds the other end of the events' pipe any more
        self._drained = False  # nothing was in it at the last poll

    def run(self, on_event: OnEvent) -> None:
        """Start all ranks; return when all have ended.

        Raises:
            LaunchError: they cannot be started; RunError: one fails.
        """
        with self.started():
            try:
                self.watch(on_event)
            except (KeyboardInterrupt, SystemExit):
                if self.options.checkpoints is not None and self._started:
                    self._interrupt(on_event)
                raise

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Start all ranks for a block, at the end of which none is left.

        Raises:
            LaunchError: they cannot be started.
        """
        allow_files(self.count)
        with (
            forks(self.options, shares=False) as here,
            socket.create_server(("127.0.0.1", 0), backlog=self.count + 8) as store,
        ):
            here.import_runtime(self.program.parent)
            try:
                self._records = Records(self.count)
            except OSError as error:
                raise LaunchError(
                    f"the positions of {self.count} ranks cannot be recorded: {error.strerror}; "
                    "allow longer files (ulimit -f)"
                ) from None
            self._events, events = os.pipe()
            try:
                for rank in range(self.count):
                    try:
                        self._start(here, rank, events, store)
                    except OSError as error:
                        reason = error.strerror or error
                        raise LaunchError(f"rank {rank} cannot be started: {reason}") from None
                os.close(events)
                events = -1
                yield
            finally:
                if events >= 0:
                    os.close(events)
                self.stop()
                os.close(self._events)
                self._records.close()
                for log in self.logs:
                    log.close()
                if self.feed is not None:
                    self.feed.close()

    def _start(self, here: Forks, rank: int, events: int, store: socket.socket) -> None:
        variables = {
            **environment(self.options),
            **self.variables,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.count),
            "LOCAL_WORLD_SIZE": str(self.count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.getsockname()[1]),
            "SHARDIR_EVENTS": f"fd:{events}",
            "SHARDIR_STORE_FD": str(store.fileno()),
            POSITIONS: f"fd:{self._records.fileno()}",
        }
        if self.options.callback is not None:
            variables[MAY_FINISH] = "1"
        passed, fed = [events, self._records.fileno()], list[str]()
        if rank == 0:
            passed.append(store.fileno())
        if self.feed is not None:
            passed.append(self.feed.readers[rank])
            fed = self.feed.words(rank)
        self.logs.append(tempfile.TemporaryFile())  # noqa: SIM115 - run() closes it
        argv = [str(self.program), *self.options.words(), *fed]
        self.processes.append(here.start(argv, variables, self.logs[rank].fileno(), passed))

    def watch(self, on_event: OnEvent, until: Callable[[], bool] | None = None) -> None:
        """Pass on events until all ranks have ended, or until a condition holds.

        Raises:
            RunError: a rank fails, or nothing is heard of the ranks for too long.
        """
        last_sign = time.monotonic() + START_SECONDS
        while True:
            codes = self._codes()
            for event in self._read():
                last_sign = time.monotonic()
                on_event(event)
            if until is not None and until():
                return
            if self.feed is not None and self.feed.moved:
                last_sign = time.monotonic()  # the ranks waited for a batch
            if self.outcome.errors or (self._drained and self.outcome.left(codes)):
                self._fail(on_event)
            if None not in codes.values() and self._drained:
                return
            if time.monotonic() - last_sign > self.options.timeout + 5:
                story = (
                    f"nothing was heard of the ranks for {self.options.timeout:g} s"
                    f" ({self._silence()}); if a step takes longer than that, give a longer"
                    " --timeout"
                )
                raise RunError("\n".join([story, *self._standing().report(self._stopped_ranks())]))

    def _interrupt(self, on_event: OnEvent) -> None:
        """Ask the ranks to write a checkpoint and to end, and wait for it."""
        for process in self.processes:
            _signal(process, signal.SIGTERM)
        self.watch(on_event)

    def finish(self) -> None:
        """Ask that the present step of the training be the last one."""
        _signal(self.processes[0], FINISH)

    def _read(self) -> list[dict[str, Any]]:
        """Return the events that arrive within a poll."""
        if self._ended:
            time.sleep(POLL_SECONDS)
            self._drained = True
            return []
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            if self.feed is not None:
                self.feed.register(selector)
            ready = {key.fd for key, _ in selector.select(POLL_SECONDS)}
        if self.feed is not None:
            self.feed.write(ready)
        self._drained = self._events not in ready
        if self._drained:
            if not ready and self.count > 1:  # a sample at an event would find rank 0 in its report
                self.waits.add(self._records.read())
            return []
        data = os.read(self._events, 1 << 16)
        self._ended = not data
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._unread = self._unread[:UNREAD_BYTES]
        events = []
        for line in lines:
            event = event_of(line, self.count)
            if event is None:
                continue  # not ours: the program may write to any of its files
            if not self.outcome.add(event):
                self._started = True
                events.append(event)
        return events

    # ---- what went wrong ----

    def _fail(self, on_event: OnEvent) -> None:
        """Wait for the end or the message of the rank that is the cause; raise its error."""
        begun, seconds, cause = time.monotonic(), CAUSE_SECONDS, None
        while time.monotonic() - begun < seconds:
            for event in self._read():
                on_event(event)
            cause = self.outcome.cause(self._codes())
            lost = cause is None and self.outcome.first()["kind"] == "lost"
            seconds = CAUSE_SECONDS if lost else GRACE_SECONDS
        standing = self._standing()
        if cause is not None:
            places = self.outcome.places(cause, standing)
            raise RunError("\n".join([self._story(cause), *places, *self._advice(cause)]))
        silent = self._silence()
        if silent:
            story = f"{silent}: the others waited for it for {self.options.timeout:g} s"
        else:
            story = self._story(self.outcome.first()["rank"])
        raise RunError("\n".join([story, *standing.report(self._stopped_ranks())]))

    def _advice(self, cause: int) -> Iterator[str]:
        """Yield what to do where a rank was killed."""
        code, folder = self._codes()[cause], self.options.checkpoints
        if code is None or code >= 0:
            return
        less = "smaller batches, fsdp or recompute need less memory; "
        resume = "with --checkpoints FOLDER a run can go on from the last checkpoint"
        if folder is not None:
            resume = f"--resume {folder} goes on from the last checkpoint"
        yield f"  help: {less if code == -signal.SIGKILL else ''}{resume}"

    def _standing(self) -> Standing:
        records = dict(enumerate(self._records.read()))
        return Standing(records, self.program, self.stage)

    def _codes(self) -> dict[int, int | None]:
        """Return the exit codes of all ranks."""
        return {rank: process.poll() for rank, process in enumerate(self.processes)}

    def _story(self, rank: int) -> str:
        log = self.logs[rank].fileno()
        output = os.pread(log, TAIL_BYTES, max(0, os.fstat(log).st_size - TAIL_BYTES))
        return self.outcome.story(rank, self.processes[rank].poll(), output)

    def _silence(self) -> str:
        """Return the states of the ranks that have neither ended nor reported an error: of stopped
        ranks, or else of all of them."""
        states = self._states()
        chosen = {rank: states[rank] for rank in self._stopped_ranks()} or states
        return ", ".join(
            f"rank {rank} {STATES.get(state, 'is alive but does not answer')}"
            for rank, state in chosen.items()
        )

    def _states(self) -> dict[int, str]:
        return {
            rank: _state(process)
            for rank, process in enumerate(self.processes)
            if process.poll() is None and rank not in self.outcome.errors
        }

    def _stopped_ranks(self) -> list[int]:
        return [rank for rank, state in self._states().items() if state in STOPPED]

    # ---- the end ----

    def stop(self) -> None:
        """End every rank and the processes that it started: terminate, then kill."""
        try:
            for process in self.processes:
                _signal(process, signal.SIGTERM)
                _signal(process, signal.SIGCONT)  # a stopped one would not hear the first
            until = time.monotonic() + TERM_SECONDS
            while None in self._codes().values() and time.monotonic() < until:
                time.sleep(POLL_SECONDS)
        finally:  # also if a second Ctrl-C comes meanwhile
            for process in self.processes:
                _signal(process, signal.SIGKILL)  # its group: also what a dead rank had started
                process.wait()


def _state(process: Fork) -> str:
    """Return the state of a running process, as Linux abbreviates it."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "?"


def _signal(process: Fork, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)
