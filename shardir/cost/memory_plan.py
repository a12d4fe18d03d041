"""The plan of a function's memory: an offset for each storage that it makes, in one block.

    %h = nn.matmul %x, %w1 {offsets = array<i64: 0>}
    %y = dist.all_gather %h dim 0 over <d> {offsets = array<i64: 1024, 4096>}

An op that makes storages has an offset in bytes for each result, and one more for the buffers of a
collective; -1 where the result is in the storage of another value. Arguments are not in the block.
The function has `memory_plan = {bound, size}`: the maximum of the bytes of the block that are live
at one op, each storage rounded up to ALIGNMENT, and the bytes of the block.
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
"""The alignment of storages, in bytes: that of torch on CPUs."""

MAX_WORK = 100_000_000
"""The limit of the search for offsets: seconds."""


class PlannedMemory(NamedTuple):
    """The bytes of a function's block, and the lower bound on them."""

    bound: int
    size: int

    @property
    def gap(self) -> float:
        """The relative distance of the plan to the bound."""
        return self.size / self.bound - 1 if self.bound else 0.0


def storages(f: FuncOp, mesh: Mesh) -> Iterator[tuple[Operation, int, LiveBuffer]]:
    """Yield the storages that a function in the local view makes: the op, the number of the result,
    and its bytes and life in ops; after the results the buffers of a collective."""
    live = LiveStorages(f, mesh)
    for v, (start, end) in live.spans.items():
        if not isinstance(v, BlockArgument):
            assert isinstance(v, OpResult)
            yield v.op, v.index, LiveBuffer(start, end + 1, live.sizes[v])
    for op, (size, (start, end)) in live.buffers.items():
        yield op, len(op.results), LiveBuffer(start, end + 1, size)


def plan_offsets(f: FuncOp, mesh: Mesh) -> None:
    """Give the storages of a function offsets, in place of those that it has."""
    for op in f.body.block.ops:
        op.attributes.pop(OFFSETS, None)
    found = [*storages(f, mesh)]
    made = allocate([b for _, _, b in found], ALIGNMENT, max_work=MAX_WORK)
    offsets: dict[Operation, dict[int, int]] = {}
    for (op, i, _), offset in zip(found, made.offsets, strict=True):
        offsets.setdefault(op, {})[i] = offset
    for op, numbers in offsets.items():
        count = max(len(op.results), max(numbers) + 1)
        every = [numbers.get(i, -1) for i in range(count)]
        op.attributes[OFFSETS] = DenseArrayBase.from_list(i64, every)
    sizes = {"bound": made.bound, "size": made.size}
    f.attributes[MEMORY_PLAN] = DictionaryAttr(
        {name: IntegerAttr(size, i64) for name, size in sizes.items()}
    )


def planned_memory(f: FuncOp) -> PlannedMemory | None:
    """Return the sizes of the plan that a function has."""
    found = f.attributes.get(MEMORY_PLAN)
    if not isinstance(found, DictionaryAttr):
        return None
    bound, size = (found.data.get(name) for name in PlannedMemory._fields)
    if not isinstance(bound, IntegerAttr) or not isinstance(size, IntegerAttr):
        return None
    return PlannedMemory(bound.value.data, size.value.data)
