"""make mutants: plant one error at a time, and expect the tests of its package to fail.

Works on copies of the tree, one for each job. A mutant is caught if a test fails, and survives if
all pass. Each selection of tests must also pass without a mutant. The test that catches a mutant
goes into caught.json, from which docs/testing.md is generated.
"""

import argparse
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import count
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1]))
from mutants import ROOT, Mutant, caught, mutants, record

SECONDS = 300
"""The default of the maximum time of one run of tests, in seconds."""

FAILED, PASSED = 1, 0
"""The exit codes of pytest that tell about tests; the others say that it could not run them."""


class Outcome(NamedTuple):
    """The result of the tests of a mutant, or of a selection without one."""

    code: int | None
    """The exit code of pytest; None if it was ended at the limit of time."""
    first: str
    """The test that failed first, or the end of the output where there is none."""
    seconds: float

    @property
    def verdict(self) -> str:
        if self.code == FAILED:
            return "caught"
        return "survived" if self.code == PASSED else "not tested"


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

    def run(self, mutant: Mutant) -> Outcome:
        text = (self.folder / mutant.file).read_text(encoding="utf-8")
        self.write(mutant.file, mutant.apply(text))
        try:
            return self.test(mutant.tests)
        finally:
            self.write(mutant.file, text)

    def test(self, tests: str) -> Outcome:
        """Run tests one after another up to the first that fails."""
        start = monotonic()
        variables = {"PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self.running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "--tb=no", "-rfE",
             "-p", "no:cacheprovider", *tests.split()],
            cwd=self.folder, env=os.environ | variables, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = self.running.communicate(timeout=self.limit)
            code = self.running.returncode
        except subprocess.TimeoutExpired:
            self.end()
            output, code = f"no result in {self.limit:g} s; use --seconds", None
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.M)
        first = failed[1] if failed else (output.strip().splitlines() or [""])[-1]
        return Outcome(code, first, monotonic() - start)

    def end(self) -> None:
        """End the tests that run here, and what they have started."""
        if self.running is not None and self.running.poll() is None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait()


class Trees:
    """The copies of the tree, one for each job; each run takes one that is free."""

    def __init__(self, folder: Path, jobs: int, limit: float):
        self.all, self.free = [], queue.SimpleQueue[Tree]()
        for job in range(jobs):
            (copy := folder / str(job)).mkdir()
            self.all.append(tree := Tree(copy, limit))
            self.free.put(tree)

    def __call__(self, run: Callable[[Tree], Outcome]) -> Outcome:
        tree = self.free.get()
        try:
            return run(tree)
        finally:
            self.free.put(tree)

    def end(self) -> None:
        for tree in self.all:
            tree.end()


def run(
    chosen: Sequence[Mutant], jobs: int, limit: float, console: Console
) -> dict[str | Mutant, Outcome]:
    """Return the outcomes of each selection of tests without a mutant, and of each mutant.

    Record the test that catches a mutant as soon as it is known.
    """
    found: dict[str | Mutant, Outcome] = {}
    work = list[str | Mutant]([*dict.fromkeys(m.tests for m in chosen), *chosen])
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    progress = Progress(*columns, TimeElapsedColumn(), console=console)
    with (
        tempfile.TemporaryDirectory(prefix="mutants") as folder,
        ThreadPoolExecutor(jobs) as pool,
        progress,
    ):
        trees = Trees(Path(folder), jobs, limit)
        task = progress.add_task("mutants", total=len(work))

        def one(item: str | Mutant) -> Outcome:
            if isinstance(item, Mutant):
                return trees(lambda tree: tree.run(item))
            return trees(lambda tree: tree.test(item))

        futures = {pool.submit(one, item): item for item in work}
        try:
            for future in as_completed(futures):
                item = futures[future]
                found[item] = outcome = future.result()
                progress.advance(task)
                if isinstance(item, Mutant):
                    test = outcome.first if outcome.verdict == "caught" else None
                    record({**caught(), item.name: test})
                    progress.console.print(f"{outcome.verdict:10} {item.package}: {item.name}")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            trees.end()
            raise
    return found


def failures(found: dict[str | Mutant, Outcome]) -> list[str]:
    """Return what is wrong: tests that fail without a mutant, and mutants that are not caught."""
    lines = []
    for item, outcome in found.items():
        if isinstance(item, str) and outcome.code != PASSED:
            lines.append(f"without a mutant: expected {item} to pass, got {outcome.first}")
        elif isinstance(item, Mutant) and outcome.verdict != "caught":
            lines.append(
                f"{outcome.verdict}: {item.name} ({item.file}): {item.breaks} "
                f"Expected one of {item.tests} to fail, got: {outcome.first}"
            )
    return lines


def by_package(found: dict[str | Mutant, Outcome]) -> list[tuple[Mutant, Outcome]]:
    """Return the mutants with their outcomes, in the order of the packages."""
    tried = [(m, o) for m, o in found.items() if isinstance(m, Mutant)]
    return sorted(tried, key=lambda t: (t[0].package, t[0].name))


def show(found: dict[str | Mutant, Outcome], console: Console) -> None:
    """Print each mutant with the test that caught it."""
    table = Table()
    for column in ("package", "mutant", "caught by"):
        table.add_column(column, overflow="fold")
    table.add_column("s", justify="right")
    for m, outcome in by_package(found):
        first = outcome.first if outcome.verdict == "caught" else outcome.verdict
        table.add_row(m.package, m.name, Text(first), f"{outcome.seconds:.1f}")
    console.print(table)


def main() -> int:
    """Return 0 if all are caught, 1 if one survived or was not tested, 2 if a name is unknown."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a mutant or a package")
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
    found = run(chosen, max(1, options.jobs), options.seconds, console)
    show(found, console)
    for line in (wrong := failures(found)):
        console.print(line, style="red", markup=False)
    count = sum(isinstance(i, Mutant) and o.verdict == "caught" for i, o in found.items())
    console.print(f"{count} of {len(chosen)} mutants are caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
