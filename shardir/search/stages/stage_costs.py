"""The costs of the ops of a model in a pipeline: the seconds of the forward and the backward part
under the layouts of the mesh, and the bytes that a rank holds.

A copy of the step is lowered as a step of one stage. There each op of the model has a mark, its
number; the ops of its backward part, and those that move its operands, get the same one, as they
would get its stage.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from math import inf
from typing import NamedTuple

from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import PipelineCosts
from shardir.analysis.accumulation import added_in_place
from shardir.analysis.functions import mesh_of, name_of
from shardir.cost.memory import LiveStorages
from shardir.cost.seconds import cost_of
from shardir.diagnostics import Failure
from shardir.dialects import train
from shardir.dialects.nn.types import size_of
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.marks import found_by_search
from shardir.rewriting.stages import CHOICES, assign_unmarked, parts_of
from shardir.search.measure.trial import lowered

LOWERED = "insert-redistributions,distributed-autodiff,recompute,lower-to-spmd"
PROPAGATED = f"propagate-strategies,{LOWERED},simplify-communication"
UNLIMITED = 1 << 62
"""More bytes than a model has: it need not fit on the devices of one stage."""

SEARCHED = (
    "distributed-autodiff,search-strategies{{gap=0.03 memory={memory} overlap=false}},"
    "insert-redistributions,recompute,lower-to-spmd,simplify-communication"
)
"""How a copy is lowered: with layouts that are propagated, or that a short search finds."""

MAX_LIMITS = 4
"""How many limits of the layouts' memory are tried."""

LESS = 0.97
"""The part of the memory that would be enough, if all bytes scaled equally, that is tried."""


class Held(NamedTuple):
    """Bytes that a rank holds whose stage has one of these ops."""

    bytes: int
    readers: frozenset[int]


@dataclass(frozen=True)
class UnitCosts:
    """The costs of ops, by their numbers.

    Attributes:
        seconds: of each op, of its forward and its backward part for one microbatch.
        forward, weight: the parts of it of the forward part, and of what no other op waits for.
        once: the seconds of each op in a step, before and after the loop over the microbatches.
        fixed: what is held throughout: parameters, states, inputs, what is made of them before the
            loop, and the sums of gradients, with what is added to them unless that is a product.
        saved: what is held of each microbatch from its forward part to the end of its backward
            part.
        extra: the bytes of other values while each op runs.
        crossing: the bytes of a microbatch that ops before each op make and others read in the
            forward part; of the ops, and of their end.
        peak: the bytes of the step in one stage.
        slack: the part by which the step may be faster with other layouts, by their search.
    """

    seconds: Sequence[float]
    fixed: Sequence[Held]
    saved: Sequence[Held]
    extra: Sequence[int]
    crossing: Sequence[int]
    forward: Sequence[float] = ()
    weight: Sequence[float] = ()
    once: Sequence[float] = ()
    peak: int = 0
    slack: float = 0.0


def costs_in_memory(
    costs: Callable[[int], UnitCosts], need: Callable[[UnitCosts], float], limit: float
) -> UnitCosts:
    """Return the costs under the fastest layouts with which stages keep to a limit; if none is
    found, those with the smallest need.

    Args:
        costs: searches for layouts with which the step in one stage keeps to some bytes. Raises
            Failure if there are none.
        need: of the stages.
    """
    memory, best, fewest = UNLIMITED, None, inf
    for _ in range(MAX_LIMITS):
        try:
            found = costs(memory)
        except Failure:
            if best is None:
                raise
            break
        if (needed := need(found)) < fewest:
            best, fewest = found, needed
        if needed <= limit:
            break
        memory = int(min(memory, found.peak) * LESS * limit / needed)
    assert best is not None
    return best


def sums_of_stages(each: Sequence[float], cuts: Sequence[int]) -> tuple[float, ...]:
    """Return the sums over the ops of each stage; the stages begin at these ops, and the last
    number is that of all ops."""
    total = [0.0, *accumulate(each)]
    return tuple(total[b] - total[a] for a, b in pairwise(cuts))


def costs_of_stages(
    costs: UnitCosts, mesh: Mesh, cuts: Sequence[int], memory: Sequence[float] = ()
) -> PipelineCosts:
    """Return the costs of stages that begin at these ops, on ranks that the outermost links of a
    mesh connect.

    Args:
        memory: the bytes that each stage holds of a microbatch, if they count.
    """
    seconds, forward, weight = (
        sums_of_stages(each, cuts) for each in (costs.seconds, costs.forward, costs.weight)
    )
    both = zip(seconds, forward, weight, strict=True)
    on = mesh.cluster_or_default
    *_, outermost = on.levels
    latency = on.call + outermost.latency
    moved = tuple(latency + costs.crossing[i] / outermost.bandwidth for i in cuts[1:-1])
    return PipelineCosts(
        forward, tuple(max(0.0, s - f - w) for s, f, w in both), weight, moved,
        tuple(memory) or (0.0,) * len(seconds),
    )  # fmt: skip


def unit_costs(
    module: ModuleOp,
    f: FuncOp,
    step: str,
    ops: Sequence[Operation],
    search: bool,
    memory: int = UNLIMITED,
) -> tuple[UnitCosts, Mesh]:
    """Return the costs of ops of a function, of which a step of this name is made, and the mesh.

    Args:
        search: whether the layouts are those of a search.
        memory: bytes of the step in one stage, for that search.

    Raises:
        Failure: the step can't be lowered.
    """
    at = {op: i for i, op in enumerate(f.body.block.ops)}
    numbers = {at[op]: n for n, op in enumerate(ops)}

    def mark(copy: FuncOp) -> None:
        for i, op in enumerate(copy.body.block.ops):
            if i in numbers:
                op.attributes |= stage_attrs(numbers[i])

    pipeline = SEARCHED.format(memory=memory) if search else PROPAGATED
    functions = lowered(module, f, mark, pipeline)
    g = next(g for g in functions if name_of(g) == step)
    parent = g.parent_op()
    assert isinstance(parent, ModuleOp)
    mesh = mesh_of(g, parent) or Mesh("one", (("d", 1),))
    return _MarkedStep(g, mesh, len(ops)).costs(), mesh


class _MarkedStep:
    """A lowered step whose ops have the numbers of those that they are made of."""

    def __init__(self, g: FuncOp, mesh: Mesh, count: int):
        self.g, self.mesh, self.count = g, mesh, count
        parts = parts_of(g.body.block.ops)
        self.before, self.forward, self.backward, self.after = parts
        for part, choose in zip(parts, CHOICES, strict=True):
            assign_unmarked(part, _mark, choose)
        _number_by_readers(self.before)
        self.live = LiveStorages(g, mesh)
        self.sums = [op for op in self.g.body.block.ops if isinstance(op, train.OfMicrobatches)]
        self.added = {*added_in_place(g.body.block.ops).values()}
        """The sums to which a product adds itself."""
        self.saved = self._read_by(self.backward, {*self.forward})
        self.made = self._read_by((*self.forward, *self.backward), {*self.before})

    def costs(self) -> UnitCosts:
        forward, backward = self._seconds(self.forward), self._seconds(self.backward)
        awaited = self._awaited()
        weight = self._seconds([op for op in self.backward if op not in awaited])
        arguments = self._read_by(self.g.body.block.ops, {self.g.body.block})
        sums = {op: [*self._held({op.out: {_mark(op.x)}})] for op in self.sums}
        addends = [held for op, found in sums.items() if op not in self.added for held in found]
        searched = found_by_search(self.g)
        return UnitCosts(
            [f + b for f, b in zip(forward, backward, strict=True)],
            [*self._held(arguments), *self._held(self.made), *chain(*sums.values()), *addends],
            [*self._held(self.saved)],
            self._extra(), self._crossing(), forward, weight,
            self._seconds((*self.before, *self.after)), max(self.live.needed, default=0),
            1 - searched["bound"] / searched["objective"] if searched.get("objective") else 0.0,
        )  # fmt: skip

    def _seconds(self, ops: Iterable[Operation]) -> list[float]:
        """Return the seconds of some ops, by their numbers."""
        found = [0.0] * self.count
        for op in ops:
            number, cost = stage_of(op), cost_of(op, self.mesh)
            if number is not None and cost is not None:
                found[number] += cost.seconds
        return found

    def _awaited(self) -> set[Operation]:
        """Return the ops of the backward part on which those of earlier numbers depend."""
        found, backward = set[Operation](), {*self.backward}
        for op in reversed(self.backward):
            readers = {use.operation for v in op.results for use in v.uses} & backward
            number = stage_of(op) or 0
            if any(r in found or (stage_of(r) or number) < number for r in readers):
                found.add(op)
        return found

    def _read_by(
        self, ops: Iterable[Operation], makers: Collection[Operation | Block]
    ) -> dict[SSAValue, set[int | None]]:
        """Return the storages that some ops read, by the values that they are made for, of those
        that `makers` make; with the numbers of the readers."""
        found: dict[SSAValue, set[int | None]] = {}
        for op in ops:
            for v in op.operands:
                root = self.live.root(v)
                while isinstance(root.owner, train.MicrobatchOp | train.CarriedOp):
                    root = self.live.root(root.owner.x)
                if root.owner in makers:
                    found.setdefault(root, set()).add(stage_of(op))
        return found

    def _held(self, read: Mapping[SSAValue, set[int | None]]) -> Iterator[Held]:
        for root, numbers in read.items():
            readers = frozenset(n for n in numbers if n is not None)
            if readers:
                yield Held(self.live.sizes.get(root, size_of(root)), readers)

    def _crossing(self) -> list[int]:
        change = [0] * (self.count + 2)
        for root, numbers in self._read_by(self.forward, {*self.forward}).items():
            made, readers = _mark(root), [n for n in numbers if n is not None]
            if made is not None and readers and max(readers) > made:
                change[made + 1] += self.live.sizes.get(root, 0)
                change[max(readers) + 1] -= self.live.sizes.get(root, 0)
        return list(accumulate(change[:-1]))

    def _extra(self) -> list[int]:
        """Return the bytes of values that are neither held throughout nor saved, and of buffers,
        while the ops with each number run. Outside of the loop they are those of one op: what else
        is live there are gradients that are reduced, of other stages too."""
        kept = {*self.g.body.block.args, *(self.live.root(op.out) for op in self.sums)}
        kept |= {*self.saved, *self.made}
        change = [0] * (len(self.live.ops) + 2)
        for v, (start, end) in self.live.spans.items():
            if v not in kept:
                change[max(start, 0)] += self.live.sizes[v]
                change[end + 1] -= self.live.sizes[v]
        found, looped = [0] * self.count, {*self.forward, *self.backward}
        for op, n, held in zip(self.live.ops, accumulate(change), self.live.held, strict=False):
            if (number := stage_of(op)) is not None:
                own = n if op in looped else sum(self.live.sizes.get(v, 0) for v in op.results)
                found[number] = max(found[number], own + held)
        return found


def _mark(v: SSAValue) -> int | None:
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def _number_by_readers(ops: Sequence[Operation]) -> None:
    """Give ops without a number, such as the conversion of a parameter, that of the first op that
    reads their results."""
    for op in reversed(ops):
        found = (stage_of(use.operation) for v in op.results for use in v.uses)
        readers = [n for n in found if n is not None]
        if stage_of(op) is None and readers:
            op.attributes |= stage_attrs(min(readers))
