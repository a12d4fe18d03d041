"""The documentation is true: its programs parse, its outputs are current, its walk-throughs work.

What a page may hold, and what is checked of it:

    ```mlir ... ```                      parses and verifies; with `// expected-error {{...}}` it
                                         fails so, on that line
    ```sh ... ```                        its tools and their flags exist; shard-opt runs on the
                                         page's files
    <!-- file: NAME -->, then a block    the block is that file, for the commands of the page
    <!-- from: COMMAND -->               what follows, up to <!-- end -->, is what it prints
    <!-- runs -->, then a block          the block runs as Python, with the page's files at hand
    <!-- edit: PATH, ... -->             a step of a walk-through (see Step)
    <!-- checks: ARGUMENTS -->           tests that pass when its steps are done, as pytest's
                                         arguments, beside the new files of tests

`python test/pages.py` writes what commands print into the pages.
"""

import importlib
import importlib.util
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest
from support.each import check_each
from support.extent import sampled
from support.forked import run_ranks
from support.pages import (
    BLOCK,
    FILE,
    PAGES,
    ROOT,
    blocks,
    ids,
    regenerated,
)
from support.runlines import run_tool

from shardir.diagnostics import Failure, ParseErrors
from shardir.diagnostics.codes import CODES
from shardir.syntax.parser import default_parser
from shardir.syntax.source import Source
from shardir.syntax.verify import verify_all
from shardir.tools.expected import compare, expected_messages

EDIT = re.compile(r"^<!-- edit: (\S+?)(?:, (\w+): (.*?))? -->\n```\w*\n(.*?)^```$", re.M | re.S)
RUNS = re.compile(r"^<!-- runs -->\n```python\n(.*?)^```$", re.M | re.S)
CHECKS = re.compile(r"^<!-- checks: (.*) -->$", re.M)
CODE = re.compile(r"\[([A-Z]\d+)\]")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.M)
LIMIT_SECONDS = 240
FILES = {
    path.name
    for folder in ("docs", "passes", "shardir", "test", "tools")
    for path in (ROOT / folder).rglob("*.*")
}
"""The names of all files."""


# ---- links ----


def anchors(page: Path) -> set[str]:
    """The names that links to the headings of a page have: lower case, with hyphens for spaces and
    without other signs."""
    headings = HEADING.findall(BLOCK.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs/examples/README.md"], ids=ids)
def test_links_have_targets(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(BLOCK.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert not broken


# ---- programs and shell lines ----

PROGRAMS = [
    pytest.param(text, id=f"{page.name}:{line}")
    for page in PAGES
    for line, text in blocks(page, "mlir")
]


@pytest.mark.parametrize("text", PROGRAMS)
def test_program_parses_and_verifies(text: str) -> None:
    source = Source(text, "page")
    try:
        module = default_parser().parse_source(source)
        errors = verify_all(module, source)
    except (ParseErrors, Failure) as e:
        errors = e.errors if isinstance(e, ParseErrors) else e.diagnostics(source)
    assert not compare("page", text, errors), "\n".join(map(str, errors))


@cache
def usage(tool: str) -> str:
    return run_tool([tool, "--help"], b"")[1]


def shell_lines() -> Iterator[tuple[str, str]]:
    """Yield each line of a shell with its place."""
    for page in PAGES:
        for first, text in blocks(page, "sh"):
            for i, line in enumerate(text.replace("\\\n", " ").splitlines()):
                if line.strip() and not line.startswith("#"):
                    yield f"{page.name}:{first + i}", line


OTHER_TOOLS = (
    "make",
    "torchrun",
    "xdsl-opt",
    "iree-compile",
    "sed",
    "python",
    "git",
    "cd",
    "pip",
    "source",
    "ruff",
    "pytest",
    "pre-commit",
    "sbatch",
    "ssh",
    "kubectl",
)


def test_shell_lines_name_what_exists() -> None:
    check_each(check_shell_line, shell_lines())


def shell_commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command of a line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    for is_sign, words in groupby(lexer, lambda word: not word.strip("|&;")):
        if not is_sign:
            yield list(words)


def check_shell_line(placed: tuple[str, str]) -> None:
    _, line = placed
    for tool, *words in shell_commands(line.partition(" #")[0]):
        if tool == "shard-bench":
            assert all((ROOT / "test" / "bench" / f"{w}.py").is_file() for w in words[:1])
        elif tool.startswith("shard-"):
            known = usage(tool)
            for w in words:
                flag = w.split("=")[0]
                missing = flag.startswith("-") and not re.search(rf"(?<![\w-]){flag}\b", known)
                assert not missing, f"{tool} has no {flag}"
        elif tool == "make":
            targets = (ROOT / "Makefile").read_text()
            assert all(f"\n{w}:" in targets for w in words if "=" not in w)
        elif tool == "python":
            assert all((ROOT / w).is_file() for w in words if w.endswith(".py"))
        else:
            assert tool in OTHER_TOOLS, f"no tool {tool}"


def compilations() -> Iterator[object]:
    """The commands of each page that compile one of its files, in their order."""
    for page in PAGES:
        files = [name for name, _ in FILE.findall(page.read_text())]
        lines = [
            shlex.split(line, comments=True)
            for _, text in blocks(page, "sh")
            for line in text.splitlines()
        ]
        found = [words for words in lines if words[:1] == ["shard-opt"] and words[1] in files]
        if found:
            yield pytest.param(page, found, id=page.name)


@pytest.mark.parametrize(("page", "commands"), list(compilations()))
def test_files_compile(page: Path, commands: list[list[str]], tmp_path: Path) -> None:
    for name, text in FILE.findall(page.read_text()):
        (tmp_path / name).write_text(text)
    with chdir(tmp_path):
        for words in commands:
            code, _, errors = run_tool(words, b"")
            assert (code, errors) == (0, ""), words


# ---- outputs of commands ----


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_outputs_are_current(page: Path, tmp_path: Path) -> None:
    told = "run: python test/pages.py, and read the difference"
    assert regenerated(page, tmp_path) == page.read_text(), told


RUNNING = [
    pytest.param(page, text, id=page.name)
    for page in PAGES
    for text in RUNS.findall(page.read_text())
]


@pytest.mark.parametrize(("page", "text"), sampled(RUNNING, 5))
def test_python_runs(page: Path, text: str, tmp_path: Path) -> None:
    for name, content in FILE.findall(page.read_text()):
        (tmp_path / name).write_text(content)
    (tmp_path / "block.py").write_text(text)
    with chdir(tmp_path):
        code, out, err = run_tool(["python", "block.py"], b"")
    assert code == 0, out + err


# ---- names of codes and files ----


def test_codes_that_pages_name_exist() -> None:
    for page in PAGES:
        assert set(CODE.findall(page.read_text())) <= set(CODES), page.name


def test_pages_name_files_that_exist() -> None:
    made = {step.path for page in PAGES for step in steps(page)}
    for page in PAGES:
        text = BLOCK.sub("", page.read_text())
        for name in re.findall(r"`((?:shardir|passes|tools|test|docs)/[\w./-]+\.\w+)`", text):
            assert name in made or (ROOT / name).exists(), f"{page.name}: {name}"
        for name in re.findall(r"`(\w+\.(?:py|lark))`", text):
            assert name in FILES, f"{page.name}: {name}"


def test_each_page_is_in_the_navigation() -> None:
    listed = (ROOT / "mkdocs.yml").read_text().split()
    assert [
        p
        for p in map(ids, PAGES[1:])
        if p.startswith("docs/") and p.removeprefix("docs/") not in listed
    ] == []


def test_bases_of_families_of_ops_are_in_their_files() -> None:
    page = (ROOT / "docs/contribute/how-to-add-an-op.md").read_text()
    rows = re.findall(r"^\|[^|]*\| `(shardir/dialects/nn/\w+)\.py` \|([^|]*)\|$", page, re.M)
    assert rows
    for path, bases in rows:
        family = importlib.import_module(path.replace("/", "."))
        for base in re.findall(r"`(_?[A-Z]\w+)`", bases):
            assert hasattr(family, base), f"{path}: {base}"


# ---- the walk-throughs ----


@dataclass(frozen=True)
class Step:
    """`<!-- edit: PATH -->`: the block is that new file. With `, before: LINE` or `, after: LINE`
    the block goes before or after the first line that begins so; with `, replace: LINE` it takes
    the line's place; with `, at: end` it goes to the end of the file."""

    path: str
    how: str
    line: str
    text: str

    def apply(self, root: Path) -> None:
        path = root / self.path
        if not self.how:
            assert not path.exists(), f"{self.path} is there already"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.text)
            return
        lines = path.read_text().splitlines(keepends=True)
        if self.how == "at":
            assert self.line == "end", f"{self.path}: at: end, not {self.line}"
            path.write_text("".join([*lines, self.text]))
            return
        at = next((i for i, x in enumerate(lines) if x.strip().startswith(self.line)), None)
        assert at is not None, f"{self.path} has no line that begins with {self.line}"
        start, stop = {"before": (at, at), "after": (at + 1, at + 1), "replace": (at, at + 1)}[
            self.how
        ]
        lines[start:stop] = [self.text]
        path.write_text("".join(lines))


def steps(page: Path) -> list[Step]:
    return [Step(*m) for m in EDIT.findall(page.read_text())]


WALKS = [page for page in PAGES if steps(page)]


@pytest.mark.parametrize("page", WALKS, ids=ids)
def test_the_steps_of_a_walk_through_can_be_done(page: Path, tmp_path: Path) -> None:
    todo = steps(page)
    for path in {s.path for s in todo if (ROOT / s.path).exists()}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    for step in todo:
        step.apply(tmp_path)


@pytest.mark.parametrize("page", sampled(WALKS, 1), ids=ids)
def test_walk_through_works(page: Path, tmp_path: Path) -> None:
    """Its steps are done to a copy of the tree; then the tests that it adds are run there, and the
    checks that it names."""
    root = tmp_path / "copy"
    root.mkdir()
    leave = shutil.ignore_patterns("*.npz", ".*")
    for name in ("shardir", "passes", "tools", "test", "docs"):
        shutil.copytree(ROOT / name, root / name, symlinks=True, ignore=leave)
    for name in ("pyproject.toml", "README.md", "Makefile", "mkdocs.yml"):
        shutil.copyfile(ROOT / name, root / name)
    todo = steps(page)
    for step in todo:
        step.apply(root)
    words = [s.path for s in todo if s.path.startswith("test/") and not s.how]
    words += [w for m in CHECKS.findall(page.read_text()) for w in shlex.split(m)]
    assert words, "a walk-through ends with a test"
    script = Path(__file__).parent / "walk.py"
    (output,) = run_ranks(script, 1, [root, *words], LIMIT_SECONDS)
    assert output.endswith("(ended with 0)"), output


def test_walk_throughs_are_found() -> None:
    names = {page.name for page in WALKS}
    pages = {"an-op", "a-pass", "a-collective", "an-optimizer"}
    assert {f"how-to-add-{what}.md" for what in pages} <= names


def test_expected_errors_are_written_as_the_tool_reads_them() -> None:
    for page in PAGES:
        for _, text in blocks(page, "mlir"):
            assert len(expected_messages(text)) == text.count("expected-error")
