"""Program text: a module in the local view -> readable Python on torch.

    %y = nn.matmul %x, %w : ...            h = x @ w
    %z = dist.all_reduce <sum> %y over <tp> : ...
                                        -> # all-reduce sum over tp (2 ranks), 2.0 KiB: nn.matmul
                                           #   %y at mlp.ir:12 leaves partial sums
                                           h = rt.all_reduce(mesh, h, "sum", ("tp",), donate=True)

1. Values keep their names; a value reuses the variable of a dying operand with its name.
2. The comment of a collective has its group, its bytes on a device, and the ops that need it.
3. A train step deletes values after their last use, and updates parameters in place.
4. Input never becomes code: see names.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import Any, NamedTuple

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation
from xdsl.passes import ModulePass

from shardir.algebra.mesh import Mesh
from shardir.backend.torch.emit import names
from shardir.backend.torch.emit.arena import FunctionArena
from shardir.backend.torch.emit.biases import with_biases
from shardir.backend.torch.emit.imports import import_lines, shorthand_lines
from shardir.backend.torch.emit.names import Names, comment_lines, docstring, join_items
from shardir.backend.torch.emit.scope import Entry, Program, foreign_names, function_text
from shardir.backend.torch.emit.stages import StagesScope, called_functions
from shardir.backend.torch.emit.variables import OpLine
from shardir.backend.torch.emit.weights import with_weights
from shardir.backend.torch.ops import TORCH
from shardir.backend.torch.ops.dist import TORCH_DIST
from shardir.backend.torch.ops.templates import entry_of
from shardir.diagnostics import Failure
from shardir.dialects import dist, train
from shardir.dialects.dist import layout_of, meshes_of
from shardir.dialects.installed import installed
from shardir.dialects.locations import file_location
from shardir.passes.outline_blocks import has_equal_blocks
from shardir.pipelines import build
from shardir.rewriting.composites import expand_module
from shardir.rewriting.copying import copied
from shardir.rewriting.functions import bodies

TABLE = {**TORCH, **TORCH_DIST}
"""The emitter of each op of shardir."""


@cache
def _table(version: int) -> Mapping[type[Operation], Entry]:
    """Return the emitter of each op, those of extensions too; `version`: of the registry."""
    return TABLE | {op: entry_of(op, text) for op, text in installed().torch().items()}


def emittable(module: ModuleOp) -> ModuleOp:
    """Return the module in the form that is emitted, except for loops: itself if it has that
    form."""
    return with_biases(with_weights(expand_module(module)))


def outline_copy(module: ModuleOp) -> ModuleOp:
    """Return a copy with equal blocks as loops: the module itself if no emitted function has
    any."""
    emit = public_functions(module)
    if not any(f in emit and has_equal_blocks(f) for f, _ in bodies(module)):
        return module
    outlined = copied(module)
    _outline(outlined)
    return outlined


def outline(module: ModuleOp) -> None:
    """Turn equal blocks into loops in place, if the module needs no other change: it is in
    `emittable` form and has no private functions."""
    functions = [op for op in module.body.ops if isinstance(op, FuncOp) and op.body.blocks]
    if emittable(module) is module and functions == public_functions(module):
        _outline(module)


def _outline(module: ModuleOp) -> None:
    for p in _outlining():
        p.apply(Context(), module)


@cache
def _outlining() -> list[ModulePass]:
    return build("outline-blocks")


def public_functions(module: ModuleOp) -> list[FuncOp]:
    """Return the functions of a program: public functions with a body."""
    return [
        op
        for op in module.body.ops
        if isinstance(op, FuncOp)
        and op.body.blocks
        and (op.sym_visibility is None or op.sym_visibility.data != "private")
    ]


def mesh_of(module: ModuleOp) -> Mesh | None:
    """Return the mesh of a program: the mesh of its layouts, else the only declared mesh.

    Raises:
        Failure: the program has two meshes, or the module is not ready to be emitted.
    """
    meshes = meshes_of(module)
    used: dict[str, Operation] = {}
    for f in public_functions(module):
        for v, owner in _values(f):
            layout = layout_of(v)
            if layout is None:
                continue
            if not dist.is_local(v.type):
                message = (
                    "expected a program of the local view, got one of the global view; run the "
                    "pipeline `train` first"
                )
                raise Failure.at(owner, message)
            used.setdefault(layout.mesh, owner)
    if len(used) > 1:
        names_of_meshes = ", ".join(f"@{n}" for n in used)
        raise Failure.at(
            list(used.values())[-1], f"expected one mesh in a program, got {names_of_meshes}"
        )
    if used:
        return meshes[next(iter(used))]
    return next(iter(meshes.values())) if len(meshes) == 1 else None


def _values(f: FuncOp) -> Any:
    for a in f.body.block.args:
        yield a, f
    for op in f.body.block.ops:
        for r in op.results:
            yield r, op


def source_of(module: ModuleOp) -> str | None:
    """The file that the module was read from."""
    for op in module.body.ops:
        if (place := file_location(op.location)) is not None:
            return place[0]
    return None


def function_names(functions: Sequence[FuncOp]) -> dict[FuncOp, str]:
    """Return the name of each function in the program, functions of stages included."""
    emitted = [
        *functions,
        *(g for f in functions if train.schedule_of(f) for g in called_functions(f)),
    ]
    free_names = Names(name for f in emitted for name in foreign_names(f))
    return {f: free_names.new(f.sym_name.data, "function") for f in emitted}


class Emitted(NamedTuple):
    """The text of a program, the op of each line by line number from 1 (for lines of ops), and the
    arenas of its functions, if it has one."""

    text: str
    lines: dict[int, Operation]
    arenas: dict[str, FunctionArena] | None


def program_text(
    module: ModuleOp,
    rank: int | None = None,
    single: bool = False,
    straight_line: bool = False,
    arena: bool = False,
) -> str:
    """The text of the program that `emit` returns."""
    return emit(module, rank, single, straight_line, arena).text


def emit(
    module: ModuleOp,
    rank: int | None = None,
    single: bool = False,
    straight_line: bool = False,
    arena: bool = False,
) -> Emitted:
    """Return the program for all ranks, or for one rank with its constants folded.

    Args:
        straight_line: emit steps in stages as plain calls on each rank, not as a table.
        arena: give values slots in one block of memory (arena.py).

    Raises:
        Failure: the backend has no text for an op of the module.
    """
    return emit_outlined(outline_copy(emittable(module)), rank, single, straight_line, arena)


def emit_outlined(
    module: ModuleOp,
    rank: int | None = None,
    single: bool = False,
    straight_line: bool = False,
    arena: bool = False,
) -> Emitted:
    """Return the program of an `emittable` module whose equal blocks are loops.

    Raises:
        Failure: as `emit` does.
    """
    mesh = mesh_of(module)
    functions = public_functions(module)
    for op in module.body.ops:
        if isinstance(op, train.Request):
            message = (
                f"expected functions in place of requests, got {op.name}; run the pipeline `train` "
                "first"
            )
            raise Failure.at(op, message)
    for f in functions:
        if mesh is None and train.schedule_of(f) is not None:
            message = f"expected a mesh of one stage for @{f.sym_name.data}, got none"
            raise Failure.at(f, f"{message}; declare dist.mesh @m <d = 1>")
        if train.sync_of(f) is not None:
            message = f"expected a step of each replica in @{f.sym_name.data}, got train.sync"
            raise Failure.at(f, f"{message}; run local-steps")
    if not functions:
        raise Failure("expected a public function with a body, got none")
    python_names = function_names(functions)
    program = Program(mesh, rank, _table(installed().version), straight_line, arena)
    bodies = [
        function_text(program, f, python_names[f])
        if train.schedule_of(f) is None else StagesScope(program, f, python_names).text()
        for f in functions
    ]  # fmt: skip
    lines = [_docstring(module, mesh, rank, single, sorted(program.foreign)), ""]
    lines += import_lines(program.used)
    if program.foreign:
        lines += [
            "",
            *comment_lines("The modules of custom ops, to be importable where this runs:"),
        ]
        lines += [f"import {i}" for i in sorted(program.foreign)]
    lines += shorthand_lines(program.used)
    for name, literal in program.constants.items():
        lines += ["", *join_items(f"{name} = (", literal, ")", 0)]
    for body in bodies:
        lines += ["", "", *body]
    lines += ["", "", 'if __name__ == "__main__":']
    entries = [f"{names.literal(f.sym_name.data)}: {python_names[f]}" for f in functions]
    end = "}, single=True)" if single else "})"
    line = "    rt.main({" + ", ".join(entries) + end
    if len(line) <= names.WIDTH:
        lines.append(line)
    else:
        lines += ["    rt.main({", *(f"        {e}," for e in entries), f"    {end}"]
    text = "\n".join(lines) + "\n"
    return Emitted(text, dict(_ops_of(lines)), program.arenas)


def _ops_of(lines: Sequence[str]) -> Iterator[tuple[int, Operation]]:
    """Yield the line number and the op of each line of an op; one text may span several lines."""
    number = 1
    for line in lines:
        if isinstance(line, OpLine):
            yield number, line.op
        number += 1 + line.count("\n")


def _docstring(
    module: ModuleOp, mesh: Mesh | None, rank: int | None, single: bool, foreign: Sequence[str]
) -> str:
    source = source_of(module)
    origin = f"Compiled by shardir from {PurePath(source).name if source else 'a module'}"
    needed = f"Its custom ops need {', '.join(foreign)}, installed or in PYTHONPATH."
    needs = [needed] if foreign else []
    if single:
        return docstring(f"{origin} for one device: the reference for all ranks together.",
                         "python single.py", *needs)  # fmt: skip
    if mesh is None:
        return docstring(f"{origin} for one device.", "python program.py", *needs)
    where = f"{origin} for mesh {mesh} ({mesh.size} ranks, numbered row-major)"
    start = f"torchrun --nproc-per-node {mesh.size} program.py, or shard-run with this directory."
    if rank is not None:
        at = ", ".join(f"{n} = {mesh.coordinate(rank, a)}" for (n, _), a in
                       zip(mesh.axes, mesh.names, strict=True))  # fmt: skip
        return docstring(
            f"{where}: rank {rank} ({at}) alone, for reading; the ranks run program.py."
        )
    return docstring(f"{where}. Every rank runs this file on its own shards.", start, *needs)
