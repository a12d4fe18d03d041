"""plan.json: what an emitted directory runs, read and checked before anything starts.

    {"version": 1, "mesh": {"name": "m", "axes": [["dp", 2], ["tp", 2]]},
     "groups": [["dp"], ["dp", "tp"], [["d", 2, 4]]],           process groups to make at the start
     "functions": {"step": {
        "python": "step", "kind": "step" | "function",
        "args": [{"name": "w", "role": "input" | "parameter" | "state", "key": "w",
                  "shape": [8, 4], "dtype": "f32", "dims": [["dp"], []], "init": {"kind": ...}}],
        "results": [{"name": "loss", "shape": [], "dtype": "f32", "dims": [],
                     "partial": null | {"op": "sum", "axes": ["tp"]}, "updates": null | "w"}]}},
     "single": "single.py" | null}

`python` is the function's name in program.py. Shapes are global; `dims` has the axes that split
each dimension, an axis being a name or [name, pre, size]. Arguments and results are in the order of
the program's function. A `step` is trained: its results with `updates` become that state; its first
other result is the loss. A `function` is run once after training. `init` is one of
normal (mean, std), uniform (low, high), integers (low, high), constant (value), values (data),
and file (file: an .npy, as a path in the directory; shuffle: true unless it is false there).
A file input of a step is a batch of the file's rows at each step; of a function, its first rows.
With `microbatch` and `microbatches` (0 and 1) a step reads so many batches, this input the one with
its number.
This file needs neither torch nor numpy.
"""

import ast
import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DTYPES = ("f32", "f64", "bf16", "f16", "i64", "i32", "i1")
NPY_TYPES = ("<f4", "<f8", "<f2", "<i8", "<i4", "<i2", "|i1", "|u1", "|b1")
START_SECONDS = 60.0  # beside the time-out: to import torch and to meet, on a busy machine
_NUMBER = (int, float)
# What each kind of initial value must say, and of which type.
_INITS: dict[str, dict[str, Any]] = {
    "normal": {"mean": _NUMBER, "std": _NUMBER},
    "uniform": {"low": _NUMBER, "high": _NUMBER},
    "integers": {"low": int, "high": int},
    "constant": {"value": (bool, *_NUMBER)},
    "values": {"data": list},
    "file": {"file": str},
}
_MICROBATCH = {"microbatch": 0, "microbatches": 1}

Axes = tuple  # of names and (name, pre, size)


class Sized(tuple):
    """Axes that split a dimension into shards of explicit sizes."""

    sizes: tuple[int, ...]

    def __new__(cls, axes: Axes, sizes: tuple[int, ...]):
        new = super().__new__(cls, axes)
        new.sizes = sizes
        return new

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sized) and tuple.__eq__(self, other) and self.sizes == other.sizes

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple(self), self.sizes))


class PlanError(Exception):
    """The reason why a directory or its plan is not valid: one message for users."""


@dataclass(frozen=True)
class PlanValue:
    """The type of an argument or result: its global shape and what splits it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[Axes, ...]


@dataclass(frozen=True)
class PlanArgument(PlanValue):
    """role: input, parameter or state; key: which state, or what an input's numbers hang on."""

    role: str
    key: str
    init: Mapping[str, Any]


@dataclass(frozen=True)
class PlanResult(PlanValue):
    """partial: (op, axes) where a reduction is still due; updates: the state that it becomes."""

    partial: tuple[str, Axes] | None
    updates: str | None


@dataclass(frozen=True)
class PlanFunction:
    """A function of the program: python: its name there; kind: `step` or `function`; narrowest:
    the element type of the lowest precision in it."""

    name: str
    python: str
    kind: str
    narrowest: str
    args: tuple[PlanArgument, ...]
    results: tuple[PlanResult, ...]


@dataclass(frozen=True)
class ProgramPlan:
    """The content of plan.json."""

    directory: Path
    mesh_name: str
    axes: tuple[tuple[str, int], ...]
    groups: tuple[Axes, ...]
    functions: tuple[PlanFunction, ...]
    single: str | None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def mesh_text(self) -> str:
        """The mesh, as the IR writes it."""
        axes = ", ".join(f"{name} = {size}" for name, size in self.axes)
        return f"mesh @{self.mesh_name} <{axes}>"

    def unsplit(self) -> "ProgramPlan":
        """The plan of the same program on one device."""
        functions = tuple(
            replace(
                function,
                args=tuple(replace(a, dims=((),) * len(a.shape)) for a in function.args),
                results=tuple(
                    replace(r, dims=((),) * len(r.shape), partial=None) for r in function.results
                ),
            )
            for function in self.functions
        )
        return replace(self, axes=(), groups=(), functions=functions)


def load_plan(directory: str | Path) -> ProgramPlan:
    """Reads and checks DIRECTORY/plan.json; PlanError says what is wrong and where."""
    directory = Path(directory)
    if not directory.is_dir():
        what = "is a file, not a compiled directory" if directory.exists() else "no such directory"
        raise PlanError(f"{directory}: {what}")
    path = directory / "plan.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PlanError(f"{directory} has no plan.json: it is not a compiled program") from None
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"{path} cannot be read: {error}") from None
    try:
        return _plan(_Place(data, ""), directory)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


class _Place:
    """A value in plan.json that knows where it stands."""

    def __init__(self, value: Any, path: str):
        self.value, self.path = value, path

    def fail(self, message: str) -> PlanError:
        return PlanError(f"{self.path}: {message}" if self.path else message)

    def get(self, name: str, kind: Any = object, **default: Any) -> "_Place":
        """A field of this object; without it, the `default` if there is one."""
        if not isinstance(self.value, dict):
            raise self.fail(f"expected an object, got {_show(self.value)}")
        path = f"{self.path}.{name}" if self.path else name
        if name not in self.value and not default:
            raise self.fail(f"the field {name!r} is missing")
        return _Place(self.value.get(name, default.get("default")), path).of(kind)

    def of(self, kind: Any) -> "_Place":
        kinds = kind if isinstance(kind, tuple) else (kind,)
        right = isinstance(self.value, kinds)
        if not right or (isinstance(self.value, bool) and not {bool, object} & {*kinds}):
            raise self.fail(f"expected {_names(kinds)}, got {_show(self.value)}")
        return self

    def one_of(self, choices: Any) -> str:
        if self.value not in choices:
            raise self.fail(f"expected one of {', '.join(choices)}, got {_show(self.value)}")
        return self.value

    def items(self) -> "list[_Place]":
        self.of(list)
        return [_Place(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)]

    def ints(self, minimum: int) -> tuple[int, ...]:
        for item in self.items():
            if item.of(int).value < minimum:
                raise item.fail(f"expected at least {minimum}, got {item.value}")
        return tuple(self.value)


def _show(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 40 else text[:37] + "..."


def _names(kinds: tuple) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "an integer",
             float: "a number", bool: "a truth value", type(None): "null"}  # fmt: skip
    return " or ".join(names.get(kind, str(kind)) for kind in kinds)


def _plan(top: _Place, directory: Path) -> ProgramPlan:
    version = top.get("version").value
    if version != 1:
        raise top.fail(f"expected version 1, got {_show(version)}")
    mesh = top.get("mesh", dict)
    sizes: dict[str, int] = {}
    for pair in mesh.get("axes").items():
        if len(pair.of(list).value) != 2:
            raise pair.fail(f"expected [name, size], got {_show(pair.value)}")
        name, size = pair.items()
        if name.of(str).value in sizes:
            raise name.fail(f"the axis {name.value!r} stands there twice")
        sizes[name.value] = _Place([size.of(int).value], pair.path).ints(1)[0]
    functions = tuple(
        _function(name, _Place(value, f"functions.{name}"), sizes, directory)
        for name, value in top.get("functions", dict).value.items()
    )
    _check_states(functions)
    single = top.get("single", (str, type(None)), default=None)
    if single.value is not None and not (directory / single.value).is_file():
        raise single.fail(f"there is no file {single.value!r}")
    return ProgramPlan(
        directory=directory,
        mesh_name=mesh.get("name", str).value,
        axes=tuple(sizes.items()),
        groups=tuple(_axes(axes, sizes) for axes in top.get("groups", list, default=[]).items()),
        functions=functions,
        single=single.value,
    )


def _axes(place: _Place, sizes: dict[str, int]) -> Axes:
    """Axes of one dimension or group; each a name of the mesh or [name, pre, size]."""
    axes = []
    for item in place.items():
        if isinstance(item.value, str):
            name, pre, size = item.value, 1, sizes.get(item.value, 1)
        elif isinstance(item.value, list) and len(item.value) == 3:
            parts = item.items()
            name = parts[0].of(str).value
            pre, size = _Place(item.value[1:], item.path).ints(1)
        else:
            raise item.fail(f"expected an axis or [axis, pre, size], got {_show(item.value)}")
        if name not in sizes:
            raise item.fail(
                f"expected an axis of the mesh ({', '.join(sizes) or 'none'}), got {name!r}"
            )
        if sizes[name] % (pre * size):
            raise item.fail(f"{pre} * {size} does not divide the axis {name!r} of {sizes[name]}")
        axes.append(item.value if isinstance(item.value, str) else (name, pre, size))
    return tuple(axes)


def _split(place: _Place, sizes: dict[str, int]) -> Axes:
    """The axes of one dimension, perhaps with the sizes of its shards."""
    if not isinstance(place.value, dict):
        return _axes(place, sizes)
    return Sized(_axes(place.get("axes"), sizes), place.get("sizes").ints(0))


def _function(name: str, place: _Place, sizes: dict[str, int], directory: Path) -> PlanFunction:
    kind = place.get("kind").one_of(("step", "function"))
    args = []
    for item in place.get("args").items():
        value = _value(item, sizes)
        role = item.get("role").one_of(("input", "parameter", "state"))
        key = item.get("key", str, **({"default": value["name"]} if role == "input" else {}))
        argument = PlanArgument(
            **value, role=role, key=key.value, init=item.get("init", dict).value
        )
        _check_init(item.get("init"), argument, kind, directory)
        args.append(argument)
    results = []
    for item in place.get("results").items():
        partial = item.get("partial", (dict, list, type(None)), default=None)
        due = None
        if partial.value:
            op = partial.get("op").one_of(("sum", "max", "min", "mean"))
            due = (op, _axes(partial.get("axes"), sizes))
        updates = item.get("updates", (str, type(None)), default=None)
        if updates.value and updates.value not in [a.key for a in args if a.role != "input"]:
            raise updates.fail(f"no argument of the function has the state {updates.value!r}")
        if updates.value and due:
            raise partial.fail("a state cannot be partial")
        results.append(PlanResult(**_value(item, sizes), partial=due, updates=updates.value))
    if kind == "step" and all(r.updates or r.shape for r in results):
        raise place.fail("a step needs a loss: a scalar result without 'updates'")
    narrowest = place.get("narrowest", default="f64").one_of(DTYPES)
    python = place.get("python", str, default=name).value
    return PlanFunction(name, python, kind, narrowest, tuple(args), tuple(results))


def _value(place: _Place, sizes: dict[str, int]) -> dict[str, Any]:
    shape = place.get("shape").ints(0)
    dims = tuple(_split(dim, sizes) for dim in place.get("dims").items())
    if len(dims) != len(shape):
        message = f"{len(dims)} entries for a shape of {len(shape)} dimensions"
        raise place.get("dims").fail(message)
    for d, (rows, axes) in enumerate(zip(shape, dims, strict=True)):
        if isinstance(axes, Sized) and (len(axes.sizes), sum(axes.sizes)) != (
            math.prod(sizes[a] if isinstance(a, str) else a[2] for a in axes), rows,
        ):  # fmt: skip
            message = f"dimension {d}: {list(axes.sizes)} are not the shards of {rows} rows"
            raise place.get("dims").fail(message)
    dtype = place.get("dtype").one_of(DTYPES)
    return {"name": place.get("name", str).value, "shape": shape, "dtype": dtype, "dims": dims}


def _check_states(functions: tuple[PlanFunction, ...]) -> None:
    """A state has one shape and type, and comes from one initial value, wherever it is used."""
    seen: dict[str, tuple] = {}
    for function in functions:
        for arg in (a for a in function.args if a.role != "input"):
            what = (arg.shape, arg.dtype, arg.init)
            if seen.setdefault(arg.key, what) != what:
                raise PlanError(
                    f"functions.{function.name}: the state {arg.key!r} has another shape, dtype or"
                    " init elsewhere"
                )


# ---- initial values --------------------------------------------------------------------------


def _check_init(place: _Place, arg: PlanArgument, kind: str, directory: Path) -> None:
    for name, types in _INITS[place.get("kind").one_of(_INITS)].items():
        place.get(name, types)
    init = place.value
    if init["kind"] == "integers" and init["low"] >= init["high"]:
        raise place.fail("low must be below high")
    if init["kind"] == "values" and _count(init["data"]) != math.prod(arg.shape):
        raise place.fail(f"{_count(init['data'])} values for the shape {list(arg.shape)}")
    if init["kind"] == "file":
        shape = npy_header(file_of(directory, place)).shape
        want = list(arg.shape)
        if arg.role != "input":
            right = list(shape) == want
        else:  # a batch of rows, or the first ones
            minimum = 1 if kind == "step" else want[0] if want else 0
            right = bool(want) and list(shape[1:]) == want[1:] and shape[0] >= minimum
        number, count = (place.get(n, int, default=d).value for n, d in _MICROBATCH.items())
        if not 0 <= number < count:
            raise place.fail(f"there is no microbatch {number} of {count}")
        if not right:
            raise place.fail(f"the file's shape {list(shape)} does not fit the shape {want}")


def _count(data: Any) -> int:
    return sum(map(_count, data)) if isinstance(data, list) else 1


def file_of(directory: Path, init: _Place) -> Path:
    """The path of a file init; nothing outside the directory."""
    path = (directory / init.get("file", str).value).resolve()
    if not path.is_relative_to(directory.resolve()):
        raise init.fail(f"{init.value['file']!r} is outside the directory")
    if not path.is_file():
        raise init.fail(f"there is no file {init.value['file']!r}")
    return path


@dataclass(frozen=True)
class NpyHeader:
    """The header of an .npy file: numpy's type text, the shape, and the offset of the data."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


def npy_header(path: Path) -> NpyHeader:
    """Reads the header of an .npy file, without numpy."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            if start[:6] != b"\x93NUMPY":
                raise ValueError("not an .npy file")
            size_format = "<H" if start[6] == 1 else "<I"
            (size,) = struct.unpack(size_format, file.read(struct.calcsize(size_format)))
            header = ast.literal_eval(file.read(size).decode("latin1").strip())
            found = NpyHeader(header["descr"], tuple(header["shape"]), file.tell())
            if header["fortran_order"]:
                raise ValueError("the array is in Fortran's order; save it in C's")
            if found.dtype not in NPY_TYPES:
                known = ", ".join(NPY_TYPES)
                raise ValueError(f"its type {found.dtype!r} is not one of {known}")
            return found
    except (OSError, ValueError, SyntaxError, KeyError, TypeError, struct.error) as error:
        raise PlanError(f"{path}: {error}") from None
