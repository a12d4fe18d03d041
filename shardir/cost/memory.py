"""The memory of a device while a function in the local view runs: what lives, from when to when.

A storage lives from the op that makes it behind the last op that reads a value in it. Arguments
belong to the caller, results go to it: both live throughout, or to the end. In a training step
storages are freed behind their last use; in other functions none is before the return, as in the
emitted program. In one storage are:

1. a value and its views; a reshape of what a transpose, broadcast or slice made is a copy, and so
   is the broadcast of a constant;
2. a parameter or state and what an update makes of it, where nothing reads the old one later;
3. what an all-reduce of one value takes and gives, where that is not read later and is no argument;
4. the results of a reduction of several values, one flat buffer.

Other collectives hold buffers besides, as planned redistributions do (`step_memory`). One that is
started holds them, and what it takes, until the wait for it. What a torch
op allocates within itself is not counted, nor what an allocator loses between blocks.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.aliasing import in_place, shared
from shardir.analysis.roles import retained_arguments
from shardir.analysis.storages import Span, Storages, live_ops, waits
from shardir.cost.seconds import buffers, size_of
from shardir.dialects import dist, train
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.train import is_step

PARTS = ("parameters", "states", "inputs", "gradients", "activations", "temporaries")
"""What memory is for. Activations are made before the backward part, temporaries in it or behind;
what leads from there to an update's gradient is a gradient."""


@dataclass(frozen=True)
class Storage:
    """A piece of memory: the first value in it, its bytes, and what it is for."""

    value: SSAValue
    bytes: int
    part: str


@dataclass(frozen=True)
class MemoryUse:
    """The most that lives on one device at once: in bytes, when `op` runs, the storages of that
    moment, largest first, and the bytes of the buffers that the op itself holds."""

    peak: int
    op: Operation
    storages: tuple[Storage, ...]
    buffers: int

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each of PARTS at the peak."""
        found = Counter({"temporaries": self.buffers})
        for s in self.storages:
            found[s.part] += s.bytes
        return {part: found[part] for part in PARTS}


def memory_of(f: FuncOp, mesh: Mesh) -> MemoryUse:
    """The memory that a function in the local view needs on a device."""
    ops = live_ops(list(f.body.block.ops))
    storages = _storages(f, ops, mesh)
    spans = dict(storages.spans())
    if not is_step(f):
        spans = {v: Span(span.start, len(ops)) for v, span in spans.items()}
    sizes = {v: _size(v, storages) for v in spans}
    born, died = [0] * (len(ops) + 1), [0] * (len(ops) + 1)
    for v, (start, end) in spans.items():
        born[start] += sizes[v]  # of arguments the last element, which is before the first op
        died[end] += sizes[v]
    held = _held(ops, mesh)
    now, peak, at = born[-1], 0, 0
    for i in range(len(ops)):
        now += born[i]
        if (needed := now + held[i]) > peak:
            peak, at = needed, i
        now -= died[i]
    parts = _parts(f, ops)
    live = (
        Storage(v, sizes[v], parts.get(v, "temporaries"))
        for v, (start, end) in spans.items() if start <= at <= end
    )  # fmt: skip
    largest = tuple(sorted(live, key=lambda s: -s.bytes))
    return MemoryUse(peak, ops[at], largest, held[at])


def _held(ops: list[Operation], mesh: Mesh) -> list[int]:
    """The bytes of buffers at each op: its own, and those of collectives under way."""
    found, ends = [0] * len(ops), waits(ops)
    for i, op in enumerate(ops):
        if size := buffers(op, mesh):
            for k in range(i, ends.get(op, i) + 1):
                found[k] += size
    return found


def _storages(f: FuncOp, ops: list[Operation], mesh: Mesh) -> Storages:
    """The storages of a function, by what does share memory."""
    storages = Storages(f.body.block.args, ops)
    step, lent = is_step(f), retained_arguments(f)
    for op in ops:
        if places := dict(in_place(op)):
            mine = lent if isinstance(op, train.Update) else ()
            found = {v: x for v, x in places.items() if step and storages.is_free(x, op, mine)}
        else:
            found = dict(shared(op, mesh))
        if isinstance(op, dist.FusibleOp) and op.record.reduces:  # parts of one buffer
            found = {v: op.outs[0] for v in op.outs[1:]} | found
        for v, other in found.items():
            storages.join(v, other)
    return storages


def _size(root: SSAValue, storages: Storages) -> int:
    """The bytes of a storage: those of the values that the op makes in it that makes it."""
    return sum(size_of(v) for v in storages.members(root) if v.owner is root.owner)


def _parts(f: FuncOp, ops: list[Operation]) -> dict[SSAValue, str]:
    """What the values are for; temporaries are left out."""
    args = zip(f.body.block.args, train.arguments(f), strict=True)
    found: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
    for op in ops:
        if isinstance(op, train.BackwardOp):
            break
        found |= dict.fromkeys(op.results, "activations")
    for op in ops:
        if isinstance(op, train.Update):
            for v in leading_to(op.operands[1]):
                found.setdefault(v, "gradients")
            found |= dict.fromkeys(op.results[:1], "parameters")
            found |= dict.fromkeys(op.results[1:], "states")
    return found


def leading_to(gradient: SSAValue) -> Iterator[SSAValue]:
    """A gradient, and what it is of other places, types or scale."""
    todo = [gradient]
    while todo:
        v = todo.pop()
        yield v
        op = v.owner
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):
            todo += [x for x, out in zip(op.values, op.outs, strict=True) if out is v]
        elif isinstance(op, dist.RedistributeOp):
            todo.append(op.value)
        elif isinstance(op, Elementwise) and not isinstance(op, train.Update):
            todo += [x for x in op.operands if _shape(x) == _shape(v)]


def _shape(v: SSAValue) -> tuple[int, ...]:
    assert isinstance(v.type, TensorType)
    return v.type.get_shape()
