"""The types of the installed package, as a user's script gets them (PEP 561).

`make lint` checks user_script.py with pyrefly; the long form with mypy and pyright too, beside a
wheel that is installed in an environment of its own.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.extent import long_form

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "user_script.py"
WRONG = """

def wrong(model: nn.Module, x: torch.Tensor) -> None:
    shardir.compile(model, x, optimzer="adamw")
    shardir.compile_file("net.ir", mode=3)
    shardir.run(x)
"""
"""Calls whose arguments no form of the function has: an error on each line."""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with a wheel of shardir, and the packages of this one."""
    folder = tmp_path_factory.mktemp("user")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run([*pip, *build], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "env")], check=True)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    names = {path.name for path in (ROOT / "shardir" / "reports" / "template").iterdir()}
    files = {"py.typed", *(f"reports/template/{name}" for name in names)}
    assert {f"shardir/{name}" for name in files} <= set(zipfile.ZipFile(wheel).namelist())
    install = ["--python", str(python), "install", "--no-deps", str(wheel)]
    subprocess.run([*pip, *install], check=True)
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (here,) = {path for path in map(Path, sys.path) if path.name == "site-packages"}
    (packages / "others.pth").write_text(f"{here}\n")
    return python


@long_form
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_script_has_types(checker: str, user: Path, tmp_path: Path) -> None:
    arguments = {
        "mypy": ["mypy", "--strict", "--python-executable", str(user), "--no-error-summary"],
        "pyright": ["pyright", "--pythonpath", str(user)],
    }[checker]

    def errors_of(text: str) -> tuple[set[int], str]:
        script = tmp_path / "script.py"
        script.write_text(text)
        command = [sys.executable, "-m", *arguments, script.name]
        found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert not found.stderr
        lines = [line for line in found.stdout.splitlines() if " error: " in line]
        return {int(line.split(":")[1]) for line in lines}, found.stdout

    text = SCRIPT.read_text()
    lines, output = errors_of(text)
    assert not lines, output
    last = len((text + WRONG).splitlines())
    assert errors_of(text + WRONG)[0] == {last - 2, last - 1, last}
