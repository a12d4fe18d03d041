"""A class name has one meaning: no two classes of the sources share one."""

import ast
from collections import defaultdict

from vocabulary import ROOT

PACKAGES = ("shardir", "passes", "tools")
SHARED = {
    "Mesh": "in an emitted program, which imports no shardir, it is the mesh as a rank sees it"
}
"""Names of several classes, each with the reason."""

VAGUE = {"Builder", "Clock", "Option", "Placement", "Plan", "Problem", "Scope", "Step"}
"""Names that do not say of what they are: `OpBuilder`, `ProgramPlan`, `CollectiveStep`."""


def classes() -> dict[str, list[str]]:
    """Return the files of each class name; a leading underscore makes no other name."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted(p for p in (ROOT / package).rglob("*.py") if p == p.resolve()):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_no_two_classes_share_a_name() -> None:
    shared = {name: files for name, files in classes().items() if len(files) > 1}
    assert shared.keys() <= SHARED.keys(), shared
    assert shared.keys() >= SHARED.keys(), "a name that is shared no more"


def test_names_say_of_what() -> None:
    found = classes()
    assert not {name: found[name] for name in VAGUE & found.keys()}
