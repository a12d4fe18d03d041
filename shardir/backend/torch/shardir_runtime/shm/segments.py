"""Shared memory of the ranks of one machine: what a rank writes, and others read.

A segment is memory without a name, which ends with the last process that has mapped it. Its owner
writes tensors into it and tells its readers where they are; when all of them have read it, it is
free for others.
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
"""Of each part of a segment, in bytes: a cache line."""

PAGE = mmap.PAGESIZE

ONE_COPY = 1 << 20
"""The maximum bytes of a tensor that is copied by one call, in one thread: torch's copies have
threads, but take 50 us to begin with where the caches have something else."""


def round_up(size: int, to: int = ALIGNMENT) -> int:
    """Return the next multiple."""
    return -(-size // to) * to


def size_of(parts: Iterable[Tensor]) -> int:
    """Return the bytes of tensors in a row, each of which is aligned."""
    return sum(round_up(x.numel() * x.element_size()) for x in parts)


def bytes_of(parts: Iterable[Tensor]) -> int:
    """Return the bytes of the elements of tensors."""
    return sum(x.numel() * x.element_size() for x in parts)


def flats(parts: Iterable[Tensor]) -> list[Tensor]:
    """Return tensors as flat ones: views of those that are contiguous."""
    return [x.reshape(-1) for x in parts]


def views(memory: Any, offset: int, like: Iterable[Tensor]) -> list[Tensor]:
    """Return flat tensors of these sizes and dtypes in a buffer, in a row from an offset on."""
    found = []
    for x in like:
        count = x.numel()
        if count:
            found.append(torch.frombuffer(memory, dtype=x.dtype, count=count, offset=offset))
            offset += round_up(count * x.element_size())
        else:  # torch has no views of no elements
            found.append(x.new_empty(0))
    return found


def write(memory: Any, address: int, offset: int, parts: Sequence[Tensor]) -> None:
    """Copy tensors into a buffer, in a row from an offset on.

    Args:
        address: of the buffer; 0 if it is not known.
    """
    for x in parts:
        size = x.numel() * x.element_size()
        if address and _is_plain(x, size):
            ctypes.memmove(address + offset, x.data_ptr(), size)
        else:
            views(memory, offset, [x])[0].view(x.shape).copy_(x)
        offset += round_up(size)


def read(memory: Any, address: int, offset: int, parts: Sequence[Tensor]) -> None:
    """Copy from a buffer into tensors, which are in a row there from an offset on; as `write`."""
    for x in parts:
        size = x.numel() * x.element_size()
        if address and _is_plain(x, size):
            ctypes.memmove(x.data_ptr(), address + offset, size)
        else:
            x.copy_(views(memory, offset, [x])[0].view(x.shape))
        offset += round_up(size)


def _is_plain(x: Tensor, size: int) -> bool:
    """Whether the bytes of a tensor are its elements in order, and few."""
    lazy = x.is_conj() or x.is_neg() or is_zeros_without_memory(x)
    return size <= ONE_COPY and x.is_contiguous() and not lazy


def address_of(memory: mmap.mmap) -> int:
    """Return the address of mapped memory, which is valid as long as it is mapped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Segment:
    """A segment of this rank.

    Attributes:
        file: its descriptor, until all ranks of the group have mapped it; then -1.
        address: of its memory in this process.
        known: the ranks that have mapped it.
        unread: the ranks that have yet to read what is in it.
    """

    def __init__(self, number: int, size: int):
        self.number, self.size = number, size
        try:
            self.file = os.memfd_create("shardir", os.MFD_CLOEXEC)
        except OSError as error:
            raise too_many_files(error.strerror) from None
        os.ftruncate(self.file, size)
        self.memory = mapped(self.file, size)
        self.address = address_of(self.memory)
        self.known, self.unread = set[int](), set[int]()

    def close(self) -> None:
        """Close the descriptor; the memory stays mapped."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def too_many_files(found: str | None = None) -> RuntimeError:
    """Return the error of a process that may open no more files, which segments are."""
    found = found or "Too many open files"
    return RuntimeError(f"shm: expected a segment of shared memory, got {found}; use ulimit -n")


def mapped(file: int, size: int) -> mmap.mmap:
    """Map a segment, all its pages at once: a page that is mapped where it is first used takes
    longer."""
    try:
        return mmap.mmap(file, size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:
        raise too_many_files(error.strerror) from None


class SegmentPool:
    """The segments of this rank in a group: as many as it has had in use at a time, of each size.

    A size is rounded to one of four between two powers of two, so that nearly equal ones use the
    same segments.

    Attributes:
        size: the bytes of all.
        unread: the bytes of those in use.
    """

    def __init__(self):
        self._free: dict[int, list[Segment]] = {}  # by size
        self._all: list[Segment] = []
        self.size, self.unread = 0, 0

    def take(self, size: int, readers: Iterable[int]) -> Segment:
        """Return a segment of this size or more, in use until the readers have read it."""
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
        """Note that a rank has read a segment."""
        segment = self._all[number]
        segment.unread.discard(reader)
        if not segment.unread:
            self._free.setdefault(segment.size, []).append(segment)
            self.unread -= segment.size

    def close(self) -> None:
        """Let go of the memory, once nothing refers to it."""
        for segment in self._all:
            segment.close()
        self._all.clear()
        self._free.clear()
