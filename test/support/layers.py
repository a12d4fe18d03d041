"""The layers of the compiler and the imports between them: `python test/layers.py` prints both.

Every import counts, those within functions and under TYPE_CHECKING too: a lazy import is there to
be light, not to reach up. So does a string that begins with the dotted name of a module of ours,
such as `import_module("shardir.pipelines")` or an entry of a table of lazy imports.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from support.sources import tree

ROOT = Path(__file__).parents[2]

LAYERS = {
    "compat": 0, "diagnostics": 0, "grammar": 0, "shardir_runtime": 0,
    "algebra": 1,
    "dialects": 2,
    "syntax": 3, "analysis": 3,
    "rewriting": 4,
    "interpret": 5, "cost": 5,
    "search": 6, "build": 6,
    "passes": 7,
    "pipelines": 8,
    "backend": 9, "reports": 9,
    "frontends": 10, "editor": 10,
    "api": 11, "universe": 11, "extend": 11,
    "__init__": 12,
    "testing": 13, "tools": 13,
}  # fmt: skip
"""A package imports from lower layers and from itself; docs/contribute/layers.md has what is
in each."""

RUNTIME = ROOT / "shardir" / "backend" / "torch" / "shardir_runtime"
"""A package of its own, at the bottom: programs run with a copy of it, without the rest."""


def files() -> Iterator[tuple[str, Path]]:
    """Each file of the compiler, with the name of its package; the runtime's is its own."""
    package = ROOT / "shardir"
    for path in sorted(package.glob("*.py")):
        yield path.stem, path
    for folder in (*sorted(package.iterdir()), ROOT / "passes", ROOT / "tools"):
        if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__":
            for path in sorted(folder.rglob("*.py")):
                yield RUNTIME.name if RUNTIME in path.parents else folder.name, path


def module_of(path: Path) -> str:
    """The dotted name of a file: `shardir.passes.recompute`."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "shardir" else ("shardir", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path): path for _, path in files()}
"""Each file by its dotted name; shardir/__init__.py is `shardir.__init__`."""


DOTTED = re.compile(r"shardir(?:\.\w+)+")
"""A dotted name of ours at the beginning of a string."""


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """The dotted names that a file imports, with their lines."""
    return [*imported_names(tree(path), path)]


def imported_names(module: ast.Module, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the dotted name of each import. A name that is a module of ours is named
    in full, whichever form of import it stands in, strings included."""
    for node in ast.walk(module):
        match node:
            case ast.ImportFrom():
                is_ours = bool(node.level) or (node.module or "").startswith("shardir")
                is_relative = RUNTIME in path.parents and is_ours
                assert bool(node.level) == is_relative, (
                    f"{path}:{node.lineno}: expected "
                    f"{'a relative' if is_relative else 'an absolute'} import"
                )
                name = _absolute(path, node) if node.level else node.module or ""
                for alias in node.names:
                    full = f"{name}.{alias.name}"
                    yield node.lineno, full if full in MODULES else name
            case ast.Import():
                yield from ((node.lineno, a.name) for a in node.names)
            case ast.Constant(value=str(text)) if (m := DOTTED.match(text)) and " " not in text:
                if name := longest_module(m[0]):
                    yield node.lineno, name


def longest_module(name: str) -> str | None:
    """Return the module of ours that a dotted name is in: itself or the longest prefix."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def _absolute(path: Path, node: ast.ImportFrom) -> str:
    """The module of a relative import."""
    package = path.relative_to(ROOT).parts[: -node.level]
    return ".".join([*package, *filter(None, [node.module])])


def imported_modules() -> dict[str, set[str]]:
    """The modules of ours that each module imports."""
    return {
        module: {name for _, name in imports(path) if name in MODULES} - {module}
        for module, path in MODULES.items()
    }


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; none where there is no circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        return e.args[1]
    return []


def package_of(module: str) -> str:
    """The package of a module, by its dotted name."""
    parts = module.split(".")
    return RUNTIME.name if RUNTIME.name in parts else parts[1]


def main() -> int:
    """Print the layers from the top down, each package with those that it imports."""
    graph = imported_modules()
    needs: dict[str, set[str]] = {}
    for module, others in graph.items():
        mine = needs.setdefault(package_of(module), set())
        mine.update({package_of(other) for other in others} - {package_of(module)})
    for package, layer in sorted(LAYERS.items(), key=lambda item: (-item[1], item[0])):
        below = sorted(needs.get(package, ()), key=lambda name: (-LAYERS[name], name))
        print(f"{layer:2} {package:10} imports {', '.join(below) or 'nothing'}")
    upwards = [
        (package, other)
        for package, others in needs.items()
        for other in others
        if LAYERS[other] >= LAYERS[package]
    ]
    for package, other in upwards:
        print(f"upwards: {package} imports {other}")
    if circle := cycle(graph):
        print(f"cycle: {' -> '.join(circle)}")
    else:
        print(f"no cycle among {len(graph)} modules")
    return int(bool(circle or upwards))
