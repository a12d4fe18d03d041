"""The memory of a device while a function in the local view runs, by live storages.

A storage is live from the op that makes it until after the last op that reads a value in it.
Arguments belong to the caller and are live throughout; results are live to the end. A training step
frees storages after their last use; other functions free none before the return, as the emitted
program does. These values share one storage:

1. a value and its views (but some reshapes, and the broadcast of a constant, are copies);
2. a parameter or state and its updated value, if the old value is not read later;
3. operand and result of an all-reduce of one value, if the operand is not read later and is no
   argument;
4. the results of a reduction of several values: one flat buffer;
5. a parameter or state and the copy between device and host that is its new value, if the old value
   is not read later;
6. a product and the sum over the microbatches that it adds to (`analysis/accumulation.py`).

Host memory is counted separately. Collectives have buffers, as in plans of redistributions
(`step_memory`). An `async` collective holds its buffers and operands until its wait. The workspace
of torch ops and the fragmentation of the allocator are not counted.
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
from shardir.analysis.roles import donated_arguments, frees
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
"""The purposes of memory. Activations are made before the backward part; temporaries in it or after
it, unless they are on the way to an update's gradient: then they are gradients."""


@dataclass(frozen=True)
class Storage:
    """A block of memory: the value that it is made for, its bytes, and its purpose."""

    value: SSAValue
    bytes: int
    part: str


@dataclass(frozen=True)
class MemoryUse:
    """The peak memory of a device.

    Attributes:
        peak: in bytes.
        op: the op at the peak.
        storages: those live at the peak, largest first.
        buffers: the bytes of collectives' buffers at the peak.
        host: the peak in the memory of the device's host, in bytes.
    """

    peak: int
    op: Operation
    storages: tuple[Storage, ...]
    buffers: int
    host: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of each of PARTS at the peak."""
        by_part = Counter({"temporaries": self.buffers})
        for s in self.storages:
            by_part[s.part] += s.bytes
        return {part: by_part[part] for part in PARTS}


def memory_of(f: FuncOp, mesh: Mesh) -> MemoryUse:
    """Return the memory that a function in the local view needs on a device."""
    live = LiveStorages(f, mesh)
    at = max(range(len(live.ops)), key=live.needed.__getitem__)
    parts = _parts(f, live.ops)
    at_peak = (
        Storage(v, live.sizes[v], parts.get(v, "temporaries"))
        for v, (start, end) in live.spans.items() if start <= at <= end
    )  # fmt: skip
    largest = tuple(sorted(at_peak, key=lambda s: -s.bytes))
    values = (*f.body.block.args, *(v for op in live.ops for v in op.results))
    on_host = any(map(is_on_host, values))
    host = max(LiveStorages(f, mesh, host=True).needed) if on_host else 0
    return MemoryUse(live.needed[at], live.ops[at], largest, live.held[at], host)


class LiveStorages:
    """The storages of a function in the memory of a device, or of its host, and the bytes that are
    live at each op.

    Attributes:
        ops: the live ops of the function.
        spans: of each storage, by the value that it is made for, the first and last op at which it
            is live.
        sizes: of each storage, in bytes.
        buffers: of each collective that has any, their bytes and span.
        born, died: the bytes that are live from, and until, each op (`live_changes`).
        needed: the bytes that are live at each op.
    """

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
        """Args:
        ops: the live ops of the function, if they are known.
        host: count host memory.
        elsewhere: returned values in memory of the caller.
        fixed: ops whose results are not counted, and share no storage with results of other ops.
        """
        self.ops = ops = live_ops(ops_of(f.body.block)) if ops is None else ops
        counted = [op for op in ops if op not in fixed] if fixed else ops
        self.sharing = _sharing(counted, mesh)
        storages = _storages(f, ops, self.sharing)
        self.at, self.root = storages.at, storages.root
        made = map(attrgetter("results"), counted)
        self.spans = storages.spans(chain(f.body.block.args, *made) if fixed else None)
        by_type = {id(type_of(v)): v for v in self.spans}
        samples = by_type.values()  # values of one type are in one memory
        if elsewhere or any(is_on_host(v) is not host for v in samples):
            self.spans = {
                v: span
                for v, span in self.spans.items() if is_on_host(v) is host and v not in elsewhere
            }  # fmt: skip
        if not frees(f):
            self.spans = {v: Span(span.start, len(ops)) for v, span in self.spans.items()}
        self.sizes = storages.sizes(self.spans, size_of)
        self.buffers = {} if host else _buffers(ops, storages.waits, mesh)
        sized = ((self.sizes[v], span) for v, span in self.spans.items())
        self.born, self.died = live_changes(chain(sized, self.buffers.values()), len(ops))
        self.needed = live_bytes(self.born, self.died)

    @cached_property
    def held(self) -> list[int]:
        """The bytes of buffers at each op."""
        return live_bytes(*live_changes(self.buffers.values(), len(self.ops)))


def live_changes(pieces: Iterable[tuple[int, Span]], number: int) -> tuple[list[int], list[int]]:
    """Return by how many bytes live memory grows before each op, and shrinks after it.

    Args:
        pieces: of memory: bytes, and the first and last op at which a piece is live; from -1 on if
            it is live before the first op.
        number: of ops.

    Returns:
        born: number + 1 elements; the last one has the bytes that are live before the first op.
        died: number + 1 elements.
    """
    born, died = [0] * (number + 1), [0] * (number + 1)
    for size, (start, end) in pieces:
        born[start] += size
        died[end] += size
    return born, died


def live_bytes(born: Sequence[int], died: Sequence[int]) -> list[int]:
    """Return the bytes that are live at each op, from the result of `live_changes`."""
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
    """Return the bytes and the span of the buffers of each collective that has any.

    Args:
        ends: the index of the wait for each `async` collective.
    """
    buffers = dict[Operation, tuple[int, Span]]()
    for i, op in enumerate(ops):
        if not _has_buffers(type(op)):
            continue
        if isinstance(op, dist.RingProductOp):
            buffers[op] = ring_buffers(op, mesh), Span(i, i)
        elif isinstance(op, dist.CollectiveOp) and (size := collective_work(op, mesh).buffers):
            buffers[op] = size, Span(i, ends.get(op, i))
    return buffers


@cache
def _has_buffers(kind: type[Operation]) -> bool:
    """Whether ops of a kind may have buffers."""
    return issubclass(kind, (dist.CollectiveOp, dist.RingProductOp))


class Sharing(NamedTuple):
    """The results of an op that share storages.

    Attributes:
        pairs: each result, with the value whose storage it shares.
        in_place: the op writes over that value, so it shares only if nothing reads the value later.
    """

    pairs: Mapping[SSAValue, SSAValue]
    in_place: bool = False


def _sharing(ops: Iterable[Operation], mesh: Mesh) -> dict[Operation, Sharing]:
    """Return the sharing of each op that has any, in program order."""
    sharing = dict[Operation, Sharing]()
    for op in ops:
        if not may_share(type(op)):
            continue
        if places := dict(in_place(op)) if may_write(type(op)) else {}:
            sharing[op] = Sharing(places, True)
            continue
        pairs = dict(shared(op, mesh))
        if len(op.results) > 1 and isinstance(op, dist.FusibleOp) and op.record.reduces:
            pairs = {v: op.outs[0] for v in op.outs[1:]} | pairs  # parts of one buffer
        if pairs:
            sharing[op] = Sharing(pairs)
    return sharing


def _storages(
    f: FuncOp, ops: Sequence[Operation], sharing: Mapping[Operation, Sharing]
) -> Storages:
    """Return the storages of the values of a function."""
    storages = Storages(f.body.block.args, ops)
    freed, donated = frees(f), donated_arguments(f)
    for v, total in added_in_place(ops).items():
        storages.join(v, total.out)
    for op, (pairs, is_in_place) in sharing.items():
        if is_in_place:
            own = () if isinstance(op, dist.AllReduceOp) else donated
            pairs = {v: x for v, x in pairs.items() if freed and storages.is_free(x, op, own)}
        for v, other in pairs.items():
            storages.join(v, other)
    return storages


def _parts(f: FuncOp, ops: Sequence[Operation]) -> dict[SSAValue, str]:
    """Return the purpose of each value that is not temporary."""
    args = zip(f.body.block.args, train.arguments(f), strict=True)
    parts: dict[SSAValue, str] = {v: f"{argument.role}s" for v, argument in args}
    for op in ops:
        if isinstance(op, train.BackwardOp):
            break
        parts |= dict.fromkeys(op.results, "activations")
    for v in gradients(ops):
        parts.setdefault(v, "gradients")
    for op in ops:
        if isinstance(op, train.Update):
            parts |= dict.fromkeys(op.results[:1], "parameters")
            parts |= dict.fromkeys(op.results[1:], "states")
    return parts


def gradients(ops: Iterable[Operation]) -> set[SSAValue]:
    """Return the gradients that updates read, and the values from which redistributions,
    collectives and elementwise ops compute them."""
    reached = set[SSAValue]()
    todo = [op.operands[1] for op in ops if isinstance(op, train.Update)]
    while todo:
        v = todo.pop()
        if v in reached:
            continue
        reached.add(v)
        op = v.owner
        if isinstance(op, dist.CollectiveOp | dist.WaitOp):
            assert isinstance(v, OpResult)
            todo.append(op.values[v.index])
        elif isinstance(op, dist.RedistributeOp):
            todo.append(op.value)
        elif isinstance(op, Elementwise) and not isinstance(op, train.Update):
            todo += [x for x in op.operands if _shape(x) == _shape(v)]
    return reached


def _shape(v: SSAValue) -> tuple[int, ...]:
    assert isinstance(v.type, TensorType)
    return v.type.get_shape()
