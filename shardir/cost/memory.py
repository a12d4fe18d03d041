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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from xdsl.dialects.builtin import TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.cost.seconds import buffers, size_of
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.elementwise import Elementwise
from shardir.dialects.views import live_ops, views, waits

PARTS = ("parameters", "states", "inputs", "gradients", "activations", "temporaries")
"""What memory is for. Activations are made before the backward part, temporaries in it or behind;
what leads from there to an update's gradient is a gradient."""

FRESH = (
    nn.FoldOp,
    dist.ReplicatedToPartialOp,
    dist.BroadcastFromRootOp,
    dist.PermuteOp,
    dist.HaloUnfoldOp,
)
"""Ops that may give their operand, but make a storage where they do something."""

FLAT = (dist.AllReduceOp, dist.ReduceScatterOp)
"""Collectives whose results, of several values, are parts of one buffer."""

STRIDED = (nn.TransposeOp, nn.BroadcastOp, nn.SliceOp, nn.SplitOp, nn.UnfoldOp, dist.AllSliceOp)
"""Views that need not be contiguous."""


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
    """What a function in the local view needs of a device's memory."""
    ops = live_ops(list(f.body.block.ops))
    lives = _Lives(f, ops, mesh)
    born: dict[int, list[SSAValue]] = {}
    died: dict[int, list[SSAValue]] = {}
    for root, (start, end) in lives.spans.items():
        born.setdefault(start, []).append(root)
        died.setdefault(end, []).append(root)
    held = _held(ops, mesh)
    now, most, at = sum(lives.bytes[v] for v in born.get(-1, ())), 0, 0
    for i in range(len(ops)):
        now += sum(lives.bytes[v] for v in born.get(i, ()))
        if (needed := now + held[i]) > most:
            most, at = needed, i
        now -= sum(lives.bytes[v] for v in died.get(i, ()))
    parts = _parts(f, ops)
    alive = (
        Storage(v, lives.bytes[v], parts.get(v, "temporaries"))
        for v, (start, end) in lives.spans.items() if start <= at <= end
    )  # fmt: skip
    largest = tuple(sorted(alive, key=lambda s: -s.bytes))
    return MemoryUse(most, ops[at], largest, held[at])


def _held(ops: list[Operation], mesh: Mesh) -> list[int]:
    """The bytes of buffers at each op: its own, and those of collectives under way."""
    found, ends = [0] * len(ops), waits(ops)
    for i, op in enumerate(ops):
        if size := buffers(op, mesh):
            for k in range(i, ends.get(op, i) + 1):
                found[k] += size
    return found


class _Lives:
    """Of each storage, by its first value: its bytes, and the first and last op at which it lives;
    arguments from -1."""

    def __init__(self, f: FuncOp, ops: list[Operation], mesh: Mesh):
        self.roots: dict[SSAValue, SSAValue] = {}
        self.spans: dict[SSAValue, tuple[int, int]] = {}
        self.bytes: dict[SSAValue, int] = {}
        self.read: dict[SSAValue, int] = {}
        self.is_step = "train.step" in f.attributes
        self.end = len(ops)
        self.last = {v: i for i, op in enumerate(ops) for v in op.operands}
        self.waits = waits(ops)
        self.sent: dict[SSAValue, list[tuple[int, int]]] = {}  # when the first of them is under way
        self.strided: set[SSAValue] = set()
        roles = train.arg_attrs(f)
        self.kept = {
            a for a, attrs in zip(f.body.block.args, roles, strict=True)
            if "train.parameter" in attrs or "train.state" in attrs
        }  # fmt: skip
        for a in f.body.block.args:
            self.make(a, -1, self.end)
        for i, op in enumerate(ops):
            self.add(i, op, mesh)

    def make(self, v: SSAValue, start: int, end: int) -> None:
        self.roots[v], self.spans[v], self.bytes[v] = v, (start, end), size_of(v)
        self.read[v] = self.last.get(v, -1)

    def add(self, i: int, op: Operation, mesh: Mesh) -> None:
        if isinstance(op, train.Mark | ReturnOp):
            return
        shared = self.shared(i, op, mesh)
        if op in self.waits:
            for v in op.operands:
                self.keep(v, i, self.waits[op])
        for v in op.results:
            last = self.last.get(v, i) if self.is_step else self.end
            if v in shared:
                self.join(v, shared[v], last)
            elif isinstance(op, FLAT) and v is not op.outs[0]:
                self.join(v, op.outs[0], last)
                self.bytes[op.outs[0]] += size_of(v)
            else:
                self.make(v, i, last)

    def keep(self, v: SSAValue, start: int, end: int) -> None:
        """A collective reads `v` from op `start` to op `end`."""
        root = self.roots[v]
        self.spans[root] = self.spans[root][0], max(self.spans[root][1], end)
        self.sent.setdefault(root, []).append((start, end))

    def join(self, v: SSAValue, other: SSAValue, last: int) -> None:
        root = self.roots[v] = self.roots[other]
        start, end = self.spans[root]
        self.spans[root] = start, max(end, last)
        self.read[root] = max(self.read[root], self.last.get(v, -1))

    def shared(self, i: int, op: Operation, mesh: Mesh) -> Mapping[SSAValue, SSAValue]:
        """The results that lie in the storage of an operand, with that."""
        if isinstance(op, train.Update):
            n = len(op.operands) - len(op.SCALARS)
            olds = (op.operands[0], *op.operands[2:n])
            return {v: old for v, old in zip(op.results, olds, strict=True) if self.free(i, old)}
        if isinstance(op, dist.AllReduceOp) and len(op.values) == 1:
            value = op.values[0]
            mine = not isinstance(self.roots[value], BlockArgument)
            return {op.outs[0]: value} if mine and self.free(i, value) else {}
        found = dict(views(op, mesh))
        if isinstance(op, FRESH) and _works(op, mesh):
            return {}
        if isinstance(op, nn.ReshapeOp) and op.operands[0] in self.strided:
            return {}
        if isinstance(op, nn.BroadcastOp) and isinstance(op.x.owner, nn.ConstantOp):
            return {}
        for result, operand in found.items():
            if isinstance(op, STRIDED) or operand in self.strided:
                self.strided.add(result)
        return found

    def free(self, i: int, v: SSAValue) -> bool:
        """Whether op i may write into the storage of `v`."""
        root = self.roots[v]
        if isinstance(root, BlockArgument) and root not in self.kept:
            return False
        under_way = any(start < i < end for start, end in self.sent.get(root, ()))
        return self.is_step and self.read[root] <= i and not under_way


def _works(op: Operation, mesh: Mesh) -> bool:
    """Whether one of FRESH does something: it is no collective of groups of one device."""
    return not isinstance(op, dist.Collective) or mesh.extent(op.axes.data) > 1


def _parts(f: FuncOp, ops: list[Operation]) -> dict[SSAValue, str]:
    """What the values are for; temporaries are left out."""
    found: dict[SSAValue, str] = {}
    for a, attrs in zip(f.body.block.args, train.arg_attrs(f), strict=True):
        role = {"train.parameter": "parameters", "train.state": "states"}
        found[a] = next((role[n] for n in attrs if n in role), "inputs")
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
        if isinstance(op, dist.Collective | dist.WaitOp):
            todo += [x for x, out in zip(op.values, op.outs, strict=True) if out is v]
        elif isinstance(op, dist.RedistributeOp):
            todo.append(op.value)
        elif isinstance(op, Elementwise) and not isinstance(op, train.Update):
            todo += [x for x in op.operands if _shape(x) == _shape(v)]


def _shape(v: SSAValue) -> tuple[int, ...]:
    assert isinstance(v.type, TensorType)
    return v.type.get_shape()
