"""The floors hold: a room imports from lower floors, from itself, and nothing from above.

Every import counts, those within functions and under TYPE_CHECKING too: a lazy import is there to
be light, not to reach up.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardir.backend.torch.runtime import FOLDER, MEASURING, RUNTIME_FILES

ROOT = Path(__file__).parent.parent.parent

FLOORS = {
    "diagnostics": 0,
    "algebra": 1,
    "dialects": 2,
    "syntax": 3,
    "analysis": 4, "interpret": 4,
    "cost": 5,
    "search": 6, "rewriting": 6,
    "passes": 7,
    "pipelines": 8, "frontends": 8, "backend": 8,
    "api": 9, "tools": 9, "universe": 9, "__init__": 9,
}  # fmt: skip
"""docs/architecture.md says what is in each."""

TOP = 9
LIBRARIES = {
    "diagnostics": set(),
    "algebra": {"lark", "numpy"},
    "dialects": {"numpy", "xdsl"},
    "syntax": {"lark", "xdsl"},
    "analysis": {"xdsl"},
    "interpret": {"numpy", "xdsl"},
    "cost": {"numpy", "scipy", "xdsl"},
    "search": {"numpy", "xdsl"},
    "rewriting": {"xdsl"},
    "passes": {"xdsl"},
}
"""What else the lower rooms may import, beside Python's own library."""

KNOWN = {
    "lark",
    "numpy",
    "xdsl",
    "torch",
    "rich",
    "jax",
    "highspy",
    "scipy",
    "sklearn",
    "safetensors",
}


def files() -> Iterator[tuple[str, Path]]:
    """Each file with the name of its room."""
    for path in sorted((ROOT / "shardir").glob("*.py")):
        yield path.stem, path
    for folder in (*sorted((ROOT / "shardir").iterdir()), ROOT / "passes", ROOT / "tools"):
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__":
            for path in sorted(folder.rglob("*.py")):
                yield folder.name, path


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """The dotted names that a file imports, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            if node.module == "shardir":
                yield from ((node.lineno, f"shardir.{a.name}") for a in node.names)
            else:
                yield node.lineno, node.module or ""
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, a.name) for a in node.names)


FILES = [pytest.param(room, path, id=str(path.relative_to(ROOT))) for room, path in files()]


@pytest.mark.parametrize(("room", "path"), FILES)
def test_imports_run_downwards(room: str, path: Path) -> None:
    assert room in FLOORS, f"{room} is on no floor; say in FLOORS which"
    if path.parent == FOLDER:
        return
    for line, name in imports(path):
        first, *rest = name.split(".")
        if first in ("passes", "tools"):
            pytest.fail(f"{path}:{line}: import shardir.{name}, not {name}: one module, one name")
        if first == "shardir":
            other = rest[0] if rest else "__init__"
            below = FLOORS[other] < FLOORS[room]
            assert below or other == room or FLOORS[room] == TOP, (
                f"{path}:{line}: {room} (floor {FLOORS[room]}) imports "
                f"{name} (floor {FLOORS[other]})"
            )
        elif first in KNOWN and room in LIBRARIES:
            assert first in LIBRARIES[room], f"{path}:{line}: {room} does without {first}"


@pytest.mark.parametrize("name", (*RUNTIME_FILES, MEASURING))
def test_what_is_copied_beside_programs_needs_torch_only(name: str) -> None:
    path = FOLDER / name
    for line, imported in imports(path):
        first = imported.split(".")[0]
        assert first not in (KNOWN | {"shardir"}) - {"torch"}, f"{path}:{line}: {imported}"
        if (path.parent / f"{first}.py").exists():
            assert f"{first}.py" in RUNTIME_FILES, f"{path}:{line}: {first} is not copied"
