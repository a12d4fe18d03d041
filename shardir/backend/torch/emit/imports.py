"""The names that program text uses beside its own, in one table.

The import lines of a program, the names that no value or function of it takes, and the files that
are copied beside it follow from this table. An entry of an op calls `scope.use` with a name of it.
"""

from collections.abc import Iterable

MODULES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "rt": "runtime",
    "runtime_arena": "runtime_arena",
    "moves": "runtime_exchange",
    "ops": "ops_runtime",
    "fallback": "ops_fallback",
    "ops_attention": "ops_attention",
    "ops_memory": "ops_memory",
    "ops_positions": "ops_positions",
    "ops_products": "ops_products",
    "ops_random": "ops_random",
    "ops_updates": "ops_updates",
    "sliding": "ops_sliding",
    "stages": "runtime_stages",
    "windows": "ops_windows",
}
"""Modules by their names in program text."""

SHORTHANDS = {"arena": "runtime_arena.Arena(__file__)", "aten": "torch.ops.aten"}
"""Other expressions that have a name at the head of a program."""

MESH = "mesh"
"""The first parameter of every function of a program."""

NAMES = frozenset({*MODULES, *SHORTHANDS, MESH})


def modules_of(used: Iterable[str]) -> set[str]:
    """The modules that these names stand for."""
    return {MODULES[name] for name in used if name in MODULES}


def import_lines(used: Iterable[str]) -> list[str]:
    """The import lines for these names: torch's modules, then those beside the program."""
    theirs, ours = [], []
    for module, name in sorted((MODULES[name], name) for name in used if name in MODULES):
        lines = theirs if module.split(".")[0] == "torch" else ours
        lines.append(f"import {module}" if name == module else f"import {module} as {name}")
    return [*theirs, "", *ours]


def shorthand_lines(used: Iterable[str]) -> list[str]:
    """The assignments of shorthands, each after an empty line."""
    names = sorted(name for name in used if name in SHORTHANDS)
    return [line for name in names for line in ("", f"{name} = {SHORTHANDS[name]}")]
