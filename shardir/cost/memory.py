"""The memory of a device while a function in the local view runs, by live storages.

A storage is live from the op that makes it to after the last op that reads a value in it. Arguments
belong to the caller, and are live throughout; results are returned to it, and are live to the end.
In a training step storages are freed after their last use; in other functions none is freed before
the return, as in the emitted program. These share one storage:

1. a value and its views; some reshapes are copies, and so is the broadcast of a constant;
2. a parameter or state and its updated value, if the old one is not read later;
3. operand and result of an all-reduce of one value, if the operand is not read later and is no
   argument;
4. the results of a reduction of several values, one flat buffer.

5. a copy between the memories of a device and its host, and the old value of the parameter or
   state that it is the new value of, if that is not read later;
6. a product that adds to its sum over the microbatches (`analysis/accumulation.py`), and the sum.

Storages in host memory are counted apart. Other collectives also have buffers, as planned
redistributions do (`step_memory`). An `async` one holds them, and its operands, until the wait for
it. Not counted are the memory that a torch op allocates internally, and the fragmentation of the
allocator.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain
from operator import attrgetter, sub
from typing import NamedTuple

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.accumulation import added_in_place
from shardir.analysis.aliasing import in_place, may_share, may_write, shared
from shardir.analysis.roles import frees, lent_arguments
from shardir.analysis.storages import Span, Storages, live_ops
from shardir.compat.xdsl import type_of
from shardir.cost.collective_work import collective_work
from shardir.cost.ring_products import ring_buffers
from shardir.dialects import dist, train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.nn.types import size_of
from shardir.dialects.signatures import SignatureMemo

PARTS = ("parameters", "states", "inputs", "gradients", "activations", "temporaries")
"""The purposes of memory. Activations are made before the backward part, temporaries in it or
after it; the values of those that lead to an update's gradient are gradients."""


@dataclass(frozen=True)
class Storage:
    """A block of memory: the first value in it, its bytes, and its purpose."""

    value: SSAValue
    bytes: int
    part: str


@dataclass(frozen=True)
class MemoryUse:
    """The peak memory of a device: its bytes, the op at which it is reached, the live storages at
    that op, largest first, and the bytes of the buffers of the op itself; and the peak of what is
    in the memory of its host, in bytes."""

    peak: int
    op: Operation
    storages: tuple[Storage, ...]
    buffers: int
    host: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each of PARTS at the peak."""
        found = Counter({"temporaries": self.buffers})
        for s in self.storages:
            found[s.part] += s.bytes
        return {part: found[part] for part in PARTS}


def memory_of(f: FuncOp, mesh: Mesh) -> MemoryUse:
    """Return the memory that a function in the local view needs on a device."""
    live = LiveStorages(f, mesh)
    at = max(range(len(live.ops)), key=live.needed.__getitem__)
    parts = _parts(f, live.ops)
    there = (
        Storage(v, live.sizes[v], parts.get(v, "temporaries"))
        for v, (start, end) in live.spans.items() if start <= at <= end
    )  # fmt: skip
    largest = tuple(sorted(there, key=lambda s: -s.bytes))
    values = (*f.body.block.args, *(v for op in live.ops for v in op.results))
    on_host = any(map(is_on_host, values))
    host = max(LiveStorages(f, mesh, host=True).needed) if on_host else 0
    return MemoryUse(live.needed[at], live.ops[at], largest, live.held[at], host)


class LiveStorages:
    """The live ops of a function, its storages in the memory of a device or of its host, and the
    bytes of it that each op needs."""

    def __init__(
        self,
        f: FuncOp,
        mesh: Mesh,
        ops: Sequence[Operation] | None = None,
        *,
        host: bool = False,
        elsewhere: Collection[SSAValue] = (),
        fixed: Collection[Operation] = (),
    ):
        """`ops`: the live ones of the function, where they are known; `elsewhere`: returned values
        that are in memory of the caller; `fixed`: ops whose results are not counted, nor may share
        a storage with those of other ops."""
        self.ops = ops = live_ops(ops_of(f.body.block)) if ops is None else ops
        counted = [op for op in ops if op not in fixed] if fixed else ops
        self.sharing = _sharing(counted, mesh)
        storages = _storages(f, ops, self.sharing)
        self.at, self.root = storages.at, storages.root
        made = map(attrgetter("results"), counted)
        self.spans = storages.spans(chain(f.body.block.args, *made) if fixed else None)
        by_type = {id(type_of(v)): v for v in self.spans}
        of_types = by_type.values()  # a type says where its values are
        if elsewhere or any(is_on_host(v) is not host for v in of_types):
            self.spans = {
                v: span
                for v, span in self.spans.items() if is_on_host(v) is host and v not in elsewhere
            }  # fmt: skip
        if not frees(f):
            self.spans = {v: Span(span.start, len(ops)) for v, span in self.spans.items()}
        self.sizes = storages.sizes(self.spans, size_of)
        self.buffers = {} if host else _buffers(ops, storages.waits, mesh)
        """The buffers of collectives: the bytes, and the ops from and to which each is live."""
        sized = ((self.sizes[v], span) for v, span in self.spans.items())
        self.born, self.died = changes(chain(sized, self.buffers.values()), len(ops))
        self.needed = running(self.born, self.died)

    @cached_property
    def held(self) -> list[int]:
        """The bytes of buffers at each op."""
        return running(*changes(self.buffers.values(), len(self.ops)))


def changes(pieces: Iterable[tuple[int, Span]], number: int) -> tuple[list[int], list[int]]:
    """Return the bytes of the pieces of memory that are live from each of a number of ops on, those
    from before the first op on as the last element, and of those that are live until each op."""
    born, died = [0] * (number + 1), [0] * (number + 1)
    for size, (start, end) in pieces:
        born[start] += size
        died[end] += size
    return born, died


def running(born: Sequence[int], died: Sequence[int]) -> list[int]:
    """Return the bytes that are live at each op, of `changes`."""
    return list(accumulate(map(sub, born[:-1], chain((-born[-1],), died))))


def is_on_host(v: SSAValue) -> bool:
    """Whether a value is in host memory."""
    return _on_host.of(type_of(v), _has_host_layout)


def _has_host_layout(t: Attribute) -> bool:
    layout = dist.type_layout(t)
    return layout is not None and layout.host


_on_host = SignatureMemo()


def _buffers(
    ops: Sequence[Operation], ends: Mapping[Operation, int], mesh: Mesh
) -> dict[Operation, tuple[int, Span]]:
    """Return the bytes of the buffers of each collective that has any, and when they are live: at
    the op, or until the wait for it, by its index."""
    found = dict[Operation, tuple[int, Span]]()
    for i, op in enumerate(ops):
        if not _has_buffers(type(op)):
            continue
        if isinstance(op, dist.RingProductOp):
            found[op] = ring_buffers(op, mesh), Span(i, i)
        elif isinstance(op, dist.CollectiveOp) and (size := collective_work(op, mesh).buffers):
            found[op] = size, Span(i, ends.get(op, i))
    return found


@cache
def _has_buffers(kind: type[Operation]) -> bool:
    """Whether ops of a kind may have buffers; asked once for each kind."""
    return issubclass(kind, (dist.CollectiveOp, dist.RingProductOp))


class Sharing(NamedTuple):
    """Results of an op, each with the value whose storage it shares: always, or if the op can write
    it in place, where nothing reads that value later."""

    pairs: Mapping[SSAValue, SSAValue]
    in_place: bool = False


def _sharing(ops: Iterable[Operation], mesh: Mesh) -> dict[Operation, Sharing]:
    """Return the sharing of each of some ops of a step, in their order, that has any."""
    found = dict[Operation, Sharing]()
    for op in ops:
        if not may_share(type(op)):
            continue
        if places := dict(in_place(op)) if may_write(type(op)) else {}:
            found[op] = Sharing(places, True)
            continue
        pairs = dict(shared(op, mesh))
        if len(op.results) > 1 and isinstance(op, dist.FusibleOp) and op.record.reduces:
            pairs = {v: op.outs[0] for v in op.outs[1:]} | pairs  # parts of one buffer
        if pairs:
            found[op] = Sharing(pairs)
    return found


def _storages(
    f: FuncOp, ops: Sequence[Operation], sharing: Mapping[Operation, Sharing]
) -> Storages:
    """Return the storages of a function's ops, of which some share storages."""
    storages = Storages(f.body.block.args, ops)
    freed, lent = frees(f), lent_arguments(f)
    for v, total in added_in_place(ops).items():
        storages.join(v, total.out)
    for op, (pairs, is_in_place) in sharing.items():
        if is_in_place:
            mine = () if isinstance(op, dist.AllReduceOp) else lent
            pairs = {v: x for v, x in pairs.items() if freed and storages.is_free(x, op, mine)}
        for v, other in pairs.items():
            storages.join(v, other)
    return storages


def _parts(f: FuncOp, ops: Sequence[Operation]) -> dict[SSAValue, str]:
    """Return the purposes of the values that are no temporaries."""
    args = zip(f.body.block.args, train.arguments(f), strict=True)
    found: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
    for op in ops:
        if isinstance(op, train.BackwardOp):
            break
        found |= dict.fromkeys(op.results, "activations")
    for v in gradients(ops):
        found.setdefault(v, "gradients")
    for op in ops:
        if isinstance(op, train.Update):
            found |= dict.fromkeys(op.results[:1], "parameters")
            found |= dict.fromkeys(op.results[1:], "states")
    return found


def gradients(ops: Iterable[Operation]) -> set[SSAValue]:
    """Return the gradients that updates read, and the values that redistribution and elementwise
    ops make them from."""
    found = set[SSAValue]()
    todo = [op.operands[1] for op in ops if isinstance(op, train.Update)]
    while todo:
        v = todo.pop()
        if v in found:
            continue
        found.add(v)
        op = v.owner
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):
            assert isinstance(v, OpResult)
            todo.append(op.values[v.index])
        elif isinstance(op, dist.RedistributeOp):
            todo.append(op.value)
        elif isinstance(op, Elementwise) and not isinstance(op, train.Update):
            todo += [x for x in op.operands if _shape(x) == _shape(v)]
    return found


def _shape(v: SSAValue) -> tuple[int, ...]:
    assert isinstance(v.type, TensorType)
    return v.type.get_shape()
