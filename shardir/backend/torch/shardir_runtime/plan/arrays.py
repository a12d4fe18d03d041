"""Arrays in files: their types, shapes and offsets, read from headers alone.

    x.npy
    x.npz                    an array by its name; stored, not compressed (np.savez)
    x.safetensors            an array by its name
    x.bin                    tokens of one type, without a header

This file needs only Python.
"""

import ast
import json
import math
import os
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

BYTES = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1,
         "u16": 2, "u32": 4, "i1": 1}  # fmt: skip
"""The element types of files, with the bytes of an element. The IR has seven of them."""

TOKENS = ("u8", "u16", "u32", "i16", "i32", "i64")
"""The types of a file of tokens."""

NPY = {"<f4": "f32", "<f8": "f64", "<f2": "f16", "<i8": "i64", "<i4": "i32", "<i2": "i16",
       "|i1": "i8", "|u1": "u8", "<u2": "u16", "<u4": "u32", "|b1": "i1"}  # fmt: skip
SAFETENSORS = {name.upper(): name for name in BYTES} | {"BOOL": "i1"}
HEADER_BYTES = 10_000
SAFETENSORS_BYTES = 100_000_000
"""The longest header of a .safetensors file, as in the safetensors library."""


class ArrayError(ValueError):
    """A file without the expected array."""


@dataclass(frozen=True)
class FileArray:
    """An array in a file, in C order: its element type, its shape, and the offset of its bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """The offset of the end of its bytes."""
        return self.offset + math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class DividedArray:
    """An array in parts in several files: its element type, its shape, and for each part the index
    of its first element in each dimension, and its array."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[tuple[tuple[int, ...], FileArray], ...]


def array_in(path: Path, entry: str = "") -> FileArray:
    """Return the array of a file. `entry`: its name in an .npz or .safetensors, or the type of the
    tokens of a .bin.

    Raises:
        ArrayError: there is no such array, or the file is damaged.
    """
    kinds = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors, ".bin": _bin}
    with _open(path) as file:
        if path.suffix not in kinds:
            raise ValueError(f"expected a file of {', '.join(kinds)}, got {path.name}")
        found = kinds[path.suffix](path, file, entry)
        there = file.seek(0, os.SEEK_END)
    if not all(type(n) is int and n >= 0 for n in found.shape):
        raise ArrayError(f"{path}: expected sizes of 0 or more, got the shape {found.shape}")
    if there < found.end:
        raise ArrayError(f"{path}: expected at least {found.end} bytes, got {there}; copy it again")
    return found


def sequences(tokens: FileArray, shape: Sequence[int], shift: int) -> FileArray:
    """Return adjacent rows of a shape into which tokens are packed, from token `shift` (0 or 1) on.
    The targets of a sequence are its tokens shifted by one, so the last token is only a target.

    Raises:
        ArrayError: there are too few tokens for a row, or the array does not have tokens.
    """
    if len(tokens.shape) != 1 or tokens.dtype not in TOKENS or shift not in (0, 1):
        raise ArrayError(
            f"{tokens.path}: expected tokens, shifted by 0 or 1, got {tokens.dtype} of "
            f"{list(tokens.shape)}, shifted by {shift}"
        )
    length = math.prod(shape)
    rows = (tokens.shape[0] - 1) // max(length, 1)
    if rows < 1:
        raise ArrayError(
            f"{tokens.path}: expected more than the {length} tokens of a sequence, got "
            f"{tokens.shape[0]}"
        )
    offset = tokens.offset + shift * BYTES[tokens.dtype]
    return replace(tokens, shape=(rows, *shape), offset=offset)


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    """Open a file. Errors in the block become an ArrayError that names the file."""
    try:
        with path.open("rb") as file:
            yield file
    except (KeyError, TypeError, SyntaxError, RecursionError, MemoryError, struct.error,
            AttributeError, UnicodeDecodeError, json.JSONDecodeError):  # fmt: skip
        raise ArrayError(f"{path}: its header is damaged") from None
    except FileNotFoundError:
        raise ArrayError(f"expected the file {path}, got none") from None
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArrayError(f"{path}: {error}") from None


def _npy(path: Path, file: BinaryIO, entry: str = "") -> FileArray:
    """Read the header at the current position of the file."""
    start = file.read(8)
    if start[:6] != b"\x93NUMPY" or len(start) < 8:
        raise ValueError("not an .npy file")
    size_format = "<H" if start[6] == 1 else "<I"
    (size,) = struct.unpack(size_format, file.read(struct.calcsize(size_format)))
    if size > HEADER_BYTES:
        raise ValueError(f"expected a header of at most {HEADER_BYTES} bytes, got {size}")
    header = ast.literal_eval(file.read(size).decode("latin1").strip())
    dtype, shape = header["descr"], tuple(header["shape"])
    if header["fortran_order"]:
        raise ValueError("the array is in Fortran's order; save it in C's")
    if dtype not in NPY:
        raise ValueError(f"expected a type of {', '.join(NPY)}, got {dtype!r}")
    return FileArray(path, NPY[dtype], shape, file.tell())


def _npz(path: Path, file: BinaryIO, entry: str) -> FileArray:
    with zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        if entry not in names:
            raise ValueError(f"expected an array of {_few(names)}, got {entry!r}")
        member = archive.getinfo(f"{entry}.npy")
    if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
        raise ValueError(f"{entry!r} is compressed; write it by np.savez, or as .npy")
    file.seek(member.header_offset + 26)
    file.seek(sum(struct.unpack("<HH", file.read(4))), os.SEEK_CUR)
    found = _npy(path, file)
    if found.end > file.tell() + member.file_size:
        raise ValueError(f"{entry!r} is cut off; write it again")
    return found


def safetensors_in(path: Path) -> tuple[dict[str, FileArray], dict[str, str]]:
    """Return the arrays of a .safetensors file by their names, and its metadata.

    Raises:
        ArrayError: there is no such file, or it is damaged.
    """
    with _open(path) as file:
        header, start = _header(file)
        metadata = dict(header.pop("__metadata__", {}))
        arrays = {name: _array(path, header, start, name) for name in header}
        there = file.seek(0, os.SEEK_END)
    if (end := max((x.end for x in arrays.values()), default=0)) > there:
        raise ArrayError(f"{path}: expected at least {end} bytes, got {there}; copy it again")
    return arrays, metadata


def _safetensors(path: Path, file: BinaryIO, entry: str) -> FileArray:
    header, start = _header(file)
    if entry not in header or entry == "__metadata__":
        names = [name for name in header if name != "__metadata__"]
        raise ValueError(f"expected an array of {_few(names)}, got {entry!r}")
    return _array(path, header, start, entry)


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return the header of a .safetensors file, and the offset of its end."""
    (size,) = struct.unpack("<Q", file.read(8))
    if size > SAFETENSORS_BYTES:
        raise ValueError("not a .safetensors file")
    return json.loads(file.read(size)), 8 + size


def _array(path: Path, header: dict[str, Any], start: int, name: str) -> FileArray:
    about = header[name]
    if about["dtype"] not in SAFETENSORS:
        known = ", ".join(SAFETENSORS)
        raise ValueError(f"expected a type of {known}, got {about['dtype']} of {name!r}")
    first, last = about["data_offsets"]
    found = FileArray(path, SAFETENSORS[about["dtype"]], tuple(about["shape"]), start + first)
    if first < 0 or found.end != start + last:
        raise ValueError(f"the bytes of {name!r} are not those of its shape")
    return found


def _bin(path: Path, file: BinaryIO, entry: str) -> FileArray:
    if entry not in TOKENS:
        got = repr(entry) if entry else "none"
        raise ValueError(f"expected the type of its tokens ({', '.join(TOKENS)}), got {got}")
    size = file.seek(0, os.SEEK_END)
    if size % BYTES[entry]:
        raise ValueError(
            f"expected tokens of {BYTES[entry]} bytes ({entry}), got {size} bytes: the file is cut "
            "off, or has another type"
        )
    return FileArray(path, entry, (size // BYTES[entry],), 0)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") or "none"
