"""recompute: compute marked ops again in the backward part instead of saving their results.

    %h = nn.gelu %x {recompute} : ...            %h   = nn.gelu %x : ...
    train.backward                               train.backward
    %d = nn.mul %g, %h : ...                 ->  %h_0 = nn.gelu %x {recompute} : ...
                                                 %d   = nn.mul %g, %h_0 : ...

1. The results of a marked op are not used after the next `train.backward`.
2. A repeated op uses repetitions of other marked ops; values of unmarked ops are saved.
3. A collective is repeated only if it is marked itself. A repetition keeps the mark, so that
   simplify-communication does not merge it with the first run, and costs are reported.
4. A repetition is placed right before its first use.
5. An `async` collective and the `dist.wait` for it are repeated together, whichever is marked, if
   both are before the same `train.backward`; otherwise neither is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from xdsl.dialects.builtin import UnitAttr
from xdsl.ir import Block, Operation

from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import AsyncOp, is_started
from shardir.dialects.train import BackwardOp
from shardir.rewriting.bases import Function, FunctionPass
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.repeating import repeat


@dataclass(frozen=True)
class Recompute(FunctionPass):
    """Computes marked activations again in the backward part."""

    name = "recompute"

    def rewrite(self, f: Function) -> None:
        _repeat_marked(f.block)


def _repeat_marked(block: Block) -> None:
    """Repeat the marked ops of each forward part, which the next `train.backward` ends."""
    ops = ops_of(block)
    starts = [i for i, op in enumerate(ops) if isinstance(op, BackwardOp)]
    for begin, start in zip([0, *starts], starts, strict=False):
        forward = ops[begin:start]
        _mark_together(forward)
        repeat(block, {op for op in forward if RECOMPUTE in op.attributes}, ops[start + 1 :])


def _mark_together(ops: Sequence[Operation]) -> None:
    """Mark both a started collective and its wait, where both are among the ops and one is
    marked; otherwise neither."""
    forward = set(ops)
    for started in filter(is_started, of_kind(ops, AsyncOp)):
        pair = {started, *(use.operation for use in started.results[0].uses)}
        marked = pair <= forward and any(RECOMPUTE in op.attributes for op in pair)
        for op in pair:
            op.attributes.pop(RECOMPUTE, None)
            if marked:
                op.attributes[RECOMPUTE] = UnitAttr()
