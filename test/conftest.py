"""Every `.ir`/`.mlir` file with RUN lines below test/ is a test; see runlines.py.

The environment variable SHARDIR_TESTS=all chooses the long forms of the tests (extent.py); `make
test-all` sets it.
"""

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import forked, jax_devices  # noqa: F401 - JAX has the devices in all tests
from support.cpu import Cpu
from support.runlines import RunError, run, run_lines

from shardir.backend.torch.launch.forks import share_forks
from shardir.dialects.installed import REGISTRY, installed

settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
"""No test of hypothesis fails because the machine is busy."""

COLLECTED = 5_000, 10, 200
"""The thresholds of Python's garbage collector. IR is cyclic and lives for one test: collections of
what is new free it. A full one would traverse all tables, which are not freed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="print the CPU seconds of each file")


def pytest_configure(config: pytest.Config) -> None:
    gc.set_threshold(*COLLECTED)
    if config.getoption("--cpu"):
        config.pluginmanager.register(Cpu())


def pytest_collection_finish() -> None:
    """Exempt the modules and what they hold from garbage collection."""
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Exempt the tables too from the collections with which pytest and Python end."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """End at a SIGTERM that comes while a run of this process handles it (launch/agent.py): pytest
    would take the SystemExit for a failure of the test, and go on with the others."""
    try:
        return (yield)
    except SystemExit as end:
        if end.code == 128 + signal.SIGTERM:
            pytest.exit("ended by SIGTERM", 128 + signal.SIGTERM)
        raise


class RunLine(pytest.Item):
    """One RUN line."""

    def __init__(self, *, command: str, line: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.command, self.line = command, line

    def runtest(self) -> None:
        config: Any = self.config
        factory: pytest.TempPathFactory = config._tmp_path_factory  # as of pytest's own fixtures
        run(self.command, self.path, factory.mktemp("run"))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None):
        if isinstance(excinfo.value, RunError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, self.line - 1, f"{self.path.name}:{self.line}"


class RunFile(pytest.File):
    """The RUN lines of one file."""

    def collect(self) -> Iterator[RunLine]:
        for line, command in run_lines(self.path):
            yield RunLine.from_parent(self, name=f"RUN:{line}", command=command, line=line)


def pytest_collect_file(parent: pytest.Collector, file_path: Path) -> RunFile | None:
    if file_path.suffix in (".ir", ".mlir"):
        return RunFile.from_parent(parent, path=file_path)
    return None


@pytest.fixture
def registry() -> Iterator[None]:
    """The registry of extensions, which is afterwards what it was before."""
    before = vars(installed()).copy()
    tables = {kind: dict(table) for kind, table in REGISTRY.tables.items()}
    extensions, owner = [*REGISTRY.extensions], dict(REGISTRY._owner)
    version = REGISTRY.version
    yield
    now = max(version, REGISTRY.version)
    vars(REGISTRY).update(before, tables=tables, extensions=extensions, _owner=owner)
    REGISTRY.version = now + 1


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let all runs fork their ranks from one process (rank_server.py), except in the tests with the
    marker `started_ranks`."""
    if request.node.get_closest_marker("started_ranks") is not None:
        yield
        return
    with share_forks(forked.LATE_SERVER):
        yield
