"""`pytest --workers N`: the tests in N processes, which are forked once all tests are collected.

So test modules, torch and the compiler are imported once; no import may make an array of JAX.
A worker takes the tests of a file in their order, which share what the file computes once; where
no file is left, it takes the latter half of the tests that another worker has before it.
"""

import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from shardir.backend.torch.launch.fork_server import end_with


class Shares:
    """The tests that have not been handed out, by their number in the session."""

    def __init__(self, items: Iterable[pytest.Item]):
        by_file = groupby(enumerate(items), key=lambda entry: entry[1].path)
        self.files = deque(deque(index for index, _ in tests) for _, tests in by_file)
        self.of_worker: dict[Connection, deque[int]] = {}

    def take(self, worker: Connection) -> int | None:
        """Return the next test of a worker; None if no test is left."""
        if not self.of_worker.get(worker):
            self.of_worker[worker] = self.files.popleft() if self.files else self._steal()
        share = self.of_worker[worker]
        return share.popleft() if share else None

    def give_back(self, worker: Connection, indices: Iterable[int]) -> None:
        """Let other workers take the tests of one that has ended, those that it had taken first."""
        if share := deque([*indices, *self.of_worker.pop(worker, ())]):
            self.files.appendleft(share)

    def _steal(self) -> deque[int]:
        longest = max(self.of_worker.values(), key=len, default=deque[int]())
        return deque(reversed([longest.pop() for _ in range((len(longest) + 1) // 2)]))


class Reporter:
    """In a worker: sends reports and warnings to the process that has forked it."""

    def __init__(self, config: pytest.Config, parent: Connection):
        self.config, self.parent = config, parent

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.parent.send(("pytest_runtest_logstart", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self.parent.send(("pytest_runtest_logfinish", {"nodeid": nodeid, "location": location}))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.send(("pytest_runtest_logreport", {"report": data}))

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        parts = [getattr(warning_message, part) for part in ("message", "category")]
        place = warning_message.filename, warning_message.lineno
        try:
            pickle.dumps(parts)
        except Exception:
            parts = [UserWarning(str(parts[0])), UserWarning]
        arguments = {"warning_message": (*parts, *place), "when": when, "nodeid": nodeid}
        self.parent.send(("pytest_warning_recorded", {**arguments, "location": location}))


class Workers:
    """The plugin of pytest."""

    def __init__(self, count: int):
        self.count = count

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.config.option.collectonly or session.testsfailed:
            return None
        bridge: Any = sys.modules.get("jax._src.xla_bridge")
        if bridge is not None and bridge.backends_are_initialized():
            raise pytest.UsageError(
                "expected no array of JAX before the tests, got one: JAX starts threads for it, "
                "whose locks forks would hold for ever; make it in a test and not at an import"
            )
        shares, workers = Shares(session.items), dict[Connection, int]()
        try:
            for number in range(min(self.count, len(session.items))):
                ours, theirs = Pipe()
                if not (pid := os.fork()):
                    for connection in (ours, *workers):
                        connection.close()
                    _work(session, number, theirs)
                theirs.close()
                workers[ours] = pid
            self._serve(session, shares, set(workers))
        finally:
            for connection, pid in workers.items():
                connection.close()
                os.waitpid(pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _serve(self, session: pytest.Session, shares: Shares, workers: set[Connection]) -> None:
        """Hand out tests and pass on reports until all workers have ended."""
        held: dict[Connection, list[int | None]] = {worker: [] for worker in workers}
        while workers:
            for worker in wait(list(workers)):
                assert isinstance(worker, Connection)
                try:
                    message = worker.recv()
                except (EOFError, ConnectionResetError):
                    workers.remove(worker)
                    self._bury(session, shares, worker, held[worker])
                    continue
                if message is not None:
                    _pass_on(session.config, *message)
                    continue
                stops = session.shouldfail or session.shouldstop
                index = None if stops else shares.take(worker)
                held[worker] = [*held[worker][-1:], index]  # the running test and the next
                with suppress(BrokenPipeError):
                    worker.send(index)
        if shares.files and not (session.shouldfail or session.shouldstop):
            session.shouldfail = "all workers have ended before the tests"

    def _bury(
        self, session: pytest.Session, shares: Shares, worker: Connection, held: list[int | None]
    ) -> None:
        """Report the test at which a worker has ended as failed, if any, and release the rest."""
        running, *following = [index for index in held if index is not None] or [None]
        if running is None:
            return
        item = session.items[running]
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed", "the worker has ended in this test", "call"
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        shares.give_back(worker, [index for index in following if index is not None])


def _pass_on(config: pytest.Config, hook: str, arguments: dict[str, Any]) -> None:
    if hook == "pytest_runtest_logreport":
        arguments["report"] = config.hook.pytest_report_from_serializable(
            config=config, data=arguments["report"]
        )
    if hook == "pytest_warning_recorded":
        arguments["warning_message"] = warnings.WarningMessage(*arguments["warning_message"])
        getattr(config.hook, hook).call_historic(kwargs=arguments)
    else:
        getattr(config.hook, hook)(**arguments)


def _work(session: pytest.Session, number: int, parent: Connection) -> None:
    """Run the tests that the parent hands out, and end the process."""
    code = 1
    try:
        end_with(os.getppid())
        config: Any = session.config
        captures = config.pluginmanager.getplugin("capturemanager")
        captures.stop_global_capturing()  # its files are those of the parent
        captures.start_global_capturing()
        captures.suspend_global_capture()
        factory = config._tmp_path_factory
        factory._basetemp = factory.mktemp(f"worker{number}", numbered=False)
        tempfile.tempdir = str(factory.mktemp("tmp", numbered=False))
        config.pluginmanager.unregister(name="terminalreporter")
        config.pluginmanager.register(Reporter(config, parent))

        def take() -> pytest.Item | None:
            parent.send(None)
            index = parent.recv()
            return None if index is None else session.items[index]

        item = take()
        while item is not None:
            following = take()
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        parent.send(None)  # so that the last test is none at which this process has ended
        code = 0
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # or the parent is interrupted
        with suppress(BaseException):
            session._setupstate.teardown_exact(None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
