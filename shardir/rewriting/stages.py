"""The stage of each op, inferred from marked ops.

forward     an op runs on the last stage of its operands
backward    on the first stage of its operands
elsewhere   on the stage of the operand with the most elements: a gradient does not follow a scalar
everywhere  without operands of a stage, such as a constant or the gather of a weight, an op is
            cloned into each stage that reads it
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
"""The stage of the op that makes a value; None for a value made on each stage that reads it."""


StageChoice = Callable[[Sequence[tuple[int, int]]], int]
"""Chooses the stage of an op from pairs of an operand's stage and number of elements."""


def last_stage(operands: Sequence[tuple[int, int]]) -> int:
    return max(stage for stage, _ in operands)


def first_stage(operands: Sequence[tuple[int, int]]) -> int:
    return min(stage for stage, _ in operands)


def stage_of_largest(operands: Sequence[tuple[int, int]]) -> int:
    return min(operands, key=lambda pair: (-pair[1], pair[0]))[0]


CHOICES = (stage_of_largest, last_stage, first_stage, stage_of_largest)
"""How an unmarked op gets its stage, in each part of a step."""


def parts_of(ops: Iterable[Operation]) -> tuple[list[Operation], ...]:
    """Return the ops of each part of a step: before the loop over microbatches, the forward part,
    the backward part, and after the loop. Without a loop all ops are in the forward and backward
    parts."""
    ops = [op for op in ops if not isinstance(op, ReturnOp)]
    parts: tuple[list[Operation], ...] = ([], [], [], [])
    at = 0 if any(isinstance(op, train.MicrobatchesOp) for op in ops) else 1
    for op in ops:
        at = PARTS.get(type(op), at)
        parts[at].append(op)
    return parts


def stages_of(ops: Sequence[Operation]) -> dict[Operation, int]:
    """Return the stages of the ops of a step, marked or inferred from their operands; without the
    ops that run on each stage that reads them."""
    stages = {op: stage for op in ops if (stage := stage_of(op)) is not None}
    for part, choose in zip(parts_of(ops), CHOICES, strict=True):
        for op in part:
            operand_stages = [
                (stages[v.owner], prod(unsharded_type(v).get_shape()))
                for v in op.operands if isinstance(v.owner, Operation) and v.owner in stages
            ]  # fmt: skip
            if op not in stages and operand_stages:
                stages[op] = choose(operand_stages)
    return stages


def stage_before(v: SSAValue) -> int | None:
    """Return the stage of the op that makes a value; if it has none, the stage of its first
    operand, recursively."""
    while isinstance(op := v.owner, Operation) and op.operands and stage_of(op) is None:
        v = op.operands[0]
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def assign_unmarked(ops: Iterable[Operation], stage_of_value: StageOf, choose: StageChoice) -> None:
    """Give a stage to the ops that have none, in the order of the program; except ops without an
    operand of a stage."""
    for op in ops:
        if stage_of(op) is None:
            operand_stages = [
                (stage, prod(unsharded_type(v).get_shape()))
                for v in op.operands if (stage := stage_of_value(v)) is not None
            ]  # fmt: skip
            if operand_stages:
                op.attributes |= stage_attrs(choose(operand_stages))


def clone_into_readers(ops: Iterable[Operation]) -> None:
    """Clone each unassigned op into every stage that uses it; an op without users goes to the first
    stage."""
    for op in [op for op in ops if stage_of(op) is None][::-1]:
        readers: dict[int, list[tuple[Operation, int]]] = {}
        for result in op.results:
            for use in result.uses:
                if not isinstance(use.operation, ReturnOp):
                    stage = stage_of(use.operation)
                    readers.setdefault(stage or 0, []).append((use.operation, use.index))
        first, *further = sorted(readers) or [0]
        op.attributes |= stage_attrs(first)
        for stage in further:
            copy = op.clone()
            copy.location = op.location
            copy.attributes |= stage_attrs(stage)
            parent = op.parent
            assert parent is not None
            parent.insert_op_after(copy, op)
            results_of_copy: dict[SSAValue, SSAValue] = dict(
                zip(op.results, copy.results, strict=True)
            )
            for old, new in results_of_copy.items():
                new.name_hint = old.name_hint
            for reader, index in readers[stage]:
                reader.operands[index] = results_of_copy[reader.operands[index]]


def ops_of_model(f: FuncOp) -> Iterator[Operation]:
    """Yield the ops of a function that depend on an input and on a parameter, or on one of these if
    the function lacks the other."""
    roles = [a.role for a in train.arguments(f)]
    needed = {train.Role.INPUT, train.Role.PARAMETER} & {*roles}
    pairs = zip(f.body.block.args, roles, strict=True)
    roles_before: dict[SSAValue, set[train.Role]] = {v: {role} for v, role in pairs}
    for op in f.body.block.ops:
        if isinstance(op, ReturnOp):
            continue
        roles_of_op = {kind for v in op.operands for kind in roles_before.get(v, ())}
        roles_before |= dict.fromkeys(op.results, roles_of_op)
        if needed <= roles_of_op:
            yield op
