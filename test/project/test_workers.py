"""`pytest --workers`: each test runs once, and what fails in a worker has failed."""

import os
import re
import subprocess
import sys
from pathlib import Path

CONFTEST = """
from support.workers import Workers

def pytest_configure(config):
    config.pluginmanager.register(Workers(3))
"""
TESTS = """
import os
import warnings
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(40))
def test_passes(number, tmp_path):
    with open(Path(__file__).with_name("runs"), "a") as runs:
        runs.write(f"{number}\\n")

def test_fails():
    print("printed by one test")
    assert [1] == [2]

def test_ends():
    os._exit(0)

def test_warns():
    warnings.warn("take care")

@pytest.mark.skip(reason="no reason")
def test_skipped():
    pass

@pytest.fixture
def broken():
    raise ValueError("broken fixture")

def test_has_a_broken_fixture(broken):
    pass
"""


def test_results_are_those_of_one_process(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / name).write_text(TESTS.replace('"runs"', f'"{name}.runs"'))
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE",
         "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    for name in ("test_one.py", "test_two.py"):
        numbers = (tmp_path / f"{name}.runs").read_text().split()
        assert sorted(map(int, numbers)) == [*range(40)]
        assert f"FAILED {name}::test_fails - assert [1] == [2]" in found.stdout, found.stdout
        assert f"FAILED {name}::test_ends - the worker has ended in this test" in found.stdout
        assert f"ERROR {name}::test_has_a_broken_fixture - ValueError" in found.stdout
        assert f"{name}::test_warns" in found.stdout
    assert found.stdout.count("printed by one test\n") == 2
    assert re.search("4 failed, 82 passed, 2 skipped, 2 warnings, 2 errors", found.stdout)
    assert found.returncode == 1
