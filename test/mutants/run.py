"""make mutants: plant one error at a time, and expect the tests of its package to fail.

Works on copies of the tree, one for each job. A mutant is caught if a test fails that passes
without it, and survives if all pass. --list prints the mutants, and plants none.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count, groupby
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants import ROOT, Mutant, mutants

SECONDS = 300
"""The default of the maximum time of one run of tests, in seconds."""

PASSED, FAILED = 0, 1
"""The exit codes of pytest that tell about tests; the others say that it could not run them."""

FAILURES = ".pytest_cache/v/cache/lastfailed"
"""The file to which pytest writes the tests that failed."""


class TestRun(NamedTuple):
    """The result of a run of tests."""

    code: int | None
    """The exit code of pytest; None if it was ended at the limit of time."""
    failed: list[str]
    last: str
    """The last line of the output."""


class Outcome(NamedTuple):
    """The result of the tests of a mutant."""

    verdict: str
    """caught, survived, or not tested."""
    test: str
    """The test that failed first, or the last line of the output if there is none."""
    seconds: float


class Tree:
    """A copy of the tree in which mutants are planted."""

    def __init__(self, folder: Path, limit: float):
        self.folder, self.limit = folder, limit
        self.running: subprocess.Popen[str] | None = None
        self.ticks = count(int(folder.stat().st_mtime) + 1)
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def write(self, file: str, text: str) -> None:
        """Write a file; its time is a new one, since Python compares times and sizes only."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        tick = next(self.ticks)
        os.utime(path, (tick, tick))

    def plant(self, mutant: Mutant) -> Outcome:
        """Run the tests of a mutant, up to the first that fails."""
        start = monotonic()
        text = (self.folder / mutant.file).read_text(encoding="utf-8")
        self.write(mutant.file, mutant.apply(text))
        try:
            found = self.test(["-x", *mutant.tests.split()])
        finally:
            self.write(mutant.file, text)
        seconds = monotonic() - start
        if found.code == FAILED:
            return Outcome("caught", found.failed[0], seconds)
        return Outcome("survived" if found.code == PASSED else "not tested", found.last, seconds)

    def test(self, arguments: Sequence[str]) -> TestRun:
        """Run tests, one after another."""
        (self.folder / FAILURES).unlink(missing_ok=True)
        variables = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        self.running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "--tb=no", *arguments],
            cwd=self.folder, env=os.environ | variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = self.running.communicate(timeout=self.limit)
        except subprocess.TimeoutExpired:
            self.end()
            return TestRun(None, [], f"no result in {self.limit:g} s; use --seconds")
        failures = self.folder / FAILURES
        failed = list(json.loads(failures.read_text())) if failures.exists() else []
        return TestRun(self.running.returncode, failed, (output.split("\n") or [""])[-1])

    def end(self) -> None:
        """End the tests that run here, and all processes that they have started."""
        if self.running is not None and self.running.poll() is None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()


class Trees:
    """The copies of the tree, one for each job; each mutant is planted in one that is free."""

    def __init__(self, folder: Path, jobs: int, limit: float):
        self.all, self.free = [], queue.SimpleQueue[Tree]()
        for job in range(jobs):
            (copy := folder / str(job)).mkdir()
            self.all.append(tree := Tree(copy, limit))
            self.free.put(tree)

    def plant(self, mutant: Mutant) -> Outcome:
        tree = self.free.get()
        try:
            return tree.plant(mutant)
        finally:
            self.free.put(tree)

    def confirm(self, found: dict[Mutant, Outcome]) -> dict[Mutant, Outcome]:
        """Return the outcomes; a test that also fails without a mutant does not catch it."""
        if not (tests := sorted({o.test for o in found.values() if o.verdict == "caught"})):
            return found
        without = self.all[0].test(tests)
        failed = without.failed if without.code in (PASSED, FAILED) else tests
        return {
            m: Outcome("not tested", f"{o.test} also fails without it", o.seconds)
            if o.verdict == "caught" and o.test in failed else o
            for m, o in found.items()
        }  # fmt: skip

    def end(self) -> None:
        for tree in self.all:
            tree.end()


def run(
    chosen: Sequence[Mutant], jobs: int, limit: float, console: Console
) -> dict[Mutant, Outcome]:
    """Plant mutants, package by package."""
    found: dict[Mutant, Outcome] = {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    with (
        tempfile.TemporaryDirectory(prefix="mutants") as folder,
        ThreadPoolExecutor(jobs) as pool,
        progress,
    ):
        trees = Trees(Path(folder), jobs, limit)
        task = progress.add_task("mutants", total=len(chosen))
        try:
            for _, package in groupby(chosen, key=lambda m: m.package):
                futures = {pool.submit(trees.plant, m): m for m in package}
                planted = dict[Mutant, Outcome]()
                for future in as_completed(futures):
                    planted[futures[future]] = future.result()
                    progress.advance(task)
                for mutant, outcome in trees.confirm(planted).items():
                    found[mutant] = outcome
                    line = f"{outcome.verdict:10} {mutant.package}: {mutant.name}"
                    progress.console.print(line, markup=False)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            trees.end()
            raise
    return found


def failures(found: dict[Mutant, Outcome]) -> list[str]:
    """Return a line for each mutant that is not caught."""
    return [
        f"{outcome.verdict}: {m.name} ({m.place}): {m.breaks} "
        f"Expected one of {m.tests} to fail, got: {outcome.test}"
        for m, outcome in found.items() if outcome.verdict != "caught"
    ]  # fmt: skip


def show(found: dict[Mutant, Outcome], console: Console) -> None:
    """Print each mutant with the test that caught it."""
    table = Table()
    for column in ("package", "mutant", "caught by"):
        table.add_column(column, overflow="fold")
    table.add_column("s", justify="right")
    for m, outcome in found.items():
        test = outcome.test if outcome.verdict == "caught" else outcome.verdict
        table.add_row(m.package, m.name, Text(test), f"{outcome.seconds:.1f}")
    console.print(table)


def describe(chosen: Sequence[Mutant], console: Console) -> None:
    """Print a table of mutants."""
    table = Table()
    for column in ("package", "mutant", "error", "place", "tests"):
        table.add_column(column, overflow="fold")
    for m in chosen:
        table.add_row(m.package, *map(Text, (m.name, m.breaks, m.place, m.tests)))
    console.print(table)


def main() -> int:
    """Return 0 if all are caught, 1 if one survived or was not tested, 2 if a name is unknown."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant or a package")
    parser.add_argument("--list", action="store_true", help="print the mutants, and plant none")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at once")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="S",
        help="the maximum time of one run of tests (default: %(default)s)",
    )  # fmt: skip
    options = parser.parse_args()
    names = {n for m in mutants() for n in (m.name, m.package)}
    if unknown := sorted({*options.names} - names):
        parser.error(f"expected names of mutants or packages, got {', '.join(unknown)}")
    wanted = {*options.names} or names
    chosen = [m for m in mutants() if {m.name, m.package} & wanted]
    console = Console(width=None if sys.stdout.isatty() else 160)
    if options.list:
        describe(chosen, console)
        return 0
    found = run(chosen, max(1, options.jobs), options.seconds, console)
    show(found, console)
    for line in (wrong := failures(found)):
        console.print(line, style="red", markup=False)
    console.print(f"{len(chosen) - len(wrong)} of {len(chosen)} mutants are caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
