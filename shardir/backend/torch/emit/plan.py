"""plan.json: the arguments and results of a program's functions, for the runtime, which reads it in
plan/program.py."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.mesh import Axes, Axis, Mesh, sizes_of
from shardir.backend.torch.emit.data import Data, initial_value, rows_of
from shardir.backend.torch.emit.program import function_names, mesh_of, public_functions
from shardir.backend.torch.emit.stages import called_functions, places_of
from shardir.backend.torch.emit.types import DTYPES
from shardir.backend.torch.emit.weights import with_weights
from shardir.cost.functions import narrowest_float
from shardir.diagnostics import Failure
from shardir.dialects import dist, train
from shardir.dialects.dist import global_shape, layout_of
from shardir.dialects.nn.base import Array
from shardir.dialects.nn.types import element_name
from shardir.dialects.train import (
    REPLICA,
    Argument,
    InitAttr,
    arguments,
    every_of,
    is_of_replica,
    is_step,
    metric_names,
    replicas_of,
    result_attrs,
    result_batches,
    updated_keys,
)
from shardir.rewriting.composites import expand_module


def plan_of(
    module: ModuleOp, base_dir: Path | None = None, copied: Path | None = None,
    states: Mapping[str, Array] = MappingProxyType({}),
) -> tuple[dict[str, Any], Data]:  # fmt: skip
    """Return the plan (without `single`), and the data files that it names.

    Args:
        copied: a directory with the data files, which is read in place of the sources.
        states: initial values that replace the program's; unknown states are ignored.

    Raises:
        Failure: the program cannot run: a missing file, a state of two shapes, a step without a
            loss.
    """
    module = with_weights(expand_module(module))
    mesh, functions = mesh_of(module), public_functions(module)
    names = function_names(functions)
    data = Data(base_dir, copied, inits=_inits(functions))
    plan: dict[str, Any] = {
        "version": 1,
        "mesh": {
            "name": mesh.name if mesh else "",
            "axes": [list(axis) for axis in mesh.axes] if mesh else [],
        },
        "groups": [_axes(axes) for axes in _groups(functions, mesh)],
        "channels": [[_axes(axes), *ends] for axes, *ends in _channels(functions, mesh)],
        "functions": {
            f.sym_name.data: {"python": names[f], **_function(f, mesh, data)} for f in functions
        },
    }
    _check_states(functions, plan["functions"])
    retained = (a for f in plan["functions"].values() for a in f["args"] if a["role"] != "input")
    keys = dict.fromkeys(a["key"] for a in retained)
    if files := {key: data.add_state(key, states[key]) for key in keys if key in states}:
        plan["states"] = files
    return plan, data


def states_in(directory: Path) -> dict[str, Array]:
    """Return the initial values of states in a written directory that replace the program's."""
    plan = json.loads((directory / "plan.json").read_text(encoding="utf-8"))
    return {key: np.load(directory / file, mmap_mode="r", allow_pickle=False)
            for key, file in plan.get("states", {}).items()}  # fmt: skip


def _check_states(functions: list[FuncOp], plans: dict[str, Any]) -> None:
    """Raise Failure unless each parameter or state has one type in all functions, and one set of
    ranks in all functions in stages."""
    types: dict[str, tuple[str, str]] = {}
    places: dict[str, tuple[list[int], str]] = {}
    for f in functions:
        for a in plans[f.sym_name.data]["args"]:
            if a["role"] == "input":
                continue
            if (at := a.get("at")) is not None:
                expected, where = places.setdefault(a["key"], (at, f.sym_name.data))
                if at != expected:
                    message = f"expected {a['key']!r} on ranks {expected} of the stages, as in "
                    raise Failure.at(f, f"{message}@{where}, got {at}; mark the same stages")
            t = f"{a['dtype']} {a['shape']}"
            expected, where = types.setdefault(a["key"], (t, f.sym_name.data))
            if t != expected:
                message = f"expected {a['key']!r} to be {expected}, as in @{where}, got {t}"
                raise Failure.at(f, f"{message}; use one type, or another name")


def _groups(functions: list[FuncOp], mesh: Mesh | None) -> list[Axes]:
    """The axes of all collectives that communicate, each once, in program order."""
    groups: dict[Axes, None] = {}
    if any(train.schedule_of(f) is not None for f in functions):
        groups[Axis(train.STAGE_AXIS),] = None
    for op in _ops(functions):
        if mesh is None or isinstance(op, dist.LOCAL):
            continue
        kinds = dist.CollectiveOp | dist.SendOp | dist.RecvOp | dist.RingProductOp
        communicates = isinstance(op, kinds)
        if communicates and mesh.extent(op.axes.data) > 1:
            groups.setdefault(op.axes.data)
    return list(groups)


def _channels(functions: list[FuncOp], mesh: Mesh | None) -> list[tuple[Axes, int, int]]:
    """The channels, each once: the axes of a group, and the positions of sender and receiver."""
    channels: dict[tuple[Axes, int, int], None] = {}
    for f in functions:
        if train.schedule_of(f) is not None:
            edges = train.proven_order(f).runs.edges()
            channels |= {((Axis(train.STAGE_AXIS),), *ends): None for ends in edges}
    for op in _ops(functions):
        if isinstance(op, dist.SendOp):
            source, target, axes = op.ends
            channels.setdefault((axes, source, target))
        elif isinstance(op, dist.PermuteOp):
            pairs = zip(op.pairs.data[::2], op.pairs.data[1::2], strict=True)
            channels |= {(op.axes.data, s, t): None for s, t in pairs if s != t}
        elif isinstance(op, dist.RingProductOp) and mesh is not None:
            n = op.steps(mesh)
            channels |= {(op.axes.data, k, (k + 1) % n): None for k in range(n)}
    return list(channels)


def _ops(functions: list[FuncOp]) -> Iterator[Operation]:
    """The ops of functions, and of the stages' functions of their steps."""
    stages = (g for f in functions if train.schedule_of(f) for g in called_functions(f))
    for f in (*functions, *stages):
        yield from f.body.block.ops


def _inits(functions: list[FuncOp]) -> dict[str, InitAttr]:
    inits: dict[str, InitAttr] = {}
    for f in functions:
        for argument in arguments(f):
            key, init = argument.key, argument.init
            if key is None or not isinstance(init, InitAttr):
                continue
            if inits.setdefault(key, init) != init:
                message = f"{key!r} starts as [{init.data}] here, as [{inits[key].data}] elsewhere"
                raise Failure.at(f, message)
    return inits


def _function(f: FuncOp, mesh: Mesh | None, data: Data) -> dict[str, Any]:
    kind = "step" if is_step(f) else "function"
    roles = arguments(f)
    args = [
        _argument(f, v, name, argument, kind, mesh, data)
        for v, name, argument in zip(f.body.block.args, _names(f), roles, strict=True)
    ]
    keys: set[str] = set()
    for key in (a["key"] for a in args if a["role"] != "input"):
        if key in keys:
            message = f"expected distinct parameters of @{f.sym_name.data}, got {key!r} twice"
            raise Failure.at(f, message)
        keys.add(key)
    if kind == "step":
        _check_rows(f, args, data)
    last, replicas, every = f.body.block.last_op, replicas_of(f), every_of(f)
    assert isinstance(last, ReturnOp)
    if replicas is not None:
        args = [_argument_of_replicas(a, replicas) for a in args]
    results = []
    weighed = [a.get(train.WEIGHS) for a in result_attrs(f)]
    named = zip(
        last.operands, updated_keys(f), metric_names(f), result_batches(f), weighed, strict=True
    )
    for i, (v, updates, metric, microbatches, weighs) in enumerate(named):
        result = _result(last, i, v, updates, metric, mesh, keys)
        if microbatches is not None:
            result["microbatches"] = microbatches
        if weighs is not None:
            result["weighs"] = weighs.value.data
        results.append(result)
    if replicas is not None:
        results = [_result_of_replicas(f, r, replicas) for r in results]
    if train.schedule_of(f) is not None:
        places = places_of(f)
        args = [{**a, "at": at} for a, at in zip(args, places, strict=True)]
        results = [_result_of_stage(f, r) for r in results]
    if kind == "step" and all(r["updates"] or r["shape"] for r in results):
        raise Failure.at(f, "expected a step that returns its loss, a scalar, got none")
    own = {
        "replicas": replicas, "every": every,
        "states": train.text_attr(f.attributes, train.STATES),
        "update_of": train.text_attr(f.attributes, train.UPDATE_OF),
    }  # fmt: skip
    return {
        "kind": kind, "narrowest": narrowest_float(f.body.block.ops),
        **{n: x for n, x in own.items() if x},
        "args": args, "results": results,
    }  # fmt: skip


def _result_of_stage(f: FuncOp, r: dict[str, Any]) -> dict[str, Any]:
    """Return a result of a step in stages: a partial sum, with zeros on ranks of other stages."""
    if r["updates"]:
        return r
    partial = r["partial"] or {"op": "sum", "axes": []}
    if partial["op"] != "sum":
        message = f"expected a complete {r['name']}, got a partial {partial['op']}"
        raise Failure.at(f, f"{message}; reduce it in the function")
    return {**r, "partial": {"op": "sum", "axes": [train.STAGE_AXIS, *partial["axes"]]}}


def _argument_of_replicas(a: dict[str, Any], count: int) -> dict[str, Any]:
    """Return an argument with the values of all replicas in dimension 0, unless replicas are equal.
    An input has the microbatches of the replicas one after the other."""
    if a["role"] != "input" and not is_of_replica(a["key"]):
        return a
    if "microbatches" in a["init"]:
        batches = count * a["init"]["microbatches"]
        shape, dims = [batches, *a["shape"][1:]], [[REPLICA], *a["dims"][1:]]
    else:
        batches, shape, dims = count, [count, *a["shape"]], [[REPLICA], *a["dims"]]
    init = {**a["init"], "microbatches": batches} if a["role"] == "input" else a["init"]
    return {**a, "shape": shape, "dims": dims, "init": init}


def _result_of_replicas(f: FuncOp, r: dict[str, Any], count: int) -> dict[str, Any]:
    """Return a result with the values of all replicas in dimension 0; a reported float is the mean
    over replicas."""
    if r["updates"] or r["shape"] or r["dtype"].startswith("i"):
        return {**r, "shape": [count, *r["shape"]], "dims": [[REPLICA], *r["dims"]]}
    if r["partial"]:
        message = f"expected a complete {r['name']} of each replica, got one that is partial"
        raise Failure.at(f, f"{message}; reduce it in the function")
    return {**r, "partial": {"op": "mean", "axes": [REPLICA]}}


def _names(f: FuncOp) -> list[str]:
    """A unique name for each argument: xDSL drops the number of %x_1 and %x_2."""
    names: dict[str, None] = {}
    for v in f.body.block.args:
        hint = v.name_hint or f"arg{v.index}"
        numbered = (f"{hint}_{n}" for n in count(1))
        names[next(name for name in chain([hint], numbered) if name not in names)] = None
    return list(names)


def _check_rows(f: FuncOp, args: list[dict[str, Any]], data: Data) -> None:
    """Raise Failure unless the files that feed a step have equal numbers of rows and batch sizes:
    rows with one index, such as an input and its label, are read together. Files that are read in
    order need equal numbers of steps only: their first dimension need not be the batch."""
    files = [a for a in args if a["role"] == "input" and a["init"]["kind"] == "file"]
    in_order = all(not a["init"].get("shuffle", True) for a in files)
    fed = []
    for a in files:
        shape, init = a["shape"]["microbatches" in a["init"] :] or [1], a["init"]
        fed.append((a["name"], rows_of(data.files[init["file"]], init, shape)[0], shape[0]))
    for name, rows, batch in fed:
        first_rows, first_batch = fed[0][1:]
        if rows * first_batch != first_rows * batch if in_order else (rows, batch) != fed[0][1:]:
            first, *there = fed[0]
            message = (
                f"%{first} is fed with {there[0]} rows, {there[1]} at a step, %{name} with {rows} "
                f"rows, {batch} at a step: expected equal numbers, so that they stay together"
            )
            raise Failure.at(f, message)


def _axes(axes: Axes) -> list[Any]:
    """Axes as JSON: a name, or [name, pre, size]."""
    return [[a.name, a.pre, a.size] if a.size else a.name for a in axes]


def _split(axes: Axes) -> Any:
    """The axes that split a dimension as JSON, with the sizes of shards if they are explicit."""
    sizes = sizes_of(axes)
    return {"axes": _axes(axes), "sizes": sizes} if sizes else _axes(axes)


def _value(v: SSAValue, name: str, at: Operation, mesh: Mesh | None) -> dict[str, Any]:
    t = v.type
    if not isinstance(t, TensorType) or element_name(t.element_type) not in DTYPES:
        raise Failure.at(at, f"expected a tensor of {', '.join(DTYPES)}, got {t}")
    shape, layout = global_shape(t, mesh), layout_of(v)
    dims = layout.dims if layout is not None else ((),) * len(shape)
    return {
        "name": name,
        "shape": list(shape),
        "dtype": element_name(t.element_type),
        "dims": [_split(axes) for axes in dims],
        **({"host": True} if layout is not None and layout.host else {}),
    }


def _argument(
    f: FuncOp, v: BlockArgument, name: str, argument: Argument, kind: str,
    mesh: Mesh | None, data: Data,
) -> dict[str, Any]:  # fmt: skip
    key, role = argument.key, argument.role
    init = argument.init if key is None else data.inits.get(key)
    value = _value(v, name, f, mesh)
    layout = layout_of(v)
    if layout is not None and layout.partial:
        raise Failure.at(f, f"argument %{name} is partial: expected a layout without partial axes")
    one, count = value, argument.microbatches
    if count is not None:
        one = {**value, "shape": value["shape"][1:]}
    init_json = initial_value(f, one, role, init, kind, data, count or 1)
    if count is not None:
        init_json["microbatches"] = count
    return {**value, "role": str(role), "key": key or name, "init": init_json}


def _result(
    op: ReturnOp, i: int, v: SSAValue, updates: str | None, metric: str | None, mesh: Mesh | None,
    keys: set[str],
) -> dict[str, Any]:  # fmt: skip
    name = updates or metric or v.name_hint or f"result{i}"
    layout, partial = layout_of(v), None
    if layout is not None and layout.partial:
        if updates or layout.reduction == "any":
            message = f"expected a complete result {i}, got [{layout}]; reduce it first"
            raise Failure.at(op, message)
        partial = {"op": layout.reduction, "axes": _axes(layout.partial)}
    if updates is not None and updates not in keys:
        raise Failure.at(op, f"expected an argument that result {i} updates, got {updates!r}")
    return {**_value(v, name, op, mesh), "partial": partial, "updates": updates}
