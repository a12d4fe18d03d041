"""Arrays in files, read and written without numpy."""

import ctypes
import math
import mmap
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from ..plan.arrays import BYTES, NPY, ArrayError, DividedArray, FileArray
from .writing import writing

DTYPES = {
    "f32": torch.float32,
    "f64": torch.float64,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "u16": torch.int16,  # torch indexes no unsigned ones: `as_signed` has their values
    "u32": torch.int32,
    "i1": torch.bool,
}
"""The torch type of the memory of each type of a file."""

PAGE = 4096
"""The smallest read in bytes: the system reads a file from disk in pages."""

MAPPED = 1 << 27
"""The largest array in bytes that is mapped for short runs. In a larger array each run is read by a
system call: pages mapped for a single run take longer, and count as memory."""

warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to the map


@dataclass(frozen=True)
class _RowPart:
    """A range of each dimension of a row: runs of elements that are next to each other.

    Args:
        length: the number of elements of a run.
        unit: the number of elements that divides the start of each run: `length`, if possible.
        row: the distance between rows, in units.
        within: the start of each run in a row, in units: [runs]; None for one run, at 0.
        sizes: the shape of the runs of a row.
        kept: (dimension, start, stop), the ranges of the runs to keep after they are read;
            dimension 0 are the rows.
    """

    length: int
    unit: int
    row: int
    within: Tensor | None
    sizes: tuple[int, ...]
    kept: tuple[tuple[int, int, int], ...]


class ArrayReader:
    """Reads parts of an array in a file: only the pages of the file that have their elements, into
    memory of their size."""

    def __init__(self, array: FileArray):
        self.array = array
        self._file = array.path.open("rb", buffering=0)
        self._parts: dict[tuple[tuple[tuple[int, int], ...], bool], _RowPart] = {}
        self._maps: dict[tuple[int, int], Tensor] = {}

    def read(self, bounds: Sequence[tuple[int, int]], rows: Tensor | None = None) -> Tensor:
        """Return the part in a range [start, stop) of each dimension. With `rows`, read these rows;
        `bounds` has the ranges of the other dimensions.

        Raises:
            ArrayError: the file has become shorter.
        """
        key = tuple(bounds), rows is not None
        part = self._parts.get(key) or self._parts.setdefault(key, self._part(*key))
        first = torch.zeros(1, dtype=torch.int64) if rows is None else rows
        starts = first if part.row == 1 else first * part.row
        if part.within is not None:
            starts = (starts[:, None] + part.within).flatten()
        x = self._runs(starts, part.length, part.unit).view([len(first), *part.sizes])
        for dim, begin, end in part.kept:
            x = x.narrow(dim, begin, end - begin)
        x = x[0] if rows is None else x
        return as_signed(x, self.array.dtype).contiguous()

    def _part(self, bounds: tuple[tuple[int, int], ...], of_rows: bool) -> _RowPart:
        shape = self.array.shape[of_rows:]
        level = self._level(shape, bounds)
        inner = math.prod(shape[level + 1 :])
        start, stop = bounds[level] if shape else (0, 1)
        strides = [math.prod(shape[d + 1 :]) for d in range(level)]
        outer = [range(*bounds[d]) for d in range(level)]
        within = [
            sum(i * stride for i, stride in zip(place, strides, strict=True)) + start * inner
            for place in product(*outer)
        ]
        length, row = (stop - start) * inner, math.prod(shape)
        unit = length if length and math.gcd(row, *within) % length == 0 else 1
        return _RowPart(
            length=length, unit=unit, row=row // unit,
            within=None if within == [0] else torch.tensor(within, dtype=torch.int64) // unit,
            sizes=(*map(len, outer), stop - start, *shape[level + 1 :]) if shape else (),
            kept=tuple((d, *range_) for d, range_ in enumerate(bounds[level + 1 :], level + 2)),
        )  # fmt: skip

    def _level(self, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> int:
        """Return the innermost split dimension whose range is at least a page. Elements outside the
        ranges of dimensions within it are read, and then dropped."""
        item, found = BYTES[self.array.dtype], 0
        for dim, (start, stop) in enumerate(bounds):
            run = (stop - start) * math.prod(shape[dim + 1 :]) * item
            if (start, stop) != (0, shape[dim]) and run >= PAGE:
                found = dim
        return found

    def _runs(self, at: Tensor, length: int, unit: int) -> Tensor:
        """Return the elements of runs that start at `at` units. Adjacent runs are one read."""
        item, dtype = BYTES[self.array.dtype], DTYPES[self.array.dtype]
        size, place = length * item, self.array.offset
        if not len(at) or not size:
            return torch.empty(0, dtype=dtype)
        if len(at) > 1 and size < PAGE and math.prod(self.array.shape) * item <= MAPPED:
            # Torch copies the rows of a matrix twice as fast as overlapping rows.
            return self._map_runs(size, unit * item).index_select(0, at).flatten().view(dtype)
        ends = [*((at.diff() * unit != length).nonzero().flatten() + 1).tolist(), len(at)]
        begins = (at[[0, *ends[:-1]]] * (unit * item) + place).tolist()
        counts = [(end - first) * size for first, end in zip([0, *ends], ends, strict=False)]
        memory = bytearray().join(map(self._bytes, begins, counts))
        return torch.frombuffer(memory, dtype=dtype)

    def _bytes(self, place: int, count: int) -> bytes:
        """Return `count` bytes of the file from `place` on."""
        data = os.pread(self._file.fileno(), count, place)
        while len(data) < count:  # a call reads 2 GB at most
            more = os.pread(self._file.fileno(), count - len(data), place + len(data))
            if not more:
                raise self._cut_off()
            data += more
        return data

    def _map_runs(self, size: int, step: int) -> Tensor:
        """Return the runs of `size` bytes at each multiple of `step`, [runs, size], as a map of the
        file: a system call for a short run takes longer than its copy."""
        if os.fstat(self._file.fileno()).st_size < self.array.end:
            raise self._cut_off()
        if (size, step) not in self._maps:
            memory = mmap.mmap(self._file.fileno(), self.array.end, prot=mmap.PROT_READ)
            pages = torch.frombuffer(memory, dtype=torch.uint8, offset=self.array.offset)
            count = (len(pages) - size) // step + 1
            self._maps[size, step] = pages.as_strided((count, size), (step, 1))
        return self._maps[size, step]

    def _cut_off(self) -> ArrayError:
        return ArrayError(f"{self.array.path} was cut off while it was read; write it again")


def read_part(array: FileArray | DividedArray, bounds: Sequence[tuple[int, int]]) -> Tensor:
    """Return the part of an array in a range [start, stop) of each dimension.

    Raises:
        ArrayError: a file has become shorter.
    """
    if isinstance(array, FileArray):
        return ArrayReader(array).read(bounds)
    x = torch.empty([stop - start for start, stop in bounds], dtype=DTYPES[array.dtype])
    for at, part in array.parts:
        both = [
            (max(start, first), min(stop, first + size))
            for (start, stop), first, size in zip(bounds, at, part.shape, strict=True)
        ]
        if all(start < stop for start, stop in both):
            place = tuple(slice(a - b, c - b) for (a, c), (b, _) in zip(both, bounds, strict=True))
            here = [(a - first, c - first) for (a, c), first in zip(both, at, strict=True)]
            x[place] = ArrayReader(part).read(here)
    return x


def as_signed(x: Tensor, dtype: str) -> Tensor:
    """Return the values of unsigned numbers from the signed view x of their memory."""
    if dtype == "u16":
        return x.int() & 0xFFFF
    return x.long() & 0xFFFFFFFF if dtype == "u32" else x


def save_npz(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write an .npz as numpy does (bf16 as f32), without numpy."""
    names = {DTYPES[dtype]: name for name, dtype in NPY.items() if not dtype.startswith("u")}
    names[torch.uint8] = "|u1"
    with writing(path) as archive, zipfile.ZipFile(archive, "w") as file:
        for name, tensor in tensors.items():
            x = tensor.detach().cpu().contiguous()
            x = x.float() if x.dtype == torch.bfloat16 else x
            about = {"descr": names[x.dtype], "fortran_order": False, "shape": tuple(x.shape)}
            header = repr(about).encode().ljust(117) + b"\n"
            if len(header) > 118:  # many dimensions
                header = repr(about).encode().ljust(1013) + b"\n"
            start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
            data = (
                ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
            )
            with file.open(f"{name.replace('..', '__')}.npy", "w", force_zip64=True) as member:
                member.write(start + header)
                member.write(data)
