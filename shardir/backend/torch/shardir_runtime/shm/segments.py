"""Shared memory of the ranks of one machine: one rank writes, other ranks read.

A segment is memory without a name, which ends with the last process that has mapped it. Its owner
writes tensors into it and tells its readers where they are. Once all readers have read it, the
owner uses it again.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat import is_zeros_without_memory

ALIGNMENT = 64
"""The alignment of each tensor in a segment, in bytes: a cache line."""

PAGE = mmap.PAGESIZE

ONE_COPY = 1 << 20
"""The maximum bytes of a tensor to copy by memmove, in one thread: torch's copies use several
threads, but take 50 us to start with cold caches."""


def round_up(size: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple of `to`."""
    return -(-size // to) * to


def size_of(parts: Iterable[Tensor]) -> int:
    """Return the bytes of tensors one after the other, each one aligned."""
    return sum(round_up(x.numel() * x.element_size()) for x in parts)


def bytes_of(parts: Iterable[Tensor]) -> int:
    """Return the bytes of the elements of tensors."""
    return sum(x.numel() * x.element_size() for x in parts)


def flats(parts: Iterable[Tensor]) -> list[Tensor]:
    """Flatten tensors: contiguous ones to views, others to copies."""
    return [x.reshape(-1) for x in parts]


def views(memory: Any, offset: int, like: Iterable[Tensor]) -> list[Tensor]:
    """Return flat tensors in a buffer from an offset on, with the sizes and dtypes of `like`."""
    tensors = []
    for x in like:
        count = x.numel()
        if count:
            tensors.append(torch.frombuffer(memory, dtype=x.dtype, count=count, offset=offset))
            offset += round_up(count * x.element_size())
        else:  # torch.frombuffer refuses 0 elements
            tensors.append(x.new_empty(0))
    return tensors


def write(memory: Any, address: int, offset: int, parts: Sequence[Tensor]) -> None:
    """Copy tensors into a buffer, one after the other from an offset on.

    Args:
        address: the address of the buffer; 0 if unknown.
    """
    for x in parts:
        size = x.numel() * x.element_size()
        if address and _is_plain(x, size):
            ctypes.memmove(address + offset, x.data_ptr(), size)
        else:
            views(memory, offset, [x])[0].view(x.shape).copy_(x)
        offset += round_up(size)


def read(memory: Any, address: int, offset: int, parts: Sequence[Tensor]) -> None:
    """Copy tensors out of a buffer: the inverse of `write`."""
    for x in parts:
        size = x.numel() * x.element_size()
        if address and _is_plain(x, size):
            ctypes.memmove(x.data_ptr(), address + offset, size)
        else:
            x.copy_(views(memory, offset, [x])[0].view(x.shape))
        offset += round_up(size)


def _is_plain(x: Tensor, size: int) -> bool:
    """Whether the bytes of a tensor are its elements in order, and at most ONE_COPY."""
    lazy = x.is_conj() or x.is_neg() or is_zeros_without_memory(x)
    return size <= ONE_COPY and x.is_contiguous() and not lazy


def address_of(memory: mmap.mmap) -> int:
    """Return the address of mapped memory, which is valid until it is unmapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Segment:
    """A segment of this rank.

    Attributes:
        file: the file descriptor, until all ranks of the group have mapped the segment; then -1.
        address: the address of the memory in this process.
        known: the ranks that have the descriptor.
        unread: the ranks that have yet to read the segment.
    """

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        try:
            self.file = os.memfd_create("shardir", os.MFD_CLOEXEC)
        except OSError as error:
            raise too_many_files(error.strerror) from None
        os.ftruncate(self.file, size)
        self.memory = map_segment(self.file, size)
        self.address = address_of(self.memory)
        self.known, self.unread = set[int](), set[int]()

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def too_many_files(reason: str | None = None) -> RuntimeError:
    """Return the error of a process that may open no more files: segments are files."""
    reason = reason or "Too many open files"
    return RuntimeError(f"shm: expected a segment of shared memory, got {reason}; use ulimit -n")


def map_segment(file: int, size: int) -> mmap.mmap:
    """Map a segment with all its pages at once: page faults at the first uses take longer.

    Raises:
        RuntimeError: too many files are open.
    """
    try:
        return mmap.mmap(file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:
        raise too_many_files(error.strerror) from None


class SegmentPool:
    """The segments of this rank in a group: of each size the maximum number in use at a time.

    Sizes are rounded up to one of four between two powers of two, so that tensors of nearly equal
    sizes share segments.

    Attributes:
        size: the bytes of all segments.
        unread: the bytes of the segments in use.
    """

    def __init__(self):
        self._free: dict[int, list[Segment]] = {}  # by size
        self._all: list[Segment] = []
        self.size, self.unread = 0, 0

    def take(self, size: int, readers: Iterable[int]) -> Segment:
        """Return a segment of at least `size` bytes, in use until the readers have read it."""
        size = round_up(size, max(PAGE, 1 << max(0, size.bit_length() - 3)))
        free = self._free.get(size)
        if free:
            segment = free.pop()
        else:
            segment = Segment(len(self._all), size)
            self._all.append(segment)
            self.size += size
        segment.unread.update(readers)
        self.unread += size
        return segment

    def read(self, number: int, reader: int) -> None:
        """Record that a rank has read a segment."""
        segment = self._all[number]
        segment.unread.discard(reader)
        if not segment.unread:
            self._free.setdefault(segment.size, []).append(segment)
            self.unread -= segment.size

    def close(self) -> None:
        """Release the memory, once nothing refers to it."""
        for segment in self._all:
            segment.close()
        self._all.clear()
        self._free.clear()
