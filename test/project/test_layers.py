"""Each package imports from lower layers and from itself only.

Layers, and what counts as an import, are in test/support/layers.py.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.layers import (
    LAYERS,
    MODULES,
    ROOT,
    RUNTIME,
    cycle,
    files,
    imported_modules,
    imported_names,
    imports,
    main,
    package_of,
)

from shardir.passes import PASSES

LIBRARIES = {
    "compat": {"torch", "xdsl"},
    "diagnostics": {"rich"},
    "shardir_runtime": {"safetensors", "torch"},
    "grammar": {"lark"},
    "algebra": {"numpy"},
    "dialects": {"numpy", "xdsl"},
    "syntax": {"xdsl"},
    "analysis": {"numpy", "xdsl"},
    "rewriting": {"xdsl"},
    "interpret": {"numpy", "xdsl"},
    "cost": {"numpy", "scipy", "xdsl"},
    "search": {"numpy", "xdsl"},
    "passes": {"xdsl"},
    "pipelines": {"xdsl"},
    "reports": {"xdsl"},
    "api": {"numpy", "torch", "xdsl"},
    "build": {"numpy", "xdsl"},
    "frontends": {"jax", "jaxlib", "numpy", "safetensors", "torch", "xdsl"},
    "editor": {"xdsl"},
    "testing": {"numpy", "torch", "xdsl"},
    "universe": {"xdsl"},
}
"""The libraries that each package below the backend and the tools may import."""

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


def test_imports_run_downwards() -> None:
    wrong = [message for package, path in files() for message in upward(package, path)]
    assert not wrong, "\n".join(wrong)


def upward(package: str, path: Path) -> Iterator[str]:
    """Yield what is wrong with the imports of a file."""
    if package not in LAYERS:
        yield f"{package} is in no layer; name its layer in test/support/layers.py"
        return
    for line, name in imports(path):
        first, *rest = name.split(".")
        if first in ("passes", "tools"):
            yield f"{path}:{line}: import shardir.{name}, not {name}: one module, one name"
        elif first == "shardir":
            other = package_of(name) if rest else "__init__"
            if LAYERS[other] >= LAYERS[package] and other != package:
                yield (
                    f"{path}:{line}: {package} (layer {LAYERS[package]}) imports "
                    f"{name} (layer {LAYERS[other]})"
                )
        elif first in KNOWN and first not in LIBRARIES.get(package, KNOWN):
            yield f"{path}:{line}: {package} must not import {first}"


def test_the_layers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[: len(LAYERS)]] == [
        package for package, _ in sorted(LAYERS.items(), key=lambda item: (-item[1], item[0]))
    ]


def test_no_pass_imports_a_pass() -> None:
    passes = {f"shardir.passes.{name.replace('-', '_')}" for name in PASSES}
    assert passes <= MODULES.keys()
    for module in passes:
        others = passes.intersection(name for _, name in imports(MODULES[module])) - {module}
        assert not others, f"{module} imports {', '.join(others)}; move what it needs to rewriting/"


def test_there_are_no_import_cycles() -> None:
    assert not cycle(imported_modules())


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert {*cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}})} == {"b", "c"}


@pytest.mark.parametrize(
    "source",
    [
        'import_module("shardir.pipelines").build',
        '__import__("shardir.pipelines")',
        'PLACES = {"build": "shardir.pipelines.build"}',
        'def f(name):\n    return importlib.import_module(f"shardir.pipelines.{name}")',
        "def f():\n    from shardir import pipelines",
    ],
)
def test_an_import_by_a_string_is_seen(source: str) -> None:
    (found,) = imported_names(ast.parse(source), Path("shardir/rewriting/registry.py"))
    assert found[1] == "shardir.pipelines"


@pytest.mark.parametrize("text", ["shardir.passes are listed", "a shardir.pipelines", "shardir.py"])
def test_a_text_that_names_a_module_is_no_import(text: str) -> None:
    assert not [*imported_names(ast.parse(repr(text)), Path())]


def test_shm_is_behind_the_interface_of_torch_distributed() -> None:
    """One module imports it, to register it; and it imports what is private in torch alone."""
    runtime = ".".join(RUNTIME.relative_to(ROOT).parts)
    shm, graph = f"{runtime}.shm", imported_modules()
    outside = {name for name in graph if not name.startswith(shm)}
    users = {name for name in outside if any(n.startswith(shm) for n in graph[name])}
    assert users == {f"{runtime}.run.process"}
    needed = {n for name in graph.keys() - outside for n in graph[name]}
    assert needed & outside == {f"{runtime}.compat"}
