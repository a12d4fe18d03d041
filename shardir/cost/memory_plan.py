"""The plan of a function's memory: an offset in one block for each storage.

    %h = nn.matmul %x, %w1 {offsets = array<i64: 0>}
    %y = dist.all_gather %h dim 0 over <d> {offsets = array<i64: 1024, 4096>}

An op that makes storages has an offset in bytes for each result, and one more for the buffers of a
collective; -1 stands for a result in the storage of another value. Arguments are not in the block.
The function has `memory_plan = {bound, size}`: `bound` is the maximum of the bytes that are live at
one op, each storage rounded up to ALIGNMENT, and `size` the bytes of the block.
"""

from collections.abc import Iterator
from typing import NamedTuple

from xdsl.dialects.builtin import DenseArrayBase, DictionaryAttr, IntegerAttr, i64
from xdsl.dialects.func import FuncOp
from xdsl.ir import BlockArgument, Operation, OpResult

from shardir.algebra.allocation import LiveBuffer, allocate
from shardir.algebra.mesh import Mesh
from shardir.cost.memory import LiveStorages
from shardir.dialects.memory import MEMORY_PLAN, OFFSETS

ALIGNMENT = 64
"""The alignment of storages, in bytes: torch's on CPUs."""

MAX_WORK = 100_000_000
"""Bounds the search for offsets, in the units of work of `algebra/allocation.py`: 3 to 6 s."""


class PlannedMemory(NamedTuple):
    """The bytes of a function's block, and a lower bound on them."""

    bound: int
    size: int

    @property
    def gap(self) -> float:
        """The relative distance of the plan to the bound."""
        return self.size / self.bound - 1 if self.bound else 0.0


def storages(f: FuncOp, mesh: Mesh) -> Iterator[tuple[Operation, int, LiveBuffer]]:
    """Yield the storages that a function in the local view makes.

    Yields:
        The op; the index of the result, or the number of results for a collective's buffers; and
        the bytes with the ops at which they are live.
    """
    live = LiveStorages(f, mesh)
    for v, (start, end) in live.spans.items():
        if not isinstance(v, BlockArgument):
            assert isinstance(v, OpResult)
            yield v.op, v.index, LiveBuffer(start, end + 1, live.sizes[v])
    for op, (size, (start, end)) in live.buffers.items():
        yield op, len(op.results), LiveBuffer(start, end + 1, size)


def plan_offsets(f: FuncOp, mesh: Mesh) -> None:
    """Plan the memory of a function, and write the offsets on its ops in place of older ones."""
    for op in f.body.block.ops:
        op.attributes.pop(OFFSETS, None)
    own = [*storages(f, mesh)]
    allocation = allocate([b for _, _, b in own], ALIGNMENT, max_work=MAX_WORK)
    offsets: dict[Operation, dict[int, int]] = {}
    for (op, i, _), offset in zip(own, allocation.offsets, strict=True):
        offsets.setdefault(op, {})[i] = offset
    for op, by_index in offsets.items():
        count = max(len(op.results), max(by_index) + 1)
        numbers = [by_index.get(i, -1) for i in range(count)]
        op.attributes[OFFSETS] = DenseArrayBase.from_list(i64, numbers)
    sizes = {"bound": allocation.bound, "size": allocation.size}
    f.attributes[MEMORY_PLAN] = DictionaryAttr(
        {name: IntegerAttr(size, i64) for name, size in sizes.items()}
    )


def planned_memory(f: FuncOp) -> PlannedMemory | None:
    """Return the sizes of the memory plan of a function; None if it has no plan."""
    plan = f.attributes.get(MEMORY_PLAN)
    if not isinstance(plan, DictionaryAttr):
        return None
    bound, size = (plan.data.get(name) for name in PlannedMemory._fields)
    if not isinstance(bound, IntegerAttr) or not isinstance(size, IntegerAttr):
        return None
    return PlannedMemory(bound.value.data, size.value.data)
