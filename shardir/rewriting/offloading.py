"""Values of a step in the local view that are moved to host memory: activations between the forward
and the backward part, and states with their update.

%h = nn.gelu %x                    %h   = nn.gelu %x
%y = nn.matmul %h, %w              %y   = nn.matmul %h, %w
train.backward                ->   %h_1 = dist.copy %h
%d = nn.mul %g, %h                 train.backward
                                   %h_2 = dist.copy %h_1
                                   %d   = nn.mul %g, %h_2
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from xdsl.dialects.builtin import FunctionType, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Operation, OpResult, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.analysis.storages import live_ops
from shardir.compat.xdsl import set_type
from shardir.dialects import dist, train
from shardir.dialects.blocks import ops_of
from shardir.dialects.nn.base import TensorOp
from shardir.rewriting.repeating import Load, repeat
from shardir.rewriting.rewriter import Rewriter, is_of_scalars


class HostedValue(NamedTuple):
    """An activation that is in host memory until the backward part.

    Attributes:
        made: the op that makes its storage.
        read: the last op of the forward part that reads it.
    """

    value: OpResult
    made: Operation
    read: Operation

    def on(self, ops: Mapping[Operation, Operation]) -> "HostedValue":
        """Return the hosted value in a copy of its function, given the copy of each op."""
        value = ops[self.value.op].results[self.value.index]
        return HostedValue(value, ops[self.made], ops[self.read])


@dataclass(frozen=True)
class SavedValues:
    """The values that a step repeats or keeps in host memory, instead of device memory.

    Attributes:
        repeated: the ops repeated in the backward part.
        hosted: the activations in host memory.
        updates: the updates whose states are in host memory.
    """

    repeated: tuple[Operation, ...] = ()
    hosted: tuple[HostedValue, ...] = ()
    updates: tuple[Operation, ...] = ()

    def on(self, ops: Mapping[Operation, Operation]) -> "SavedValues":
        """Return the saved values in a copy of their function, given the copy of each op."""
        return SavedValues(
            tuple(ops[op] for op in self.repeated),
            tuple(value.on(ops) for value in self.hosted),
            tuple(ops[op] for op in self.updates),
        )


def save(f: FuncOp, saved: SavedValues, mesh: Mesh) -> None:
    """Repeat ops of the last forward part of a function in its backward part, and keep values in
    host memory."""
    ops = ops_of(f.body.block)
    start = max(i for i, op in enumerate(ops) if isinstance(op, train.BackwardOp))
    after = set(ops[start + 1 :])
    live = [op for op in live_ops(ops) if op in after]
    repeat(f.body.block, set(saved.repeated), live, store(saved.hosted, mesh))
    if saved.updates:
        host_states(f, saved.updates, mesh)


def other_memory(v: SSAValue, mesh: Mesh) -> Attribute:
    """Return the type of a local value after a copy between device and host memory."""
    layout = dist.layout_of(v)
    assert layout is not None and isinstance(v.type, TensorType)
    moved = layout.on_device if layout.host else layout.on_host
    return dist.local(v.type.element_type, dist.global_shape(v.type, mesh), moved, mesh)


def copy_of(v: SSAValue, mesh: Mesh) -> dist.CopyOp:
    """Return a detached copy of a value between device and host memory."""
    location = v.owner.location if isinstance(v.owner, Operation) else None
    op = dist.CopyOp.create(operands=[v], result_types=[other_memory(v, mesh)], location=location)
    op.results[0].name_hint = v.name_hint
    return op


def store(values: Iterable[HostedValue], mesh: Mesh) -> dict[SSAValue, Load]:
    """Copy values to the host after their last reads of the forward part. Return the copies to the
    device for the backward part, detached."""
    loads = dict[SSAValue, Load]()
    last = dict[Operation, Operation]()
    for value, made, read in values:
        out = copy_of(value, mesh)
        block = read.parent
        assert block is not None
        block.insert_op_after(out, last.get(read, read))
        last[read] = out
        loads[value] = Load(copy_of(out.outs[0], mesh), made)
    return loads


def host_states(f: FuncOp, updates: Iterable[Operation], mesh: Mesh) -> None:
    """Put the states of updates on the host, which computes the updates.

    Parameters and gradients are copied to the host, and new parameters back. The host computes
    scalars of states itself, as in `Rewriter.redistribution`: for the bias corrections of two
    moments only the count of steps is copied.
    """
    scalars = dict[SSAValue, SSAValue]()
    for op in updates:
        assert isinstance(op, train.Update)
        number = len(op.operands) - len(op.SCALARS)
        for v in op.operands[2:number]:
            set_type(v, other_memory(v, mesh))
        copies = [_copy_to_host(v, op, mesh) for v in op.operands[:2]]
        scalar_copies = [_scalar_on_host(v, op, mesh, scalars) for v in op.operands[number:]]
        op.operands = [*copies, *op.operands[2:number], *scalar_copies]
        for v in op.results:
            set_type(v, other_memory(v, mesh))
        new = op.results[0]
        back = copy_of(new, mesh)
        Rewriter().after(op).insert(back)
        for use in [use for use in new.uses if use.operation is not back]:
            use.operation.operands[use.index] = back.outs[0]
    returned = f.body.block.last_op
    assert returned is not None
    f.function_type = FunctionType.from_lists(
        [v.type for v in f.body.block.args], [v.type for v in returned.operands]
    )


def _copy_to_host(v: SSAValue, user: Operation, mesh: Mesh) -> SSAValue:
    """Insert a copy of a value to host memory before an op, and return its result."""
    new = copy_of(v, mesh)
    Rewriter().before(user).insert(new)
    return new.outs[0]


def _scalar_on_host(
    v: SSAValue, user: Operation, mesh: Mesh, cache: dict[SSAValue, SSAValue]
) -> SSAValue:  # fmt: skip
    """Return a scalar in host memory for an op, computed there or copied; `cache` has earlier
    ones."""
    if v not in cache:
        if isinstance(op := v.owner, TensorOp) and is_of_scalars(v):
            operands = {o: _scalar_on_host(o, user, mesh, cache) for o in op.operands}
            new = op.clone(value_mapper=operands)
            set_type(new.results[0], other_memory(v, mesh))
            Rewriter().before(user).insert(new)
            cache[v] = new.results[0]
        else:
            cache[v] = _copy_to_host(v, user, mesh)
    return cache[v]
