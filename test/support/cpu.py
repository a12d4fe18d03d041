"""`pytest --cpu`: the CPU seconds of each file of tests, its child processes counted."""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from support import forked


def spent() -> float:
    """The CPU seconds of this process, of its children that have ended, and of the forked ranks."""
    return sum(os.times()[:4]) + forked.spent()


class Cpu:
    """Marks each report with what was spent since the last one, and prints the sums."""

    def __init__(self) -> None:
        self.last = 0.0
        self.by_file: Counter[str] = Counter()

    def pytest_runtest_logstart(self) -> None:
        """Begin with the first test of this process, which a worker has since its fork."""
        self.last = spent()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, Any, Any]:
        report = yield
        now = spent()
        report.cpu, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report: Any) -> None:
        file = report.nodeid.partition("::")[0]
        if not file.endswith(".py"):  # the folder of programs with RUN lines
            file = str(Path(file).parent)
        self.by_file[file] += report.cpu

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU seconds")
        for file, seconds in self.by_file.most_common():
            terminalreporter.write_line(f"{seconds:8.1f}  {file}")
        terminalreporter.write_line(f"{sum(self.by_file.values()):8.1f}  all tests")
