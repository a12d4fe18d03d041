"""plan.json: the functions of an emitted directory, read and checked before anything starts.

    {"version": 1, "mesh": {"name": "m", "axes": [["dp", 2], ["tp", 2]]},
     "groups": [["dp"], ["dp", "tp"], [["d", 2, 4]]],           process groups to make at the start
     "channels": [[["stage"], 0, 1]],             transfers: axes, positions of sender and receiver
     "functions": {"step": {
        "python": "step", "kind": "step" | "function",
        "args": [{"name": "w", "role": "input" | "parameter" | "state", "key": "w",
                  "shape": [8, 4], "dtype": "f32", "dims": [["dp"], []], "init": {"kind": ...}}],
        "results": [{"name": "loss", "shape": [], "dtype": "f32", "dims": [],
                     "partial": null | {"op": "sum", "axes": ["tp"]}, "updates": null | "w"}]}},
     "states": {"w.exp_avg": "data/state_w_exp_avg.npy"},
     "aliases": {"head.weight": "w"},
     "single": "single.py" | null}

`python` is the function's name in program.py. Shapes are global; `dims` has the axes that split
each dimension, an axis being a name or [name, pre, size]; with `"host": true` shards are in host
memory. Arguments and results are in the order of the program's function.

A `step` is trained: its results with `updates` become the named state; its first other result is
the loss. A `function` is run once after training. `init` is one of normal (mean, std), uniform
(low, high), integers (low, high), constant (value), values (data), and file (file: the path of an
.npy in the directory; shuffle: by default true; shift: 0 or 1, of packed tokens). A file input has
a batch of the file's rows at each step; in a function, the first rows. `states`: .npy files with
initial values of states, in place of their `init`. `aliases`: further names of parameters and
states in a `state_dict`, with their keys. With `microbatches`, dimension 0 of an input or
a result has that number of batches.

This file needs only Python: the launcher imports it as a module of shardir, and a program as a
module of the package beside it.
"""

import ast
import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arrays import DividedArray, FileArray, array_in, sequences
from .axes import Axes, Sized, axes_of, channel_of, split_of
from .epochs import Epochs
from .fields import Field, PlanError, short_json

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("f32", "f64", "bf16", "f16", "i64", "i32", "i1")
STAGE = "stage"
"""The axis over which the ranks of different stages differ."""
REPLICA = "replica"
"""The axis over which replicas differ, and the end of the keys of their values."""
START_SECONDS = 60.0  # beside the time-out: to import torch and to meet, on a busy machine
_NUMBER = (int, float)
# The fields of each kind of initial value, with their types.
_INITS: dict[str, dict[str, Any]] = {
    "normal": {"mean": _NUMBER, "std": _NUMBER},
    "uniform": {"low": _NUMBER, "high": _NUMBER},
    "integers": {"low": int, "high": int},
    "constant": {"value": (bool, *_NUMBER)},
    "values": {"data": list},
    "file": {"file": str},
    "copy": {"of": str},
}


@dataclass(frozen=True)
class PlanValue:
    """The type of an argument or result: its global shape, and the axes of each dimension."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[Axes, ...]
    host: bool = field(default=False, kw_only=True)
    """Whether it is in host memory."""


@dataclass(frozen=True)
class PlanArgument(PlanValue):
    """An argument.

    Attributes:
        role: input, parameter or state.
        key: the name of the state, or the seed of an input's random values.
        source: the array in files with its values or rows, or the number of a pipe of batches.
        last: the policy for the incomplete last batch (see Epochs).
        at: the positions of the ranks that have it along the axis of stages; None for all ranks.
        masked: the batches whose rows the argument is a mask of.
    """

    role: str
    key: str
    init: Mapping[str, Any]
    source: FileArray | DividedArray | int | None = None
    last: str = "wrap"
    at: tuple[int, ...] | None = None
    masked: Epochs | None = None

    @property
    def of_replica(self) -> bool:
        """Whether each replica has its own value, in a function that runs on several replicas."""
        return self.role == "input" or self.key.endswith(f".{REPLICA}")

    @property
    def copies(self) -> str | None:
        """The key of the state that its initial value is a copy of; None for its own value."""
        return self.init["of"] if self.init["kind"] == "copy" and self.source is None else None

    @property
    def microbatches(self) -> int | None:
        """The number of batches that a step reads; None for one, without a dimension for it."""
        return self.init.get("microbatches")

    @property
    def batch(self) -> int:
        """The number of rows of a batch; 1 for a scalar, a number of a one-dimensional array."""
        return [*self.shape, 1][self.microbatches is not None]

    @property
    def row(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.shape[1 + (self.microbatches is not None) :]

    def batches_of(self, x: "Tensor", shape: tuple[int, ...]) -> "Tensor":
        """Return a value of a shape, global or of a shard, with the dimension of microbatches, also
        from the concatenation of the microbatches."""
        if not self.microbatches:
            return x
        rows = (math.prod(shape[:2]), *shape[2:])
        return x.reshape(shape) if tuple(x.shape) == rows else x

    @property
    def epochs(self) -> Epochs | None:
        """The batches of an input with rows of a file; None for other arguments."""
        if self.role != "input" or not isinstance(self.source, FileArray) or not self.batch:
            return None
        return Epochs(self.source.shape[0], self.batch, self.last)


@dataclass(frozen=True)
class PlanResult(PlanValue):
    """A result.

    Attributes:
        partial: the (op, axes) of a reduction that is still due.
        updates: the key of the state that it becomes.
        microbatches: their number in dimension 0; None without such a dimension.
        weighs: the index of the result whose weight it is in a mean over batches.
    """

    partial: tuple[str, Axes] | None
    updates: str | None
    microbatches: int | None = None
    weighs: int | None = None

    def batch_of(self, x: "Tensor") -> "Tensor":
        """Return its global value as the concatenation of the microbatches."""
        return x if self.microbatches is None or x.dim() < 2 else x.flatten(0, 1)


@dataclass(frozen=True)
class PlanFunction:
    """A function.

    Attributes:
        python: its name in the program.
        kind: `step` or `function`.
        narrowest: the element type of the lowest precision in it.
        replicas: the number of replicas, on whose values it runs one by one.
        every: the number of steps after which it runs.
        states: the name of the states of a step's optimizer, by default its own.
        update_of: the step whose parameters it updates, apart from its backward part.
        at_peak: the seconds of its operations on a device at its peak rate, where that is known.
    """

    name: str
    python: str
    kind: str
    narrowest: str
    args: tuple[PlanArgument, ...]
    results: tuple[PlanResult, ...]
    replicas: int | None = None
    every: int | None = None
    states: str | None = None
    update_of: str | None = None
    at_peak: float | None = None

    @property
    def is_beside(self) -> bool:
        """Whether its caller calls it beside the steps: an evaluation, samples."""
        return self.kind == "function" and not self.every and self.update_of is None

    def key_of(self, state: str) -> str:
        """Return the key of a state that its optimizer has once: `step.lr`."""
        return f"{self.states or self.name}.{state}"

    def key_of_parameter(self, parameter: str, state: str) -> str:
        """Return the key of a state that its optimizer has of a parameter: `w.exp_avg`."""
        own = "" if self.states is None else f"{self.states}."
        return f"{parameter}.{own}{state}"


@dataclass(frozen=True)
class ProgramPlan:
    """The content of plan.json."""

    directory: Path
    mesh_name: str
    axes: tuple[tuple[str, int], ...]
    groups: tuple[Axes, ...]
    functions: tuple[PlanFunction, ...]
    single: str | None
    channels: tuple[tuple[Axes, int, int], ...] = ()
    arena: int | None = None
    """The bytes of the arena (arena.py), if the program has one."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Further names of parameters and states, with their keys."""

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.axes)

    @cached_property
    def digest(self) -> str:
        """The digest of the program for one device; empty without such a program."""
        if self.single is None:
            return ""
        tree = ast.parse((self.directory / self.single).read_text(encoding="utf-8"))
        body = [node for node in tree.body[1:] if not isinstance(node, ast.Import | ast.ImportFrom)]
        code = ast.dump(ast.Module(body, []))  # without the docstring, which names a file
        return hashlib.sha256(code.encode()).hexdigest()

    def mesh_text(self) -> str:
        """Return the mesh in the syntax of the IR."""
        axes = ", ".join(f"{name} = {size}" for name, size in self.axes)
        return f"mesh @{self.mesh_name} <{axes}>"


def load_plan(directory: str | Path) -> ProgramPlan:
    """Return the checked plan of a directory. Raises PlanError."""
    directory = Path(directory)
    if not os.path.isdir(directory):
        is_file = os.path.exists(directory)
        what = "is a file, not a compiled directory" if is_file else "no such directory"
        raise PlanError(f"{directory}: {what}")
    path = directory / "plan.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{directory} has no plan.json: it is not a compiled program") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    try:
        return _plan(Field(data, ""), directory)
    except (PlanError, OSError, ValueError, RecursionError) as error:  # also of names of files
        raise PlanError(f"{path}: {error}") from None


def _plan(top: Field, directory: Path) -> ProgramPlan:
    version = top.get("version").value
    if version != 1 or version is True:
        raise top.fail(f"expected version 1, got {short_json(version)}")
    mesh = top.get("mesh", dict)
    sizes: dict[str, int] = {}
    for pair in mesh.get("axes").items():
        if len(pair.of(list).value) != 2:
            raise pair.fail(f"expected [name, size], got {short_json(pair.value)}")
        name, size = pair.items()
        if name.of(str).value in sizes:
            raise name.fail(f"the axis {name.value!r} occurs twice")
        sizes[name.value] = Field([size.of(int).value], pair.path).ints(1)[0]
    functions = tuple(
        _function(name, Field(value, f"functions.{name}"), sizes, directory)
        for name, value in top.get("functions", dict).value.items()
    )
    _check_states(functions)
    functions = _with_states(functions, top.get("states", dict, default={}), directory)
    channels = top.get("channels", list, default=[])
    aliases = top.get("aliases", dict, default={})
    keys = {a.key for f in functions for a in f.args if a.role != "input"}
    for name in aliases.value:
        aliases.get(name).one_of(keys)
    single = top.get("single", (str, type(None)), default=None)
    if single.value is not None:
        file_in(directory, single)
    return ProgramPlan(
        directory=directory,
        mesh_name=mesh.get("name", str).value,
        axes=tuple(sizes.items()),
        groups=tuple(axes_of(axes, sizes) for axes in top.get("groups", list, default=[]).items()),
        channels=tuple(channel_of(field, sizes) for field in channels.items()),
        functions=functions,
        single=single.value,
        aliases=aliases.value,
        arena=top.get("arena", dict).get("bytes", int).value if "arena" in top.value else None,
    )


def _with_states(
    functions: tuple[PlanFunction, ...], states: Field, directory: Path
) -> tuple[PlanFunction, ...]:
    """Return the functions with files as the initial values of their states."""
    retained = {a.key: a for f in functions for a in f.args if a.role != "input"}
    found = {}
    for key in states.value:
        field = states.get(key, str)
        if key not in retained:
            raise field.fail("no function has this state")
        found[key] = array_in(file_in(directory, field))
        if problem := fitting(found[key], retained[key]):
            raise field.fail(problem)

    def with_sources(f: PlanFunction) -> PlanFunction:
        args = [replace(a, source=found[a.key]) if a.role != "input" and a.key in found else a
                for a in f.args]  # fmt: skip
        return replace(f, args=tuple(args))

    return tuple(map(with_sources, functions))


def _function(name: str, field: Field, sizes: dict[str, int], directory: Path) -> PlanFunction:
    kind = field.get("kind").one_of(("step", "function"))
    args = []
    for item in field.get("args").items():
        value = _value(item, sizes)
        role = item.get("role").one_of(("input", "parameter", "state"))
        key = item.get("key", str, **({"default": value["name"]} if role == "input" else {}))
        argument = PlanArgument(
            **value, role=role, key=key.value, init=item.get("init", dict).value,
            at=item.get("at").ints(0) if "at" in item.value else None,
        )  # fmt: skip
        source = _check_init(item.get("init"), argument, kind, directory)
        args.append(replace(argument, source=source))
    results = []
    for item in field.get("results").items():
        partial = item.get("partial", (dict, list, type(None)), default=None)
        due = None
        if partial.value:
            op = partial.get("op").one_of(("sum", "max", "min", "mean"))
            due = (op, axes_of(partial.get("axes"), sizes))
        updates = item.get("updates", (str, type(None)), default=None)
        if updates.value and updates.value not in [a.key for a in args if a.role != "input"]:
            raise updates.fail(f"no argument of the function has the state {updates.value!r}")
        if updates.value and due:
            raise partial.fail("a state cannot be partial")
        value = _value(item, sizes)
        count = item.get("microbatches", int, default=0).value or None
        if count is not None and value["shape"][:1] != (count,):
            shape = list(value["shape"])
            raise item.fail(f"there are no {count} microbatches in the shape {shape}")
        weighs = item.get("weighs", (int, type(None)), default=None)
        if weighs.value is not None and weighs.value not in range(len(results)):
            raise weighs.fail(f"expected the place of a result before it, got {weighs.value}")
        results.append(PlanResult(
            **value, partial=due, updates=updates.value, microbatches=count, weighs=weighs.value
        ))  # fmt: skip
    if kind == "step" and all(r.updates or r.shape for r in results):
        raise field.fail("a step needs a loss: a scalar result without 'updates'")
    narrowest = field.get("narrowest", default="f64").one_of(DTYPES)
    python = field.get("python", str, default=name).value
    numbers = [field.get(n, int, default=0) for n in ("replicas", "every") if n in field.value]
    for number in numbers:
        Field([number.value], number.path).ints(1)
    function = PlanFunction(
        name, python, kind, narrowest, tuple(args), tuple(results),
        field.value.get("replicas"), field.value.get("every"),
        states=field.get("states", (str, type(None)), default=None).value,
        update_of=field.get("update_of", (str, type(None)), default=None).value,
        at_peak=field.get("at_peak", (float, type(None)), default=None).value,
    )  # fmt: skip
    _check_replicas(field, function)
    return function


def _check_replicas(field: Field, f: PlanFunction) -> None:
    """Check that values of replicas have the replicas in dimension 0."""
    if f.replicas is None:
        return
    own = [("args", i, a) for i, a in enumerate(f.args) if a.of_replica]
    own += [("results", i, r) for i, r in enumerate(f.results) if r.updates or r.shape]
    for side, i, value in own:
        if not value.shape or value.dims[0] != (REPLICA,) or value.shape[0] % f.replicas:
            where = field.get(side).items()[i]
            raise where.fail(f"expected {f.replicas} replicas in dimension 0, split over {REPLICA}")


def _value(field: Field, sizes: dict[str, int]) -> dict[str, Any]:
    shape = field.get("shape").ints(0)
    dims = tuple(split_of(dim, sizes) for dim in field.get("dims").items())
    if len(dims) != len(shape):
        raise field.get("dims").fail(f"{len(dims)} entries for a shape of {len(shape)} dimensions")
    for d, (rows, axes) in enumerate(zip(shape, dims, strict=True)):
        if isinstance(axes, Sized) and (len(axes.sizes), sum(axes.sizes)) != (
            math.prod(sizes[a] if isinstance(a, str) else a[2] for a in axes), rows,
        ):  # fmt: skip
            raise field.get("dims").fail(
                f"dimension {d}: {list(axes.sizes)} are not the shards of {rows} elements"
            )
    dtype = field.get("dtype").one_of(DTYPES)
    host = field.get("host", bool, default=False).value
    name = field.get("name", str).value
    return {"name": name, "shape": shape, "dtype": dtype, "dims": dims, "host": host}


def _check_states(functions: tuple[PlanFunction, ...]) -> None:
    """Check that each state has one shape, type and initial value in all functions."""
    seen: dict[str, tuple] = {}
    for function in functions:
        for arg in (a for a in function.args if a.role != "input"):
            what = (arg.shape, arg.dtype, arg.init)
            if seen.setdefault(arg.key, what) != what:
                raise PlanError(
                    f"functions.{function.name}: the state {arg.key!r} has another shape, dtype or"
                    " init elsewhere"
                )
    for key, (shape, _, init) in seen.items():
        if init["kind"] == "copy":
            of_shape, _, of_init = seen.get(init["of"], ((), "", {"kind": "copy"}))
            end = shape[max(len(shape) - len(of_shape), 0) :]
            if of_init["kind"] == "copy" or end != of_shape:
                raise PlanError(
                    f"expected {key!r} to be a copy of a state whose shape is the end of"
                    f" {list(shape)}, got {init['of']!r}"
                )


# ---- initial values --------------------------------------------------------------------------


def _check_init(field: Field, arg: PlanArgument, kind: str, directory: Path) -> FileArray | None:
    """Check an initial value; return its array if it is in a file."""
    for name, types in _INITS[field.get("kind").one_of(_INITS)].items():
        field.get(name, types)
    init = field.value
    if init["kind"] == "integers" and init["low"] >= init["high"]:
        raise field.fail("low must be below high")
    if init["kind"] == "values":
        count = _count(field.get("data"))
        if count != math.prod(arg.shape):
            raise field.fail(f"{count} values for the shape {list(arg.shape)}")
    if init["kind"] != "file":
        return None
    count = field.get("microbatches", int, default=0).value
    if "microbatches" in init and (arg.role != "input" or list(arg.shape[:1]) != [count]):
        raise field.fail(f"there are no {count} microbatches in the shape {list(arg.shape)}")
    path = file_in(directory, field.get("file"))
    source = array_in(path)
    if "shift" in init:
        source = sequences(source, arg.row, field.get("shift", int).value)
    if problem := fitting(source, arg, kind):
        raise field.fail(problem)
    return source


def fitting(source: FileArray, arg: PlanArgument, kind: str = "step") -> str:
    """Return why an array does not fit an argument; "" if it does."""
    have, want = list(source.shape), list(arg.shape)
    if arg.dtype.startswith("i") and source.dtype in ("f64", "f32", "f16", "bf16"):
        return f"expected {arg.dtype}, got {source.dtype}; convert one of them"
    if arg.role != "input":
        right = have == want
    else:  # a batch of rows, or the first ones
        count, want = arg.microbatches or 1, want[arg.microbatches is not None :] or [1]
        minimum = 1 if kind == "step" else count * want[0]
        right = have[1:] == want[1:] and bool(have) and have[0] >= minimum
    return "" if right else f"the file's shape {have} does not fit the shape {list(arg.shape)}"


def _count(data: Field) -> int:
    """Return the number of values in nested lists."""
    if not isinstance(data.value, list):
        data.of((bool, *_NUMBER))
        return 1
    counts = [_count(item) for item in data.items()]
    if len({*counts}) > 1:
        raise data.fail("the lists in it have different lengths")
    return sum(counts)


def file_in(directory: Path, name: Field) -> Path:
    """Return the path of a file of the directory."""
    path = (directory / name.value).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise name.fail(f"{name.value!r} is outside the directory")
    if not path.is_file():
        raise name.fail(f"there is no file {name.value!r}")
    return path
