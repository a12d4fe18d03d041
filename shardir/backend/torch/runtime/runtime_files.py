"""Arrays in files, read and written without numpy. A part of the runtime; needs only torch."""

import ctypes
import math
import mmap
import os
import warnings
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from runtime_arrays import BYTES, NPY, ArrayError, DividedArray, FileArray
from runtime_writing import writing
from torch import Tensor

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
"""The bytes that are read at a time, at least: a file is read from disk in pages."""


MAPPED = 1 << 27
"""The bytes of an array with short runs that is mapped. Of a larger one each run is read by a call
of the system: pages that are mapped for one run take longer, and count as memory."""

warnings.filterwarnings("ignore", "The given buffer is not writable")  # nothing writes to the map


class ArrayReader:
    """An array in a file, of which parts are read: into memory of their size, and no more of the
    file than pages that have elements of them."""

    def __init__(self, array: FileArray):
        self.array = array
        self._file = array.path.open("rb", buffering=0)
        self._map: Tensor | None = None

    def read(self, bounds: Sequence[tuple[int, int]], rows: Tensor | None = None) -> Tensor:
        """Return the part in a range [start, stop) of each dimension; with `rows` these rows, and
        `bounds` are those of the other dimensions.

        Raises:
            ArrayError: the file has become shorter.
        """
        shape = self.array.shape[rows is not None :]
        first = torch.zeros(1, dtype=torch.int64) if rows is None else rows * math.prod(shape)
        level = self._level(shape, bounds)
        inner = math.prod(shape[level + 1 :])
        start, stop = bounds[level] if shape else (0, 1)
        strides = [math.prod(shape[d + 1 :]) for d in range(level)]
        outer = [range(*bounds[d]) for d in range(level)]
        within = [
            sum(i * stride for i, stride in zip(place, strides, strict=True)) + start * inner
            for place in product(*outer)
        ]
        starts = first
        if within != [0]:
            starts = (first[:, None] + torch.tensor(within, dtype=torch.int64)).flatten()
        length = (stop - start) * inner
        are_next = bool(length) and math.gcd(math.prod(shape), *within) % length == 0
        memory = self._runs(starts, length, are_next)
        sizes = [*map(len, outer), stop - start, *shape[level + 1 :]] if shape else []
        x = memory.view([len(first), *sizes])
        for dim, (begin, end) in enumerate(bounds[level + 1 :], level + 2):
            x = x.narrow(dim, begin, end - begin)
        x = x[0] if rows is None else x
        return as_signed(x, self.array.dtype).contiguous()

    def _level(self, shape: Sequence[int], bounds: Sequence[tuple[int, int]]) -> int:
        """Return the innermost dimension that is split and whose range is a page or more; what is
        split within it is left out after it is read."""
        item, found = BYTES[self.array.dtype], 0
        for dim, (start, stop) in enumerate(bounds):
            run = (stop - start) * math.prod(shape[dim + 1 :]) * item
            if (start, stop) != (0, shape[dim]) and run >= PAGE:
                found = dim
        return found

    def _runs(self, at: Tensor, length: int, are_next: bool) -> Tensor:
        """Return the elements of runs of one length; neighbours are read at once.

        Args:
            are_next: whether each begins at a multiple of the length.
        """
        item, dtype = BYTES[self.array.dtype], DTYPES[self.array.dtype]
        size, place = length * item, self.array.offset
        if not len(at) or not size:
            return torch.empty(0, dtype=dtype)
        if len(at) > 1 and size < PAGE and math.prod(self.array.shape) * item <= MAPPED:
            return self._gathered(at, size, are_next).view(dtype)
        ends = [*((at.diff() != length).nonzero().flatten() + 1).tolist(), len(at)]
        begins = (at[[0, *ends[:-1]]] * item + place).tolist()
        counts = [(end - first) * size for first, end in zip([0, *ends], ends, strict=False)]
        memory = bytearray().join(map(self._bytes, begins, counts))
        return torch.frombuffer(memory, dtype=dtype)

    def _bytes(self, place: int, count: int) -> bytes:
        """Return `count` bytes of the file from `place` on."""
        found = os.pread(self._file.fileno(), count, place)
        while len(found) < count:  # a call reads 2 GB at most
            more = os.pread(self._file.fileno(), count - len(found), place + len(found))
            if not more:
                raise self._cut_off()
            found += more
        return found

    def _gathered(self, starts: Tensor, size: int, are_next: bool) -> Tensor:
        """Return the bytes of short runs, by a map of the file: a call of the system for each would
        take longer than its copy."""
        if os.fstat(self._file.fileno()).st_size < self.array.end:
            raise self._cut_off()
        if self._map is None:
            pages = mmap.mmap(self._file.fileno(), self.array.end, prot=mmap.PROT_READ)
            self._map = torch.frombuffer(pages, dtype=torch.uint8, offset=self.array.offset)
        item = BYTES[self.array.dtype]
        # Torch copies rows of a matrix twice as fast as those that overlap.
        step = size if are_next else item
        runs = self._map.as_strided(((len(self._map) - size) // step + 1, size), (step, 1))
        return runs.index_select(0, starts // (step // item)).flatten()

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
    """Return the values of unsigned numbers, whose memory x has."""
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
            if len(header) > 118:  # so many dimensions that it needs a longer one
                header = repr(about).encode().ljust(1013) + b"\n"
            start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
            data = (
                ctypes.string_at(x.data_ptr(), x.numel() * x.element_size()) if x.numel() else b""
            )
            with file.open(f"{name.replace('..', '__')}.npy", "w", force_zip64=True) as member:
                member.write(start + header)
                member.write(data)
