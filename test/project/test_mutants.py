"""The texts and the tests that mutants name exist."""

import ast
from collections import Counter
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise

import pytest
from mutants import ROOT, Mutant, mutants, packages
from support.extent import sampled
from support.layers import LAYERS

WITHOUT = {"__init__", "api", "extend", "universe", "shardir_runtime"}
"""Modules that only name others, and the runtime, whose mutants are among the backend's."""


@cache
def dumped(text: str) -> str:
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("package", sampled(packages(), 5))
def test_a_mutant_changes_one_text_of_its_package(package: str):
    for m in (m for m in mutants() if m.package == package):
        text = (ROOT / m.file).read_text(encoding="utf-8")
        assert ast.dump(ast.parse(m.apply(text))) != dumped(text), m.name
        assert m.breaks.endswith("."), m.name


def check(test: str) -> None:
    """Check that the file of a test, and its function, are there."""
    file, _, function = test.partition("::")
    assert (ROOT / file).exists(), file
    if function and file.endswith(".py"):
        name = function.split("[")[0].split("::")[-1]
        assert f"def {name}(" in (ROOT / file).read_text(encoding="utf-8"), test


@pytest.mark.parametrize("package", packages())
def test_the_tests_of_a_mutant_are_there(package: str):
    for m in (m for m in mutants() if m.package == package):
        _check_tests(m)


def _check_tests(m: Mutant) -> None:
    words = m.tests.split()
    selected = [w for before, w in pairwise(["", *words]) if before != "-k" and w != "-k"]
    assert selected, m.name
    for test in selected:
        check(test)


def test_each_folder_of_tests_is_collected(pytestconfig: pytest.Config) -> None:
    patterns = pytestconfig.getini("norecursedirs")
    left_out = [
        file for file in (ROOT / "test").rglob("test_*.py")
        if any(fnmatch(folder, p) for folder in file.relative_to(ROOT).parts[:-1] for p in patterns)
    ]  # fmt: skip
    assert not left_out


def test_each_package_has_mutants_of_its_own():
    assert set(packages()) == set(LAYERS) - WITHOUT
    assert Counter(m.package for m in mutants()).keys() == set(packages())
    assert max(Counter(m.name for m in mutants()).values()) == 1


FUNCTIONS = """
def f(x):
    return x + 1


class C:
    @property
    def f(self):
        def inner():
            return 1
        return x + 1

    y = x + 1
"""


@pytest.mark.parametrize(
    ("function", "old", "line"), [("f", "x + 1", 3), ("C.f", "x + 1", 11), ("C", "x + 1", 13),
                                  ("C.f.inner", "1", 10)],
)  # fmt: skip
def test_a_mutant_changes_its_function_only(function: str, old: str, line: int) -> None:
    mutant = Mutant("m", "", "shardir/m.py", function, old, "0", "")
    changed = [
        number for number, (before, after) in enumerate(
            zip(FUNCTIONS.splitlines(), mutant.apply(FUNCTIONS).splitlines(), strict=True), 1
        ) if before != after
    ]  # fmt: skip
    assert changed == [line]


@pytest.mark.parametrize(("function", "times"), [("", 0), ("C.f", 2), ("g", 0)])
def test_a_text_that_is_not_found_once_is_an_error(function: str, times: int) -> None:
    old = "1" if times else "x + 1"
    mutant = Mutant("m", "", "shardir/m.py", function, old, "0", "")
    text = FUNCTIONS.replace("x + 1", "1 + 1") if times else FUNCTIONS
    with pytest.raises(ValueError, match=f"got it {times} times"):
        mutant.apply(text)
