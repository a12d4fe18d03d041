"""The ranks of one node: of several machines, or of a run that is started again after errors.

Torch's elastic agent starts, watches and restarts them. This file adds the rendezvous
(rendezvous.py), the reports of the ranks, and the end of a run:

1. The node of rank 0 gets the events of the run; each node gets the last events of its own ranks.
2. A restarted run continues from its last checkpoint. Errors that a restart would repeat, such as
   errors of the plan, end the run; so does a node that leaves.
3. All nodes end with one error; the node of its cause shows the cause.
"""

import hashlib
import logging
import math
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.api import LogsDest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shardir.backend.runs import EmitResized, LaunchError, OnEvent, Options, RunError
from shardir.backend.torch.launch.network import address_towards, interface_of
from shardir.backend.torch.launch.node_positions import NodePositions
from shardir.backend.torch.launch.outcome import FINAL, TAIL_BYTES, Outcome
from shardir.backend.torch.launch.positions import Standing, ranks_of_a_stage
from shardir.backend.torch.launch.ranks import TERM_SECONDS, allow_files
from shardir.backend.torch.launch.rendezvous import BACKEND, Peer, Rendezvous
from shardir.backend.torch.shardir_runtime.collectives.position import POSITIONS
from shardir.backend.torch.shardir_runtime.plan.program import (
    START_SECONDS,
    PlanError,
    ProgramPlan,
    load_plan,
)
from shardir.backend.torch.shardir_runtime.run.events import event_of
from shardir.backend.torch.shardir_runtime.run.options import DataFiles
from shardir.diagnostics import ShardirError
from shardir.syntax.files import scratch_folder

RUN = "shardir"
"""The name of a run at its rendezvous, which serves one."""

TIMES: dict[str, int] = {}
"""Times of torch's rendezvous, in seconds, other than its own: `last_call_timeout`,
`keep_alive_interval`."""

SET = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
"""The variables of the environment that a run sets for torch."""

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")


class StoppedError(Exception):
    """All ranks have ended, after a checkpoint, since the system asked one of them to."""


class Agent:
    """The node of this process.

    Args:
        plan: of the program, which is for the ranks of all nodes.

    Attributes:
        plan: of the program of the present round, which is for the ranks of the nodes that there
            are.
        grows: whether a node waits to take part.
    """

    rendezvous: Rendezvous
    positions: NodePositions

    def __init__(self, plan: ProgramPlan, options: Options, emit_resized: EmitResized | None):
        self.plan, self.options, self._emit_resized = plan, options, emit_resized
        self._plans = {options.nnodes.high: plan}
        self.size = plan.size // options.nnodes.high
        self.grows = False
        self.address, self.interface = "127.0.0.1", "lo"
        if options.rdzv is not None:
            self.address, self.interface = _own_address(options)
        self.outcome = Outcome()
        self.logs: LogsDest | None = None
        self.ranks = range(0)
        self._reached, self._rounds = False, 0
        self.events: dict[int, bytes] = {}
        """The incomplete last line from the pipe of each rank of this node. Each rank has a pipe,
        since the lines of several writers may mix."""
        self._last_sign = math.inf

    def run(self, on_event: OnEvent) -> None:
        """Run to the end of all ranks.

        Raises:
            LaunchError: they cannot be started; RunError: one fails; KeyboardInterrupt, SystemExit:
                a signal has ended the run.
        """
        self.on_event, options = on_event, self.options
        allow_files(self.size)
        if options.max_restarts:
            options = replace(options, resume=options.checkpoints)
        wait = max(1, math.ceil(options.timeout))
        saves = options.checkpoints is not None
        with scratch_folder() as folder, _own_process_state() as signals:
            os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(wait if saves else int(TERM_SECONDS))
            for local in range(self.size):
                os.mkfifo(path := events_of(folder, local))
                self.events[os.open(path, os.O_RDWR)] = b""
            self.positions = NodePositions(self.size, folder / "positions", options.timeout)
            self._folder = folder
            (folder / "program").symlink_to(self.plan.directory.absolute())
            for nodes in range(options.nnodes.low, options.nnodes.high):
                self._plans[nodes] = self._plan_for(nodes)
            config = LaunchConfig(
                min_nodes=options.nnodes.low, max_nodes=options.nnodes.high,
                nproc_per_node=self.size,
                run_id=RUN, role=RUN, max_restarts=options.max_restarts,
                rdzv_backend=BACKEND, rdzv_endpoint=options.rdzv or "127.0.0.1:0",
                rdzv_configs={"member": self, "is_host": options.node_rank == 0,
                              "join_timeout": wait, "read_timeout": wait, **TIMES},
                local_addr=self.address, signals_to_handle=signals,
                logs_specs=Logs(self, folder),
            )  # fmt: skip
            program = folder / "program" / "program.py"
            try:
                elastic_launch(config, options.python)(str(program), *options.words())
                self._read()
            except StoppedError:
                pass
            except ChildFailedError as error:
                self._fail(error.failures)
            except RunError:
                self._read()
                if not self._has_stopped():
                    raise
            except SignalException as error:
                self._read()
                self.rendezvous.set_closed()
                if error.sigval == signal.SIGINT:
                    raise KeyboardInterrupt from None
                sys.exit(128 + error.sigval)
            except RendezvousClosedError:
                raise RunError(ENDED) from None
            except RendezvousTimeoutError:
                raise RunError(
                    f"expected {options.nnodes.low} nodes at {options.rdzv} within {wait} s, got "
                    "fewer; start the others, or give a longer --timeout"
                ) from None
            except RendezvousConnectionError as error:
                self._lost(error, wait)
            finally:
                self.positions.records.close()
                for pipe in self.events:
                    os.close(pipe)

    # ---- what the rendezvous asks of a member ----

    def leave(self) -> None:
        """End a round, unless it is the first: report it, and forget its ranks."""
        self._read()
        self._reached = True
        if not self._rounds:
            return
        if self._has_stopped() and not self.grows:
            raise StoppedError
        errors = self.outcome.errors
        for error in errors.values():
            if error["kind"] in FINAL:
                raise RunError(error["message"])
        cause = self.outcome.cause({})
        if cause is not None:
            why = self.outcome.story(cause, None, b"")
        elif self.grows:
            why = "another machine takes part"
        else:
            several = self.options.nnodes.high > 1
            why = "a rank or a machine is lost" if several else "a rank has ended"
        self.on_event({"event": "restart", "reason": why})
        self.outcome, self.grows = Outcome(), False

    def join(self, nodes: int) -> Peer:
        """Begin a round."""
        self._rounds += 1
        self.plan, link = self._plans[nodes], self._folder / "program"
        link.unlink()
        link.symlink_to(self.plan.directory.absolute())
        self.positions.begin(self.rendezvous.share)
        self._last_sign = time.monotonic() + START_SECONDS
        return Peer(self.options.node_rank, *digests(self.plan, self.options))

    def _plan_for(self, nodes: int) -> ProgramPlan:
        """Compile the program for fewer nodes: return its plan.

        Raises:
            LaunchError: it can't be.
        """
        assert self._emit_resized is not None
        full, out = self.plan, self._folder / f"nodes-{nodes}"
        what = f"--nnodes {self.options.nnodes}: the program cannot run on {nodes}"
        try:
            self._emit_resized(full.directory, nodes * self.size, full.size, out)
            return load_plan(out)
        except (ShardirError, PlanError) as error:
            raise LaunchError(f"{what}: {error}") from None

    def watch(self, closed: Callable[[], bool]) -> None:
        """Read the events of the ranks until a node ends the run."""
        self._read()
        self.positions.watch()
        if closed():
            raise self._story(ENDED, self.positions.is_still)
        silent = time.monotonic() - self._last_sign
        if 0 in self.ranks and silent > self.options.timeout + 5:
            raise self._story(
                f"nothing was heard of the ranks for {self.options.timeout:g} s; if a step takes "
                "longer than that, give a longer --timeout"
            )

    # ---- the ranks ----

    def _read(self) -> None:
        """Read all events that have arrived."""
        while ready := select.select(list(self.events), [], [], 0)[0]:
            for pipe in ready:
                *lines, rest = (self.events[pipe] + os.read(pipe, 1 << 16)).split(b"\n")
                self.events[pipe] = rest
                for line in lines:
                    event = event_of(line, self.plan.size)
                    if event is not None and not self.outcome.add(event):
                        self._last_sign = time.monotonic()
                        self.on_event(event)

    def _fail(self, failures: dict[int, ProcessFailure]) -> None:
        """Raise the error of the rank that is the cause."""
        self._read()
        if self._has_stopped():
            return
        codes: dict[int, int | None] = {rank: f.exitcode for rank, f in failures.items()}
        # The agent ends the others.
        codes = {r: c for r, c in codes.items() if c != -signal.SIGTERM} or codes
        kinds = {error["kind"] for error in self.outcome.errors.values()}
        cause = self.outcome.cause(codes)
        if cause is not None and codes.get(cause) == -signal.SIGKILL and "late" in kinds:
            story = (
                f"rank {cause} did not answer: the others waited for it for "
                f"{self.options.timeout:g} s"
            )
            raise RunError("\n".join([story, *self._standing().report([cause])]))
        if cause is None and self.options.nnodes.high > 1:
            raise self._story(LATE if "late" in kinds else ENDED, "late" in kinds)
        if cause is None:
            cause = self.outcome.first()["rank"] if self.outcome.errors else min(codes)
            places = self._standing().report()
        else:
            places = self.outcome.places(cause, self._standing())
        story = self.outcome.story(cause, codes.get(cause), self._output(cause))
        raise RunError("\n".join([story, *places]))

    def _story(self, text: str, with_places: bool = True) -> RunError:
        """Return an error, with where the ranks stand."""
        return RunError("\n".join([text, *(self._standing().report() if with_places else [])]))

    def _standing(self) -> Standing:
        first = self.ranks.start
        program = self.plan.directory / "program.py"
        return self.positions.standing(first, program, ranks_of_a_stage(self.plan))

    def _has_stopped(self) -> bool:
        """Whether the ranks have agreed to end, after a checkpoint. Their exit codes name the
        signal."""
        return bool(self.ranks) and self.outcome.done.issuperset(self.ranks)

    def _output(self, rank: int) -> bytes:
        """Return the end of the output of a rank of this node."""
        assert self.logs is not None
        local, found = self.ranks.index(rank), b""
        for files in (self.logs.stdouts, self.logs.stderrs):
            found += Path(files[local]).read_bytes()[-TAIL_BYTES:]
        return found

    def _lost(self, error: Exception, wait: int) -> None:
        """Raise the error of a rendezvous that cannot be reached."""
        place = self.options.rdzv
        if self._reached:
            raise RunError(f"lost the rendezvous at {place}: node 0 has ended") from None
        if self.options.node_rank:
            raise LaunchError(
                f"found no rendezvous at {place} within {wait} s: start node 0 there, with the "
                "same --rdzv"
            ) from None
        why = str(error.__cause__ or error).splitlines()[0]
        if "EADDRINUSE" in why:
            why = "the port is in use"
        raise LaunchError(f"cannot serve a rendezvous at {place}: {why}") from None


LATE = (
    "a rank of another node did not answer in time; if a step takes longer, give a longer --timeout"
)
ENDED = "another node has ended the run: the output of its shard-run says why"


class Logs(DefaultLogsSpecs):
    """The destinations of output and events of ranks: files for output, the agent for events."""

    def __init__(self, agent: Agent, folder: Path):
        super().__init__(str(folder / "logs"), redirects=Std.ALL)
        self._agent, self._folder = agent, folder

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of ranks with these environments."""
        agent = self._agent
        first = int(envs[0]["RANK"])
        agent.ranks = range(first, first + len(envs))
        defaults = {}
        if agent.options.on_cpus:
            defaults["OMP_NUM_THREADS"] = "1"
            if agent.interface:
                defaults["GLOO_SOCKET_IFNAME"] = agent.interface
        else:
            defaults["OMP_NUM_THREADS"] = "4"
        for local, env in envs.items():
            env |= {name: value for name, value in defaults.items() if name not in os.environ}
            env["SHARDIR_EVENTS"] = str(events_of(self._folder, local))
            env[POSITIONS] = str(agent.positions.path)
            env["SHARDIR_LAUNCHER"] = str(os.getpid())
        agent.logs = super().reify(envs)
        return agent.logs


def events_of(folder: Path, local: int) -> Path:
    """Return the pipe of the events of a rank, by its number on this node."""
    return folder / f"events-{local}"


def digests(plan: ProgramPlan, options: Options) -> tuple[str, str]:
    """Return digests of a program and of options, which are equal on all nodes. Files may have
    other paths."""
    program = b"".join((plan.directory / name).read_bytes() for name in ("program.py", "plan.json"))
    place = Path("/x.npz")
    equal = replace(
        options,
        checkpoints=options.checkpoints and place,
        resume=options.resume and place,
        dump=options.dump and place,
        weights=options.weights and place,
        data=DataFiles(word.partition("=")[0] + "=x.npy" for word in options.data or ()),
    )
    words = [*equal.words(), str(options.nnodes), str(options.max_restarts)]
    return (
        hashlib.sha256(program).hexdigest(),
        hashlib.sha256("\0".join(words).encode()).hexdigest(),
    )


def _own_address(options: Options) -> tuple[str, str]:
    """Return the address at which other nodes reach this one, and its interface."""
    assert options.rdzv is not None
    host, _, port = options.rdzv.rpartition(":")
    try:
        address = address_towards(host, int(port))
    except OSError as error:
        raise LaunchError(
            f"--rdzv {options.rdzv}: cannot reach {host}: {error.strerror or error}"
        ) from None
    interface = interface_of(address)
    # A machine may know itself by an address that others do not.
    return (host if options.node_rank == 0 else address), interface


@contextmanager
def _own_process_state() -> Iterator[str]:
    """Silence torch's own messages, and give its signal handlers and the environment back. Yields
    the names of the signals that the agent handles."""
    disabled, around = logging.root.manager.disable, {name: os.environ.get(name) for name in SET}
    before = {name: signal.getsignal(getattr(signal, name)) for name in HANDLED}
    logging.disable(logging.CRITICAL)
    try:
        yield ",".join(name for name, handler in before.items() if handler != signal.SIG_IGN)
    finally:
        logging.disable(disabled)
        for name, value in around.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
