"""The split of a step, whose ops have stages, into functions of the stages (split-stages)."""

from collections.abc import Sequence
from itertools import count

from xdsl.dialects.builtin import FunctionType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.algebra.schedules import Schedule
from shardir.analysis.aliasing import shared
from shardir.analysis.functions import name_of, named
from shardir.diagnostics import Failure, Located, coded
from shardir.dialects import train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.types import size_of
from shardir.dialects.train import stage_attrs, stage_of
from shardir.rewriting.backward_parts import ops_of_weights
from shardir.rewriting.stages import (
    assign_unmarked,
    clone_into_readers,
    first_stage,
    last_stage,
    stage_of_largest,
)
from shardir.rewriting.step_body import StageOps, StageTransfers, StepBody

PARTS = ("begin", "forward", "backward", "update")
"""The parts of a step: before the loop over microbatches, the forward and the backward part in it,
and after it."""

STARTS: dict[type[Operation], str] = {
    train.MicrobatchesOp: "forward", train.BackwardOp: "backward",
    train.EndMicrobatchesOp: "update",
}  # fmt: skip
"""The ops at which the parts after the first start. A forward part alone has no backward part."""

CHOICES = {
    "begin": stage_of_largest,
    "forward": last_stage,
    "backward": first_stage,
    "update": stage_of_largest,
}
"""How an op that a pass has added gets its stage, in each part."""

ACTIONS = {
    "forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W",
}  # fmt: skip
"""The actions of schedules that run the parts in the loop. The backward part of a stage is one
function, or two, or both: one for some microbatches, two for the remaining ones."""

ORDER = {part: at for at, parts in enumerate((
    ("begin",), ("forward",), ("backward", "backward_input"), ("backward_weight",), ("update",),
)) for part in parts}  # fmt: skip
"""The order in which the parts are written."""

BETWEEN = (
    train.MicrobatchOp, train.OfMicrobatches, train.CarriedOp, train.CarryOp, train.Mark, ReturnOp,
)  # fmt: skip
"""Ops that stay in the step."""


class StagedStep:
    """The split of a step, whose ops keep their order in the functions."""

    def __init__(self, f: FuncOp, order: Schedule, mesh: Mesh | None):
        self.f, self.block, self.order, self.mesh = f, f.body.block, order, mesh
        self.functions: list[FuncOp] = []
        self.parts: dict[Operation, str] = {}
        self.levels: dict[Operation, int] = {}
        self.copies: dict[SSAValue, SSAValue] = {}
        """For each result of a copied op the original's result: the copies are the backward part as
        one function, the originals as two."""

    def split(self) -> None:
        """Replace the ops by calls.

        Raises:
            Failure: a value passes to an earlier stage in the forward part, or to a later stage in
                the backward part.
        """
        self._find_parts()
        self._assign_stages()
        self._check_order()
        self._split_backward()
        groups = self._group_ops()
        transfers = self._find_transfers(groups)
        for group in groups:
            self._find_inputs_and_outputs(group)
        for group in groups:
            group.function = self._outline(group)
        self._rebuild(groups, transfers)

    def _find_parts(self) -> None:
        part = PARTS[0]
        for op in self.block.ops:
            self.parts[op] = part = STARTS.get(type(op), part)

    def _ops_of_part(self, part: str) -> list[Operation]:
        """Return the ops of a part that move into functions."""
        return [o for o, p in self.parts.items() if p == part and not isinstance(o, BETWEEN)]

    def _assign_stages(self) -> None:
        """Give all ops a stage."""
        added = {op for op in self.parts if stage_of(op) is None}
        for part in PARTS:
            assign_unmarked(self._ops_of_part(part), self._stage_of_value, CHOICES[part])
        for part in PARTS:
            self._move_to_readers([op for op in self._ops_of_part(part) if op in added])
        for part in reversed(PARTS):
            before = set(self.block.ops)
            clone_into_readers(self._ops_of_part(part))
            for op in set(self.block.ops) - before:
                self.parts[op] = part
        at = {op: i for i, op in enumerate(self.block.ops)}
        self.parts = dict(sorted(self.parts.items(), key=lambda item: at[item[0]]))

    def _move_to_readers(self, ops: Sequence[Operation]) -> None:
        """Move ops whose results are larger than their operands, such as an all-gather, to the
        stage that reads them, if there is one such stage: less is transferred."""
        for op in reversed(ops):
            readers = {
                None if isinstance(use.operation, BETWEEN) else stage_of(use.operation)
                for v in op.results for use in v.uses
            }  # fmt: skip
            grows = sum(map(size_of, op.results)) > sum(map(size_of, op.operands))
            if grows and len(readers) == 1 and None not in readers:
                op.attributes |= stage_attrs(readers.pop())

    def _stage_of_value(self, v: SSAValue) -> int | None:
        """Return the stage that makes a value; None for a value made wherever it is read."""
        op = v.owner
        if isinstance(op, train.OfMicrobatches | train.CarryOp):
            return self._stage_of_value(op.operands[0])
        if not isinstance(op, Operation) or isinstance(op, BETWEEN):
            return None
        return stage_of(op)

    def _split_backward(self) -> None:
        """Split the backward part of stages with actions I and W into ops of I and of W. If further
        microbatches have B, copies of all ops are B."""
        storages = self._loop_storages()
        kinds = {(a.stage, a.kind) for order in self.order.orders for a in order}
        for stage in (stage for stage, kind in sorted(kinds) if kind == "I"):
            ops = [op for op in self._ops_of_part("backward") if stage_of(op) == stage]
            own = {*ops}
            awaited = [
                v for op in ops for v in op.results for use in v.uses
                if use.operation not in own and not isinstance(use.operation, train.OfMicrobatches)
            ]  # fmt: skip
            weight_ops = {*ops_of_weights(ops, awaited, storages)}
            self.parts |= {
                op: f"backward_{'weight' if op in weight_ops else 'input'}" for op in ops
            }
            if (stage, "B") in kinds and 0 < len(weight_ops) < len(ops):
                self._copy_backward(ops)

    def _copy_backward(self, ops: Sequence[Operation]) -> None:
        """Copy the backward part of a stage before it."""
        copies: dict[SSAValue, SSAValue] = {}
        for op in ops:
            new = op.clone(copies)
            self.block.insert_op_before(new, ops[0])
            self.parts[new] = "backward"
        self.copies |= {copy: v for v, copy in copies.items()}

    def _loop_storages(self) -> dict[SSAValue, SSAValue]:
        """Return the storage of each value that ops in the loop make."""
        storages: dict[SSAValue, SSAValue] = {}
        for op in (op for op, part in self.parts.items() if part in ACTIONS):
            views = dict(shared(op, self.mesh))
            for v in op.results:
                if v not in views:
                    storages[v] = v
                elif views[v] in storages:
                    storages[v] = storages[views[v]]
        return storages

    def _group_ops(self) -> list[StageOps]:
        """Return the ops of each stage in each part, in an order in which the groups can run."""
        groups: dict[tuple[int, int, int, str], StageOps] = {}
        for op, part in self.parts.items():
            if isinstance(op, BETWEEN):
                continue
            stage, level = stage_of(op), self._level_of(op)
            assert stage is not None
            order = -stage if part.startswith("backward") else stage
            key = ORDER[part], level, order, part
            groups.setdefault(key, StageOps(part, stage, level)).ops.append(op)
        return [groups[key] for key in sorted(groups)]

    def _level_of(self, op: Operation) -> int:
        """Return how often a value has passed between stages before the op, in its part; 0 in the
        loop."""
        part = self.parts[op]
        if part in ACTIONS:
            return 0
        levels = [0]
        for v in op.operands:
            maker = v.owner
            if isinstance(maker, Operation) and maker in self.levels and self.parts[maker] == part:
                levels.append(self.levels[maker] + (stage_of(maker) != stage_of(op)))
        self.levels[op] = max(levels)
        return self.levels[op]

    def _check_order(self) -> None:
        """Check the direction in which values pass between stages.

        Raises:
            Failure: a value passes to an earlier stage in the forward part, or to a later one in
                the backward part; or no stage makes a result.
        """
        errors: list[Located] = []
        for v, i in self._updated_results():
            if i is None and self._stage_of_value(v) is None:
                message = f"expected an op of a stage that makes the result {named(v)}, got none"
                errors.append((self.f, coded("G14", message, use="return what an op makes of it")))
        for op, part in self.parts.items():
            stage = stage_of(op)
            if part not in ("forward", "backward") or stage is None or isinstance(op, BETWEEN):
                continue
            for v in op.operands:
                source = self._stage_of_value(v)
                maker = v.owner
                if source is None or not isinstance(maker, Operation) or self.parts[maker] != part:
                    continue
                if source > stage if part == "forward" else source < stage:
                    side = "before" if part == "forward" else "after"
                    message = f"expected {named(v)} to be of a stage {side} {stage}, got {source}"
                    errors.append((op, coded("G14", message)))
        if errors:
            raise Failure(errors)

    def _find_transfers(self, groups: Sequence[StageOps]) -> StageTransfers:
        """Return the transfers of values to stages that read and do not make them."""
        arguments: dict[SSAValue, set[int]] = {}
        targets_of: dict[SSAValue, set[int]] = {}
        for group in groups:
            for v in (v for op in group.ops for v in op.operands):
                source = self._stage_of_value(v)
                if source is not None and source != group.stage:
                    targets_of.setdefault(v, set()).add(group.stage)
                elif isinstance(v, BlockArgument):
                    arguments.setdefault(v, set()).add(group.stage)
        for op in self.block.ops:
            if isinstance(op, train.CarryOp) and (source := self._stage_of_value(op.x)) is not None:
                for use in op.carried.uses:
                    if (stage := stage_of(use.operation)) not in (None, source):
                        targets_of.setdefault(op.x, set()).add(stage or 0)
        for v, i in self._updated_results():
            if i is not None and (source := self._stage_of_value(v)) is not None:
                readers = arguments.get(self.block.args[i], set()) - {source}
                if readers:
                    targets_of.setdefault(v, set()).update(readers)
        return {
            v: (self._stage_of_value(v) or 0, sorted(target_stages))
            for v, target_stages in targets_of.items()
        }

    def _updated_results(self) -> list[tuple[SSAValue, int | None]]:
        """Return each result, with the index of the argument that it replaces, or None."""
        last = self.block.last_op
        assert isinstance(last, ReturnOp)
        return list(zip(last.operands, train.updated_arguments(self.f), strict=True))

    def _find_inputs_and_outputs(self, group: StageOps) -> None:
        own = set(group.ops)
        results = dict.fromkeys(v for op in group.ops for v in op.results)
        read = (v for op in group.ops for v in op.operands)
        group.inputs = list(dict.fromkeys(v for v in read if v not in results))
        copied = {self.copies[v].owner for v in results if v in self.copies}
        group.outputs = [
            v for v in results if any(
                use.operation not in own and use.operation not in copied
                for use in self.copies.get(v, v).uses
            )
        ]  # fmt: skip

    def _outline(self, group: StageOps) -> FuncOp:
        """Move the ops of a group to a new function."""
        block = Block(arg_types=[v.type for v in group.inputs])
        within: dict[SSAValue, SSAValue] = dict(zip(group.inputs, block.args, strict=True))
        for v, arg in within.items():
            arg.name_hint = v.name_hint
        first = next((op for op in group.ops if isinstance(op, train.Update)), None)
        for op in group.ops:
            op.detach()
            op.operands = [within.get(v, v) for v in op.operands]
            if op is first:
                block.add_op(train.UpdateOp.create(location=op.location))
            block.add_op(op)
        block.add_op(ReturnOp(*group.outputs))
        types = [v.type for v in group.inputs], [v.type for v in group.outputs]
        f = FuncOp(
            self._function_name(group), FunctionType.from_lists(*types), Region(block),
            visibility="private",
        )  # fmt: skip
        f.location = group.ops[0].location
        f.attributes |= stage_attrs(group.stage) | train.action_attrs(ACTIONS.get(group.part))
        self._mark_donated(f, group)
        self.functions.append(f)
        return f

    def _function_name(self, group: StageOps) -> str:
        is_end = group.part == "update" and not train.is_step(self.f)
        base = f"{name_of(self.f)}_{'end' if is_end else group.part}_{group.stage}"
        taken = {name_of(f) for f in self.functions}
        names = (f"{base}_{n}" if n else base for n in count())
        return next(name for name in names if name not in taken)

    def _mark_donated(self, f: FuncOp, group: StageOps) -> None:
        """Mark the arguments that a function replaces, so that it may write to their memory."""
        attributes, roles = train.arg_attrs(self.f), train.arguments(self.f)
        input_attributes: list[dict[str, Attribute]] = [{} for _ in group.inputs]
        output_attributes: list[dict[str, Attribute]] = [{} for _ in group.outputs]
        for v, i in self._updated_results():
            if i is None or v not in group.outputs or self.block.args[i] not in group.inputs:
                continue
            role, key = roles[i].role.attribute, roles[i].key
            assert key is not None
            input_attributes[group.inputs.index(self.block.args[i])] = {role: attributes[i][role]}
            output_attributes[group.outputs.index(v)] = train.updates_attrs(key)
        if any(input_attributes):
            train.set_arg_attrs(f, input_attributes)
            train.set_result_attrs(f, output_attributes)

    def _rebuild(self, groups: Sequence[StageOps], transfers: StageTransfers) -> None:
        """Write the calls and the transfers between the ops that stay."""
        staying = ops_of(self.block)
        for op in staying:
            op.detach()
        body = StepBody(self.block, transfers, self.copies)
        before: dict[type[Operation], int] = {
            mark: ORDER[part] for mark, part in (
                (train.MicrobatchesOp, "begin"), (train.BackwardOp, "forward"),
                (train.EndMicrobatchesOp, "backward_weight"), (ReturnOp, "update"),
            )
        }  # fmt: skip
        remaining = list(groups)
        after_loop = [op for op in staying if isinstance(op, train.OfMicrobatches | train.CarryOp)]
        for op in staying:
            if op in after_loop or isinstance(op, train.UpdateOp):
                continue
            while type(op) in before and remaining and ORDER[remaining[0].part] <= before[type(op)]:
                body.call(remaining.pop(0))
            if isinstance(op, train.EndMicrobatchesOp):
                for sum_or_state in after_loop:
                    body.add(sum_or_state)
            body.add(op)
            if isinstance(op, train.EndMicrobatchesOp):
                for sum_or_state in after_loop:
                    body.transfer(sum_or_state.results[0])
