"""Pins: the redistributions that a program has before the search, such as those of a plan's `uses`.

    %w_1 = dist.redistribute %w {recompute} : [{d}, {}] -> [{}, {}]
    %y = nn.matmul %x, %w_1

Both layouts are annotated, so the op stays, and its time is a constant. The search decides on what
is around it: an op that needs %w_1 in another layout gets a redistribution of its own.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.loops import Loops
from shardir.analysis.storages import Span
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import RedistributeOp
from shardir.dialects.train import BackwardOp
from shardir.rewriting.marks import RECOMPUTE, RepeatedRedistributions
from shardir.search.graph.latency_shares import LatencyShares
from shardir.search.graph.transfer_costs import ValueTransfer, transfer_of, transfer_seconds


@dataclass(frozen=True)
class Pin:
    """A redistribution that the program has.

    Attributes:
        runs: how often it is made in a step; its repetitions for the backward part count too.
        again: the index of the first op for which it is repeated.
        unsaved: the ops at which its result is not live for that reason.
    """

    transfer: ValueTransfer
    runs: int
    again: int | None = None
    unsaved: Span | None = None

    def seconds(self, mesh: Mesh, shares: LatencyShares | None = None) -> float:
        """Return its estimated time in a step, in seconds; with `shares`, in buckets."""
        t, source, target = self.transfer
        return self.runs * float(transfer_seconds(mesh, t, [source], [target], shares)[0, 0])


def pins(block: Block, mesh: Mesh, gathers_again: bool = False) -> dict[RedistributeOp, Pin]:
    """Return the pins of a block, in their order. `gathers_again`: the plan repeats gathers for the
    backward part, since memory is limited."""
    ops, f = ops_of(block), block.parent_op()
    found = [op for op in ops if isinstance(op, RedistributeOp)]
    if not found:
        return {}
    assert isinstance(f, FuncOp)
    loops, repeats = Loops(ops), RepeatedRedistributions(f, mesh)
    at = {op: i for i, op in enumerate(ops)}
    needs = _first_needs(ops, {op for op in found if repeats(op, gathers_again)})

    def pin(op: RedistributeOp) -> Pin:
        transfer, runs, again = transfer_of(op), loops.runs(op), needs.get(op)
        if again is None:
            return Pin(transfer, runs)
        uses = [i for use in op.out.uses if (i := at[use.operation]) < again]
        unsaved = Span(max(uses, default=at[op]) + 1, again - 1)
        return Pin(transfer, runs + loops.runs(ops[again]), again, unsaved)

    return {op: pin(op) for op in found}


def _first_needs(ops: Sequence[Operation], repeated: Collection[Operation]) -> dict[Operation, int]:
    """Return the ops that `recompute` repeats, marked ones and those of `repeated`, each with the
    index of the first op after its forward part that needs the repetition."""
    found: dict[Operation, int] = {}
    borders = [i for i, op in enumerate(ops) if isinstance(op, BackwardOp)]
    for begin, border in zip([0, *borders], borders, strict=False):
        marked = {op for op in ops[begin:border] if RECOMPUTE in op.attributes or op in repeated}

        def need(v: SSAValue, i: int, marked: Collection[Operation] = marked) -> None:
            op = v.owner
            if isinstance(op, Operation) and op in marked and op not in found:
                found[op] = i
                for operand in op.operands:
                    need(operand, i, marked)

        for i, op in enumerate(ops[border + 1 :], border + 1):
            for v in op.operands:
                need(v, i)
    return found
