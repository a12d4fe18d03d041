"""The stage of each op, from those of some.

forward     an op runs on the last stage of its operands
backward    on the first one
elsewhere   on that of the operand with the most elements: a gradient is not moved for a scalar
everywhere  one without operands of a stage, such as a constant or the gather of a weight, runs
            on each stage that reads it: there is a copy for each
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.dialects import train
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import stage_attrs, stage_of

PARTS: dict[type[Operation], int] = {
    train.MicrobatchesOp: 1, train.BackwardOp: 2, train.EndMicrobatchesOp: 3,
}  # fmt: skip
"""The ops at which the parts of a step start after the first one."""

StageOf = Callable[[SSAValue], int | None]
"""The stage of the op that makes a value; None for one that is on each stage that reads it."""


StageChoice = Callable[[Sequence[tuple[int, int]]], int]
"""Chooses the stage of an op from those of its operands, each with its number of elements."""


def last(found: Sequence[tuple[int, int]]) -> int:
    return max(stage for stage, _ in found)


def first(found: Sequence[tuple[int, int]]) -> int:
    return min(stage for stage, _ in found)


def largest(found: Sequence[tuple[int, int]]) -> int:
    return min(found, key=lambda pair: (-pair[1], pair[0]))[0]


CHOICES = (largest, last, first, largest)
"""How an op without a mark gets its stage, in each part of a step."""


def parts_of(ops: Iterable[Operation]) -> tuple[list[Operation], ...]:
    """Return the ops of each part of a step: what is before the loop over microbatches, the forward
    part, the backward part, and what is after the loop. Without a loop all are in the middle."""
    ops = [op for op in ops if not isinstance(op, ReturnOp)]
    found: tuple[list[Operation], ...] = ([], [], [], [])
    at = 0 if any(isinstance(op, train.MicrobatchesOp) for op in ops) else 1
    for op in ops:
        at = PARTS.get(type(op), at)
        found[at].append(op)
    return found


def stages_of(ops: Sequence[Operation]) -> dict[Operation, int]:
    """Return the stages of the ops of a step, marked or inferred from those of their operands;
    without those that are on each stage that reads them."""
    found = {op: stage for op in ops if (stage := stage_of(op)) is not None}
    for part, choose in zip(parts_of(ops), CHOICES, strict=True):
        for op in part:
            known = [
                (found[v.owner], prod(unsharded_type(v).get_shape()))
                for v in op.operands if isinstance(v.owner, Operation) and v.owner in found
            ]  # fmt: skip
            if op not in found and known:
                found[op] = choose(known)
    return found


def stage_before(v: SSAValue) -> int | None:
    """Return the stage of the op that makes a value, or else of what its first operand depends
    on."""
    while isinstance(op := v.owner, Operation) and op.operands and stage_of(op) is None:
        v = op.operands[0]
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def complete(ops: Iterable[Operation], of: StageOf, choose: StageChoice) -> None:
    """Give a stage to the ops that have none, in the order of the program. An op whose operands
    have none stays without."""
    for op in ops:
        if stage_of(op) is None:
            found = [
                (stage, prod(unsharded_type(v).get_shape()))
                for v in op.operands if (stage := of(v)) is not None
            ]  # fmt: skip
            if found:
                op.attributes |= stage_attrs(choose(found))


def copy_to_readers(ops: Iterable[Operation]) -> None:
    """Give the ops that still have no stage those of the ops that read them, each a copy of its
    own. One that nothing reads is on the first stage."""
    for op in [op for op in ops if stage_of(op) is None][::-1]:
        readers: dict[int, list[tuple[Operation, int]]] = {}
        for result in op.results:
            for use in result.uses:
                if not isinstance(use.operation, ReturnOp):
                    stage = stage_of(use.operation)
                    readers.setdefault(stage or 0, []).append((use.operation, use.index))
        one, *others = sorted(readers) or [0]
        op.attributes |= stage_attrs(one)
        for stage in others:
            copy = op.clone()
            copy.location = op.location
            copy.attributes |= stage_attrs(stage)
            parent = op.parent
            assert parent is not None
            parent.insert_op_after(copy, op)
            same: dict[SSAValue, SSAValue] = dict(zip(op.results, copy.results, strict=True))
            for old, new in same.items():
                new.name_hint = old.name_hint
            for reader, index in readers[stage]:
                reader.operands[index] = same[reader.operands[index]]


def ops_of_model(f: FuncOp) -> Iterator[Operation]:
    """Yield the ops of a function that depend on an input and on a parameter, if there is any."""
    roles = [a.role for a in train.arguments(f)]
    needed = {train.Role.INPUT, train.Role.PARAMETER} & {*roles}
    pairs = zip(f.body.block.args, roles, strict=True)
    found: dict[SSAValue, set[train.Role]] = {v: {role} for v, role in pairs}
    for op in f.body.block.ops:
        if isinstance(op, ReturnOp):
            continue
        kinds = {kind for v in op.operands for kind in found.get(v, ())}
        found |= dict.fromkeys(op.results, kinds)
        if needed <= kinds:
            yield op
