"""plan.json: what a program's functions take and give, for the runtime (runtime_plan.py reads it).

Also the data of `#train.init<file, ...>`: read here, checked against the argument, and written as
.npy files beside the program, which then needs neither numpy nor the source's folder.
"""

from dataclasses import dataclass, field
from functools import cache
from itertools import chain, count
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue

from shardir.algebra.mesh import Axes, Mesh, sizes_of
from shardir.backend.torch.emit.names import identifier
from shardir.backend.torch.emit.program import function_names, mesh_of, public_functions
from shardir.backend.torch.emit.scope import DTYPES
from shardir.backend.torch.ops.dist import groups_of
from shardir.diagnostics import Failure, ShardirError
from shardir.dialects.dist import global_shape, layout_of
from shardir.dialects.locations import file_location
from shardir.dialects.random import check_range
from shardir.dialects.train import Argument, InitAttr, Role, arguments, is_step, updated_keys
from shardir.rewriting.composites import expanded

Array = np.ndarray[Any, Any]

NPY = {"f": "<f8", "d": "<f8", "i": "<i8", "u": "<i8", "b": "|b1"}
KEPT = ("<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1")
"""The types of .npy files that the runtime reads; others are converted."""


@dataclass
class Data:
    """The .npy files of a program."""

    base: Path | None
    files: dict[str, Array] = field(default_factory=dict)
    inits: dict[str, InitAttr] = field(default_factory=dict)
    """How each parameter and state starts: said once, in one of the functions that use it."""
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, path: Path, array: str) -> str:
        """The file in the directory for an array of an .npz file. Raises OSError, ValueError,
        KeyError."""
        key = str(path.resolve()), array
        if key not in self._names:
            values = _load(path)[array]
            kind = values.dtype.kind
            if kind not in "fiub" or values.dtype.itemsize > 8:
                raise ValueError(f"its elements are {values.dtype}: numbers are needed")
            if kind == "u" and values.dtype.itemsize == 8 and values.max(initial=0) >> 63:
                raise ValueError("its numbers do not fit 64 bits with a sign")
            little = values.dtype.newbyteorder("<").str
            values = np.ascontiguousarray(values, dtype=little if little in KEPT else NPY[kind])
            stem, n = identifier(f"{path.stem}_{array}", "array"), 0
            name = f"data/{stem}.npy"
            while name in self.files:
                n += 1
                name = f"data/{stem}_{n}.npy"
            self.files[name] = values
            self._names[key] = name
        return self._names[key]


@cache
def _open(path: str, stamp: tuple[int, int]) -> Any:
    return np.load(path, allow_pickle=False)


def _load(path: Path) -> Any:
    """An .npz file; the same one is opened once while it does not change."""
    stat = path.stat()
    found = _open(str(path), (stat.st_mtime_ns, stat.st_size))
    if not hasattr(found, "files"):
        raise ValueError("it is one array, not an .npz file of named ones (np.savez makes one)")
    return found


def plan_of(module: ModuleOp, base_dir: Path | None = None) -> tuple[dict[str, Any], Data]:
    """The plan (but for `single`), and the data files that it names.

    Raises:
        Failure: something in the program cannot be run: a file that is not there, a state of two
            shapes, a step without a loss.
    """
    module = expanded(module)
    mesh, functions = mesh_of(module), public_functions(module)
    called = function_names(functions)
    data = Data(base_dir, inits=_inits(functions))
    ops = [op for f in functions for op in f.body.block.ops]
    plan = {
        "version": 1,
        "mesh": {
            "name": mesh.name if mesh else "",
            "axes": [list(axis) for axis in mesh.axes] if mesh else [],
        },
        "groups": [_axes(axes) for axes in groups_of(mesh, iter(ops))],
        "functions": {
            f.sym_name.data: {"python": called[f], **_function(f, mesh, data)} for f in functions
        },
    }
    return plan, data


def _inits(functions: list[FuncOp]) -> dict[str, InitAttr]:
    found: dict[str, InitAttr] = {}
    for f in functions:
        for argument in arguments(f):
            key, init = argument.key, argument.init
            if key is None or not isinstance(init, InitAttr):
                continue
            if found.setdefault(key, init) != init:
                message = f"{key!r} starts as [{init.data}] here, as [{found[key].data}] elsewhere"
                raise Failure.at(f, message)
    return found


def _function(f: FuncOp, mesh: Mesh | None, data: Data) -> dict[str, Any]:
    kind = "step" if is_step(f) else "function"
    roles = arguments(f)
    microbatches = 1 + max((a.microbatch for a in roles if a.microbatch is not None), default=0)
    args = [
        _argument(f, v, name, argument, kind, mesh, data, microbatches)
        for v, name, argument in zip(f.body.block.args, _names(f), roles, strict=True)
    ]
    keys: set[str] = set()
    for key in (a["key"] for a in args if a["role"] != "input"):
        if key in keys:
            raise Failure.at(f, f"two arguments of @{f.sym_name.data} are the parameter {key!r}")
        keys.add(key)
    if kind == "step":
        _check_rows(f, args, data)
    last = f.body.block.last_op
    assert isinstance(last, ReturnOp)
    results = []
    for i, (v, updates) in enumerate(zip(last.operands, updated_keys(f), strict=True)):
        results.append(_result(last, i, v, updates, mesh, keys))
    if kind == "step" and all(r["updates"] or r["shape"] for r in results):
        raise Failure.at(f, "a train step returns its loss, a scalar, and then what it updates")
    return {"kind": kind, "narrowest": _narrowest(f), "args": args, "results": results}


def _names(f: FuncOp) -> list[str]:
    """A name for each argument, no two alike: xDSL takes the number off %x_1 and %x_2."""
    found: dict[str, None] = {}
    for v in f.body.block.args:
        hint = v.name_hint or f"arg{v.index}"
        numbered = (f"{hint}_{n}" for n in count(1))
        found[next(name for name in chain([hint], numbered) if name not in found)] = None
    return list(found)


def _narrowest(f: FuncOp) -> str:
    """The float type of a function's values that rounds most."""
    types = (v.type for op in f.body.block.ops for v in op.results)
    found = {str(t.element_type) for t in types if isinstance(t, TensorType)}
    return next((e for e in ("bf16", "f16", "f32") if e in found), "f64")


def _check_rows(f: FuncOp, args: list[dict[str, Any]], data: Data) -> None:
    """Raises Failure unless the files that feed a step keep in step: rows of one number, such as
    inputs and their labels, are read together."""
    fed = [
        (a["name"], len(data.files[a["init"]["file"]]), a["shape"][0])
        for a in args
        if a["role"] == "input" and a["init"]["kind"] == "file"
    ]
    for name, rows, batch in fed:
        if (rows, batch) != fed[0][1:]:
            first, *there = fed[0]
            message = (
                f"%{first} is fed with {there[0]} rows, {there[1]} at a step, %{name} with {rows} "
                f"rows, {batch} at a step: they would not stay together; make them alike"
            )
            raise Failure.at(f, message)


def _axes(axes: Axes) -> list[Any]:
    """Axes as JSON: a name, or [name, pre, size]."""
    return [[a.name, a.pre, a.size] if a.size else a.name for a in axes]


def _split(axes: Axes) -> Any:
    """How a dimension is split, as JSON: its axes, and the sizes of shards that are stated."""
    sizes = sizes_of(axes)
    return {"axes": _axes(axes), "sizes": sizes} if sizes else _axes(axes)


def _value(v: SSAValue, name: str, at: Operation, mesh: Mesh | None) -> dict[str, Any]:
    t = v.type
    if not isinstance(t, TensorType) or str(t.element_type) not in DTYPES:
        raise Failure.at(at, f"the torch backend has no values of type {t}")
    shape, layout = global_shape(t, mesh), layout_of(v)
    dims = layout.dims if layout is not None else ((),) * len(shape)
    return {
        "name": name,
        "shape": list(shape),
        "dtype": str(t.element_type),
        "dims": [_split(axes) for axes in dims],
    }


def _argument(
    f: FuncOp, v: BlockArgument, name: str, argument: Argument, kind: str,
    mesh: Mesh | None, data: Data, microbatches: int,
) -> dict[str, Any]:  # fmt: skip
    key, role = argument.key, argument.role
    init = argument.init if key is None else data.inits.get(key)
    value = _value(v, name, f, mesh)
    layout = layout_of(v)
    if layout is not None and layout.partial:
        raise Failure.at(f, f"argument %{name} is partial: nobody can fill it")
    made = _init(f, value, role, init, kind, data)
    if made["kind"] == "file" and (number := argument.microbatch) is not None:
        made |= {"microbatch": number, "microbatches": microbatches}
    return {**value, "role": str(role), "key": key or name, "init": made}


def _init(
    f: FuncOp, value: dict[str, Any], role: Role, init: Attribute | None, kind: str, data: Data
) -> dict[str, Any]:
    if not isinstance(init, InitAttr):
        if role is not Role.INPUT or init is not None:
            is_now = f", but {init}" if init is not None else ""
            what = Role.INPUT.attribute if role is Role.INPUT else "train.init"
            raise Failure.at(f, f"%{value['name']} has no {what} = #train.init<...>{is_now}")
        if value["dtype"].startswith("i"):
            return {"kind": "integers", "low": 0, "high": 2}
        return {"kind": "normal", "mean": 0.0, "std": 1.0}
    try:
        check_range(init.kind, init.values, value["dtype"])
    except ShardirError as e:
        raise Failure.at(f, f"%{value['name']}: {e}") from None
    if init.kind == "file":
        return {"kind": "file", "file": _file(f, value, role, init.values, kind, data)}
    return {"kind": init.kind, **init.values}


def _file(
    f: FuncOp, value: dict[str, Any], role: Role, init: dict[str, Any], kind: str, data: Data
) -> str:
    """The array of a file, checked against the argument that it fills."""
    where = f"%{value['name']}"
    path = _base(f, data) / init["path"]
    try:
        name = data.add(path, init["array"])
    except FileNotFoundError:
        raise Failure.at(f, f"{where}: there is no file {path}") from None
    except KeyError:
        there = ", ".join(_load(path).files)
        message = f"{where}: {path} has no array {init['array']!r}; it has {there}"
        raise Failure.at(f, message) from None
    except Exception as error:  # what zipfile and numpy raise on files that are not theirs
        raise Failure.at(f, f"{where}: {path} cannot be read: {error}") from None
    values, want = data.files[name], value["shape"]
    have = list(values.shape)
    if role is not Role.INPUT:
        fits, wanted = have == want, f"{want}"
    else:
        least = 1 if kind == "step" else (want or [0])[0]
        fits = bool(want) and have[1:] == want[1:] and bool(have) and have[0] >= least
        wanted = f"at least {least} rows of {want[1:]}"
    if not fits:
        message = f"{where}: the array {init['array']!r} of {path} is {have}; it must be {wanted}"
        raise Failure.at(f, message)
    if value["dtype"].startswith("i") and values.dtype.kind == "f":
        message = f"{where} is {value['dtype']}, the array {init['array']!r} holds {values.dtype}"
        raise Failure.at(f, f"{message}; convert the one or the other")
    return name


def _base(f: FuncOp, data: Data) -> Path:
    """The folder that paths of files count from: that of the source file."""
    if data.base is not None:
        return data.base
    places = [file_location(a.location) for a in f.body.block.args]
    places += [file_location(op.location) for op in (f, *f.body.block.ops)]
    found = next((p for p in places if p is not None), None)
    return Path(PurePath(found[0]).parent) if found is not None else Path()


def _result(
    op: ReturnOp, i: int, v: SSAValue, updates: str | None, mesh: Mesh | None,
    keys: set[str],
) -> dict[str, Any]:  # fmt: skip
    name = updates or v.name_hint or f"result{i}"
    layout, partial = layout_of(v), None
    if layout is not None and layout.partial:
        if updates or layout.reduction == "any":
            message = f"result {i} is a partial {layout.reduction} [{layout}]: reduce it first"
            raise Failure.at(op, message)
        partial = {"op": layout.reduction, "axes": _axes(layout.partial)}
    if updates is not None and updates not in keys:
        raise Failure.at(op, f"result {i} updates {updates!r}, which no argument is")
    return {**_value(v, name, op, mesh), "partial": partial, "updates": updates}
