"""A name has one meaning: no two classes or aliases of the sources share one."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from support.sources import tree

ROOT = Path(__file__).parents[2]

PACKAGES = ("shardir", "passes", "tools")
COPIED = "in an emitted program, which imports no shardir, it is the one of a rank"
SHARED = {"Axes": COPIED, "Axis": COPIED, "DimAxes": COPIED, "Mesh": COPIED}
"""Names of several types, each with the reason."""

ALIASED = ast.Subscript | ast.BinOp | ast.Attribute | ast.Name
"""The forms of the types that aliases name."""


def types(module: ast.Module) -> Iterator[tuple[str, int]]:
    """Yield the name and the line of each class, and of each alias: `Callees = dict[str, Function]`
    at the top of a module, in mixed case."""
    for node in statements(module):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in module.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ALIASED):
            for name in (t.id for t in node.targets if isinstance(t, ast.Name)):
                if name.lstrip("_")[:1].isupper() and not name.isupper():
                    yield name, node.lineno


def statements(of: ast.AST) -> Iterator[ast.stmt]:
    """Yield all statements below a node, but no expressions, which are most of a tree."""
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(of, field, ()):
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


@cache
def found() -> dict[str, list[str]]:
    """Return the places of each type name; a leading underscore makes no other name."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted(p for p in (ROOT / package).rglob("*.py") if p == p.resolve()):
            for name, line in types(tree(path)):
                places[name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{line}")
    return places


def test_no_two_types_share_a_name() -> None:
    shared = {name: places for name, places in found().items() if len(places) > 1}
    assert shared.keys() <= SHARED.keys(), shared
    assert shared.keys() >= SHARED.keys(), "a name that is shared no more"
