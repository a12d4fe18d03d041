"""Initial values of arguments, and the arrays that are copied into a program's directory.

The data of `#train.init<file, ...>` are read here, checked against the argument, and written as
.npy files: the program needs neither numpy nor the folder of the source.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath
from typing import Any
from zipfile import is_zipfile

import numpy as np
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute

from shardir.backend.torch.emit.names import identifier
from shardir.backend.torch.shardir_runtime.plan.arrays import BYTES, NPY, ArrayError, array_in
from shardir.diagnostics import Failure
from shardir.dialects.locations import file_location
from shardir.dialects.nn.base import Array
from shardir.dialects.train import InitAttr, Role

WIDE = {"f": "<f8", "d": "<f8", "i": "<i8", "u": "<i8", "b": "|b1"}
"""The .npy dtype of each kind whose own dtypes the runtime does not read."""


@dataclass
class Data:
    """The .npy files of a program."""

    base: Path | None
    copied: Path | None = None
    """A directory with all arrays, which is read in place of the sources."""
    files: dict[str, Array] = field(default_factory=dict)
    inits: dict[str, InitAttr] = field(default_factory=dict)
    """The initial value of each parameter and state, as one of its functions specifies it."""
    warnings: list[tuple[FuncOp, str]] = field(default_factory=list)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, path: Path, array: str, tokens: bool) -> str:
        """Add an array of an .npz file, or tokens of the type `array`; return the file in the
        directory. Raises OSError, ValueError, KeyError."""
        key = str(path.resolve()), array
        if key not in self._names:
            name = self._name(f"{path.stem}_{array}")
            self.files[name] = self._values(path, array, tokens, name)
            self._names[key] = name
        return self._names[key]

    def add_state(self, key: str, values: Array) -> str:
        """Add the value of a state; return the file in the directory."""
        name = self._name(f"state_{key}")
        self.files[name] = values
        return name

    def _name(self, about: str) -> str:
        """A free file name."""
        stem, n = identifier(about, "array"), 0
        name = f"data/{stem}.npy"
        while name in self.files:
            n += 1
            name = f"data/{stem}_{n}.npy"
        return name

    def _values(self, path: Path, array: str, tokens: bool, name: str) -> Array:
        if self.copied is not None:
            return np.load(self.copied / name, mmap_mode="r", allow_pickle=False)
        values = _tokens(path, array) if tokens else _array(path, array)
        kind = values.dtype.kind
        if kind not in "fiub" or values.dtype.itemsize > 8:
            raise ValueError(f"expected numbers of at most 64 bits, got {values.dtype}")
        if kind == "u" and values.dtype.itemsize == 8 and values.max(initial=0) >> 63:
            raise ValueError("expected numbers of 64 bits with a sign, got larger ones")
        little = values.dtype.newbyteorder("<").str
        wanted = little if little in NPY else WIDE[kind]
        return np.asarray(values, dtype=wanted, order="C")


@cache
def _open(path: str, stamp: tuple[int, int]) -> Any:
    return np.load(path, allow_pickle=False)


def _load(path: Path) -> Any:
    """Return an .npz file, opened once until it changes."""
    stat = path.stat()
    if not is_zipfile(path):
        raise ValueError("expected an .npz file of named arrays, got another one; use np.savez")
    return _open(str(path), (stat.st_mtime_ns, stat.st_size))


def _tokens(path: Path, dtype: str) -> Any:
    """The tokens of a file, memory-mapped."""
    try:
        header = array_in(path, dtype)
    except ArrayError as error:
        raise ValueError(str(error).removeprefix(f"{path}: ")) from None
    kind = np.dtype(f"<{header.dtype[0]}{BYTES[header.dtype]}")
    return np.memmap(path, kind, "r", header.offset, header.shape)


def _array(path: Path, name: str) -> Any:
    arrays = _load(path)
    try:
        return arrays[name]
    except ValueError:  # numpy advises to unpickle it
        if name not in arrays.files:
            raise
        raise ValueError(
            f"expected an array of numbers, got Python objects in {name!r}; convert them"
        ) from None


def initial_value(
    f: FuncOp, value: dict[str, Any], role: Role, init: Attribute | None, kind: str, data: Data,
    batches: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Return the initial value of an argument as JSON. A function reads `batches` batches of an
    input."""
    if not isinstance(init, InitAttr):
        if role is not Role.INPUT or init is not None:
            what = Role.INPUT.attribute if role is Role.INPUT else "train.init"
            got = "none" if init is None else init
            message = f"expected {what} = #train.init<...> of %{value['name']}, got {got}"
            raise Failure.at(f, message)
        if value["dtype"].startswith("i"):
            return {"kind": "integers", "low": 0, "high": 2}
        return {"kind": "normal", "mean": 0.0, "std": 1.0}
    if init.kind in ("file", "batches", "tokens"):
        file = _file(f, value, role, init, kind, data, batches)
        more: dict[str, Any] = {"shuffle": False} if init.kind == "batches" else {}
        if init.kind == "tokens":
            more = {"shift": init.values["shift"]}
        return {"kind": "file", "file": file, **more}
    return {"kind": init.kind, **init.values}


def rows_of(array: Array, init: Mapping[str, Any], shape: Sequence[int]) -> list[int]:
    """The shape of an array as rows of an argument with the given shape; tokens are packed into
    rows."""
    if "shift" not in init:
        return list(array.shape)
    length = max(math.prod(shape[1:]), 1)
    return [max(len(array) - 1, 0) // length, *shape[1:]]


def _file(
    f: FuncOp, value: dict[str, Any], role: Role, init: InitAttr, kind: str, data: Data,
    batches: int,
) -> str:  # fmt: skip
    """The file of an argument's array, checked against the argument."""
    where = f"%{value['name']}"
    path, tokens = _base(f, data) / init.values["path"], init.kind == "tokens"
    array = init.values["type" if tokens else "array"]
    try:
        name = data.add(path, array, tokens)
    except FileNotFoundError:
        raise Failure.at(f, f"{where}: expected the file {path}, got none") from None
    except KeyError:
        there = ", ".join(_load(path).files)
        message = f"{where}: expected an array of {path} ({there}), got {array!r}"
        raise Failure.at(f, message) from None
    except Exception as error:  # zipfile or numpy, for other files
        raise Failure.at(f, f"{where}: {path} cannot be read: {error}") from None
    values, want = data.files[name], value["shape"]
    if role is Role.INPUT:
        want = want or [1]  # a scalar is a number of an array at each step
    have = rows_of(values, init.values, want)
    if role is not Role.INPUT:
        fits, wanted = have == want and not tokens, f"{want}"
    else:
        minimum = 1 if kind == "step" else batches * want[0]
        fits = have[1:] == want[1:] and bool(have) and have[0] >= minimum
        wanted = f"at least {minimum} rows of {want[1:]}"
    if not fits:
        message = f"{where}: expected {wanted}, got array {array!r} of {path}, {have}"
        raise Failure.at(f, message)
    if role is Role.INPUT and have[0] < want[0]:
        message = (
            f"{where}: expected at least the {want[0]} rows of a batch, got array "
            f"{array!r} of {path}, {have}: a batch repeats rows; use a smaller batch"
        )
        data.warnings.append((f, message))
    if value["dtype"].startswith("i") and values.dtype.kind == "f":
        message = f"{where}: expected {value['dtype']}, got {values.dtype} in {array!r}"
        raise Failure.at(f, f"{message}; convert one of them")
    if (place := _beyond(values, value["dtype"])) is not None:
        number, at = values[place], ", ".join(map(str, place))
        message = f"{where}: expected numbers that {value['dtype']} holds, got {number} at [{at}]"
        raise Failure.at(f, f"{message} of {array!r}; use i64, or correct the file")
    return name


def _beyond(values: Array, element: str) -> tuple[int, ...] | None:
    """The first index of an integer that the element type cannot hold, if there is one."""
    held = np.can_cast(values.dtype, np.int32)
    if element != "i32" or held or values.dtype.kind == "f" or not values.size:
        return None
    low, high = np.iinfo(np.int32).min, np.iinfo(np.int32).max
    if low <= values.min() and values.max() <= high:
        return None
    return tuple(int(i) for i in np.argwhere((values < low) | (values > high))[0])


def _base(f: FuncOp, data: Data) -> Path:
    """Return the folder of relative paths of files: the folder of the source file."""
    if data.base is not None:
        return data.base
    places = [file_location(a.location) for a in f.body.block.args]
    places += [file_location(op.location) for op in (f, *f.body.block.ops)]
    location = next((p for p in places if p is not None), None)
    return Path(PurePath(location[0]).parent) if location is not None else Path()
