"""The imported names of programs, in one table.

The import lines of a program, and the reserved names of its values and functions, follow from this
table. The entry of an op calls `scope.use` with a name.
"""

from collections.abc import Iterable

MODULES = {
    "torch": "torch",
    "F": "torch.nn.functional",
    "rt": "shardir_runtime.runtime",
    "runtime_arena": "shardir_runtime.arena",
    "moves": "shardir_runtime.collectives.exchange",
    "ops": "shardir_runtime.ops.tensors",
    "fallback": "shardir_runtime.ops.fallback",
    "ops_attention": "shardir_runtime.ops.attention",
    "ops_memory": "shardir_runtime.ops.memory",
    "ops_positions": "shardir_runtime.ops.positions",
    "ops_products": "shardir_runtime.ops.products",
    "ops_random": "shardir_runtime.ops.random",
    "ops_updates": "shardir_runtime.ops.updates",
    "sliding": "shardir_runtime.ops.sliding",
    "stages": "shardir_runtime.stages.pipeline",
    "windows": "shardir_runtime.ops.windows",
}
"""The module of each name in a program."""

SHORTHANDS = {"arena": "runtime_arena.Arena(__file__)", "aten": "torch.ops.aten"}
"""Expressions that are named at the head of a program."""

MESH = "mesh"
"""The first parameter of every function of a program."""

NAMES = frozenset({*MODULES, *SHORTHANDS, MESH})


def import_lines(used: Iterable[str]) -> list[str]:
    """Return the import lines for the used names: torch's modules, then modules of the runtime."""
    torch_lines, runtime_lines = [], []
    for module, name in sorted((MODULES[name], name) for name in used if name in MODULES):
        package, _, last = module.rpartition(".")
        if module.split(".")[0] == "torch":
            torch_lines.append(f"import {module}" + (f" as {name}" if name != module else ""))
        else:
            alias = f" as {name}" if name != last else ""
            runtime_lines.append(f"from {package} import {last}{alias}")
    return [*torch_lines, "", *sorted(runtime_lines)]


def shorthand_lines(used: Iterable[str]) -> list[str]:
    """Return the assignments of the used shorthands, each after an empty line."""
    names = sorted(name for name in used if name in SHORTHANDS)
    return [line for name in names for line in ("", f"{name} = {SHORTHANDS[name]}")]
