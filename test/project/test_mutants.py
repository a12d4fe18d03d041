"""The texts and the tests that mutants name exist, and each mutant was caught as it is now."""

import ast
from collections import Counter
from fnmatch import fnmatch
from itertools import pairwise

import pytest
from layers import LAYERS
from mutants import ROOT, Mutant, caught, mutants, packages
from sources import tree

WITHOUT = {"__init__", "api", "universe"}
"""Modules that only name others."""


@pytest.mark.parametrize("package", packages())
def test_a_mutant_changes_one_text_of_its_package(package: str):
    for m in (m for m in mutants() if m.package == package):
        changed = m.apply((ROOT / m.file).read_text(encoding="utf-8"))
        assert ast.dump(ast.parse(changed)) != ast.dump(tree(ROOT / m.file)), m.name
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
    recorded = caught().get(m.name)
    refresh = f"run python test/mutants/run.py {m.name!r}"
    assert recorded is not None, f"expected a test that caught it, got none; {refresh}"
    assert recorded.digest == m.digest, f"expected the record of {m}, got an older one; {refresh}"
    check(recorded.test)
    assert recorded.test.startswith(tuple(selected)), m.name


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
    names = Counter(m.name for m in mutants())
    assert max(names.values()) == 1
    assert names.total() >= 60
    assert caught().keys() == names.keys()
