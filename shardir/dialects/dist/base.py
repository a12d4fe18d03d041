"""The collectives of the local view: what the devices of a group do together.

    %b = dist.all_gather %a dim 0 over <dp> : (tensor<4x8xf32, #dist.local<@m, [{dp}, {}]>>)
                                            -> tensor<8x8xf32, #dist.local<@m, [{}, {}]>>

An op `dist.<name>` is bound to the record of that name (shardir/algebra/collectives.py). The layout
of its result follows from that of its operand by the record, and the verifier holds the type
against it.
"""

from abc import ABC, abstractmethod
from typing import Any

from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Data, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
    irdl_op_definition,
    opt_prop_def,
    prop_def,
    traits_def,
    var_operand_def,
    var_result_def,
)
from xdsl.traits import Pure
from xdsl.utils.exceptions import VerifyException

from shardir.algebra import collectives
from shardir.algebra.collectives import COLLECTIVES, CollectiveStep
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.diagnostics import ShardirError
from shardir.dialects.dist.types import (
    AxesAttr,
    PairsAttr,
    ReductionAttr,
    check_types,
    find_mesh,
    global_shape,
    is_local,
    type_layout,
)
from shardir.dialects.text import word

PREFIX = "dist."

PARAMETERS = {
    "axes": "axes", "reduction": "reduction", "dim": "dim", "split": "dim", "concat": "concat",
    "root": "root", "pairs": "pairs",
}  # fmt: skip
"""The properties of ops that are parameters of a step, with their names there."""


class CollectiveOp(IRDLOperation, ABC):
    """What the devices of each group of `axes` do together, or one does for itself.

    Several values in one collective travel in one flat buffer.
    """

    values = var_operand_def(TensorType)
    axes = prop_def(AxesAttr)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())

    @property
    def record(self) -> collectives.Collective:
        return COLLECTIVES[self.name.removeprefix(PREFIX)]

    def as_step(self, out: SSAValue) -> CollectiveStep:
        """What the op does to a value, of which `out` is the result."""
        layout = type_layout(out.type)
        assert layout is not None
        given = {PARAMETERS[n]: _value(p) for n, p in self.properties.items() if n in PARAMETERS}
        return CollectiveStep(self.record.name, layout=layout, **given)

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        """Whether the global value is the same afterwards, and its cotangent that of the result.

        Raises:
            ShardirError: the result depends on what single devices hold of the value, so that the
                cotangents of what they hold differ.
        """
        return self.record.keeps_value

    def verify_(self) -> None:
        check_types(self)
        if len(self.values) != len(self.outs) or not self.values:
            raise VerifyException("[C1] a collective has a result for each value, and one at least")
        for value, out in zip(self.values, self.outs, strict=True):
            self._verify_one(value, out)

    def _verify_one(self, value: SSAValue, out: SSAValue) -> None:
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        if not (is_local(have) and is_local(want)):
            raise VerifyException(
                "[C2] a collective works on local values; give them a #dist.local layout"
            )
        layout, got = type_layout(have), type_layout(want)
        assert layout is not None and got is not None
        mesh = find_mesh(self, layout.mesh)
        step = self.as_step(out)
        try:
            for a in step.axes:
                mesh.check_axis(a)
            self.record.check(mesh, layout, step)
            self.check_shapes(value, out, mesh)
        except ShardirError as e:
            raise VerifyException(str(e)) from None
        shape = global_shape(have, mesh)
        if not layout.even(mesh, shape):
            self._check_shards(step, layout, mesh, shape)

    def check_shapes(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        """Raises ShardirError when the global value is not what it was."""
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        shapes = global_shape(have, mesh), global_shape(want, mesh)
        if shapes[0] != shapes[1] or have.element_type != want.element_type:
            raise ShardirError(
                f"[C4] the whole value is {list(shapes[0])} of {have.element_type} before, "
                f"{list(shapes[1])} of {want.element_type} after"
            )

    def _check_shards(self, step: CollectiveStep, layout: Layout, mesh: Mesh, shape: Shape) -> None:
        passes = tuple(self.record.passes(step, mesh.extent(step.axes)))
        for group in mesh.groups(step.axes) if passes else ():
            shards = [layout.slices(mesh, shape, r) for r in group]
            sizes = [[s.stop - s.start for s in shard] for shard in shards]
            for source, target in passes:
                if sizes[source] != sizes[target]:
                    raise VerifyException(
                        f"[C4] rank {group[source]} holds {sizes[source]} of {list(shape)}, "
                        f"rank {group[target]} {sizes[target]}: the one does not take the "
                        "other's place"
                    )


class HeldByOne(IRDLOperation, ABC):
    """An op after which one device of each group holds the value, the others zeros."""

    @property
    @abstractmethod
    def holder(self) -> tuple[Axes, int]:
        """The axes of the groups, and the position in a group."""


def check_holder(op: str, value: SSAValue, position: int, axes: Axes, mesh: Mesh) -> None:
    """Raises ShardirError unless what the device at `position` of each group holds is the value:
    all hold it, or it alone holds something else than zeros."""
    layout = type_layout(value.type)
    assert layout is not None
    if not any(mesh.overlap(a, b) for a in axes for b in layout.used):
        return
    if mesh.without(layout.partial, axes) is not None:
        if isinstance(value.owner, HeldByOne) and value.owner.holder == (axes, position):
            return
        if layout.reduction == "any" and position == 0:
            return
    raise ShardirError(
        f"[G8] {op} passes on what position {position} holds, of a value that is [{layout}]; the "
        f"cotangents of the others would differ over {axes_text(axes)}, which no layout says; "
        "reduce or gather the value first"
    )


def _value(attr: Attribute) -> Any:
    """The plain value of a parameter."""
    if isinstance(attr, IntegerAttr):
        return attr.value.data
    assert isinstance(attr, Data)
    return attr.data


def parameter(name: str, step: CollectiveStep) -> Attribute:
    """The property `name` of an op, from the step that it is."""
    value = getattr(step, PARAMETERS[name])
    match name:
        case "axes":
            return AxesAttr(value)
        case "reduction":
            return word(ReductionAttr, value)
        case "pairs":
            return PairsAttr(value)
        case _:
            return IntegerAttr(value, i64)


class FusibleOp(CollectiveOp, ABC):
    """A collective whose values travel in one flat buffer. `fusion` asks for one buffer of all that
    have the same index. An `async` one is started, and under way while its device goes on: what it
    gives is there behind the `dist.wait` that takes it."""

    fusion = opt_prop_def(IntegerAttr.constr(type=i64))
    started = opt_prop_def(UnitAttr)

    def verify_(self) -> None:
        super().verify_()
        users = {u.operation for v in self.outs for u in v.uses}
        if self.started is not None and not (len(users) == 1 and _waits_for(users.pop(), self)):
            raise VerifyException(
                f"[C14] what an async {self.name} gives is not there yet: one dist.wait takes all "
                "of its results, in their order, and nothing else uses them"
            )


def _waits_for(op: Operation, started: FusibleOp) -> bool:
    return isinstance(op, WaitOp) and tuple(op.values) == tuple(started.outs)


@irdl_op_definition
class WaitOp(IRDLOperation):
    """What an `async` collective gives, once it is there."""

    name = "dist.wait"
    values = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$values attr-dict `:` functional-type(operands, results)"

    @property
    def started(self) -> FusibleOp:
        """The collective that it waits for."""
        (op,) = {v.owner for v in self.values}
        assert isinstance(op, FusibleOp)
        return op

    def verify_(self) -> None:
        if not self.values:
            raise VerifyException("[C15] a dist.wait takes what an async collective gives")
        for v in self.values:
            if not (isinstance(v.owner, FusibleOp) and v.owner.started is not None):
                raise VerifyException(
                    "[C15] a dist.wait takes what an async collective gives; leave it out, or say "
                    "`async` behind the collective's axes"
                )
        if [v.type for v in self.values] != [v.type for v in self.outs]:
            raise VerifyException("[C15] what a dist.wait gives has the types of what it takes")


def is_started(op: Operation) -> bool:
    """Whether an op is a collective that somebody waits for."""
    return isinstance(op, FusibleOp) and op.started is not None
