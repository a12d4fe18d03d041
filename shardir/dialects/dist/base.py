"""The base of the collectives of the local view.

    %b = dist.all_gather %a dim 0 over <dp> : (tensor<4x8xf32, #dist.local<@m, [{dp}, {}]>>)
                                            -> tensor<8x8xf32, #dist.local<@m, [{}, {}]>>

An op `dist.<name>` has the record of that name (shardir/algebra/collectives/), which derives the
result's layout from the operand's. The verifier compares the result's type with it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, Data, Operation, SSAValue
from xdsl.irdl import (
    IRDLOperation,
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
from shardir.algebra.mesh import Axes, Mesh
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.definition import OpClass, op_definition
from shardir.dialects.dist.attributes import AxesAttr, PairsAttr, ReductionAttr
from shardir.dialects.dist.types import (
    check_types,
    find_mesh,
    global_shape,
    is_local,
    type_change,
    type_layout,
    verification,
)
from shardir.dialects.signatures import verified
from shardir.dialects.text import word

PREFIX = "dist."

PARAMETERS = {
    "axes": "axes", "reduction": "reduction", "dim": "dim", "split": "dim", "concat": "concat",
    "root": "root", "pairs": "pairs",
}  # fmt: skip
"""The properties of ops that are parameters of a `CollectiveStep`, with their names there."""


class CollectiveOp(IRDLOperation, metaclass=OpClass):
    """A collective of the devices of each group over `axes`, or a local op on the value's layout.

    Several values in one collective travel in one flat buffer.
    """

    values = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())

    @property
    def axes(self) -> AxesAttr:
        """The axes of the groups; empty for an op that needs no other device."""
        return AxesAttr(())

    @property
    def record(self) -> collectives.Collective:
        return COLLECTIVES[self.name.removeprefix(PREFIX)]

    def as_step(self, out: SSAValue) -> CollectiveStep:
        """Return the step of the op for the value whose result is `out`."""
        layout = type_layout(out.type)
        assert layout is not None
        properties = {n: p for n, p in self.properties.items() if n != "axes"}
        parameters = {PARAMETERS[n]: _value(p) for n, p in properties.items() if n in PARAMETERS}
        return CollectiveStep(self.record.name, self.axes.data, layout, **parameters)

    def moves(self, mesh: Mesh) -> bool:
        """Whether the op has an effect on a mesh: groups of several devices, or no need of one."""
        return self.record.moves(mesh.extent(self.axes.data))

    def step_for(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> CollectiveStep:
        """Return the step of the op for one of its values, with all parameters of its cost."""
        return self.as_step(out)

    @classmethod
    def properties_of(cls, step: CollectiveStep) -> dict[str, Attribute]:
        """Return the properties of the op of a step."""
        names = cls.get_irdl_definition().properties
        return {n: parameter(n, step) for n in names if n in PARAMETERS}

    def keeps(self, value: SSAValue, mesh: Mesh) -> bool:
        """Whether the result is the operand's global value; their cotangents are then equal.

        Raises:
            ShardirError: the result selects one of different values of the devices, so that their
                cotangents would differ.
        """
        return self.record.keeps_value

    def verify_(self) -> None:
        check_types(self)
        if len(self.values) != len(self.outs) or not self.values:
            message = (
                f"expected values, and a result for each, got {len(self.values)} values and "
                f"{len(self.outs)} results"
            )
            raise VerifyException(coded("C1", message))
        checked = set[tuple[int, int]]()
        for value, out in zip(self.values, self.outs, strict=True):
            if (types := (id(value.type), id(out.type))) not in checked:
                checked.add(types)
                self._verify_one(value, out)

    def _verify_one(self, value: SSAValue, out: SSAValue) -> None:
        have, want = value.type, out.type
        assert isinstance(have, TensorType) and isinstance(want, TensorType)
        mesh = mesh_of_collective(self, self.axes.data, have, want)
        verified.get_or(
            (type(self), mesh, have, want), self.properties,
            lambda: self._verify_signature(value, out, mesh),
        )  # fmt: skip

    def _verify_signature(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        have, layout, step = value.type, type_layout(value.type), self.as_step(out)
        assert layout is not None
        if layout.host and self.record.communicates:
            message = f"expected a value in device memory, got one with [{layout}]"
            raise VerifyException(coded("C16", message))
        with verification():
            self.record.check(mesh, layout, step)
            self.check_shapes(value, out, mesh)
        shape = global_shape(have, mesh)
        if not layout.even(mesh, shape):
            self._check_shards(step, layout, mesh, shape)

    def check_shapes(self, value: SSAValue, out: SSAValue, mesh: Mesh) -> None:
        """Raise ShardirError if the shape or element type of the global value changes."""
        if message := type_change(value, out, mesh):
            raise ShardirError(coded("C4", message))

    def _check_shards(self, step: CollectiveStep, layout: Layout, mesh: Mesh, shape: Shape) -> None:
        passes = tuple(self.record.passes(step, mesh.extent(step.axes)))
        for group in mesh.groups(step.axes) if passes else ():
            shards = [layout.slices(mesh, shape, r) for r in group]
            sizes = [[s.stop - s.start for s in shard] for shard in shards]
            for source, target in passes:
                if sizes[source] != sizes[target]:
                    message = (
                        f"expected rank {group[source]} to send a shard of {sizes[target]}, as "
                        f"rank {group[target]} has of {list(shape)}, got {sizes[source]}"
                    )
                    raise VerifyException(coded("C4", message, use="use shards of one size"))


def mesh_of_collective(op: Operation, axes: Axes, *types: Attribute) -> Mesh:
    """Return the mesh of the types of a collective's values.

    Raises:
        VerifyException: a type is not of the local view, or the mesh does not have the axes.
    """
    for type in types:
        if not is_local(type):
            message = f"expected values with a #dist.local, got {type}"
            raise VerifyException(coded("C2", message))
    layout = type_layout(types[0])
    assert layout is not None
    mesh = find_mesh(op, layout.mesh)
    with verification():
        for a in axes:
            mesh.check_axis(a)
    return mesh


class GroupedOp(CollectiveOp, ABC):
    """A collective with groups: its text names their axes."""

    axes = prop_def(AxesAttr)


class HeldByOne(IRDLOperation, metaclass=OpClass):
    """An op whose result is the value on one device of each group, and zeros on the others."""

    @property
    @abstractmethod
    def holder(self) -> tuple[Axes, int]:
        """The axes of the groups, and the position in a group."""


def check_holder(op: str, value: SSAValue, position: int, axes: Axes, mesh: Mesh) -> None:
    """Raise ShardirError unless the device at `position` of each group holds the value, and the
    other devices hold it too, or zeros."""
    layout = type_layout(value.type)
    assert layout is not None
    if not any(mesh.overlap(a, b) for a in axes for b in layout.used):
        return
    if mesh.without(layout.partial, axes) is not None:
        if isinstance(value.owner, HeldByOne) and value.owner.holder == (axes, position):
            return
        if layout.reduction == "any" and position == 0:
            return
    message = (
        f"expected {op} of a value that all devices of a group hold, got position {position} of "
        f"[{layout}]: the cotangents of the others would differ"
    )
    raise ShardirError(coded("G8", message, use="reduce or gather the value first"))


def _value(attr: Attribute) -> Any:
    """Return the Python value of a parameter."""
    if isinstance(attr, IntegerAttr):
        return attr.value.data
    assert isinstance(attr, Data)
    return attr.data


def parameter(name: str, step: CollectiveStep) -> Attribute:
    """Return the property `name` of the op of a step."""
    return _parameter(name, getattr(step, PARAMETERS[name]))


@lru_cache(maxsize=4096)
def _parameter(name: str, value: Any) -> Attribute:
    match name:
        case "axes":
            return AxesAttr(value)
        case "reduction":
            return word(ReductionAttr, value)
        case "pairs":
            return PairsAttr(value)
        case _:
            return IntegerAttr(value, i64)


class AsyncOp(CollectiveOp, ABC):
    """A collective that may be `async`: in flight until the `dist.wait` that takes its results."""

    started = opt_prop_def(UnitAttr)

    def verify_(self) -> None:
        super().verify_()
        if self.started is None:
            return
        users = {u.operation for v in self.outs for u in v.uses}
        if any(isinstance(u, HandsOn) for u in users):
            return  # another run of a loop waits for it
        if len(users) != 1 or not all(_waits_for(u, self) for u in users):
            uses = ", ".join(sorted(u.name for u in users)) or "no use"
            message = (
                f"expected one dist.wait that takes all results of an async {self.name}, in their "
                f"order, and no other use of them, got {uses}"
            )
            raise VerifyException(coded("C14", message))


class FusibleOp(AsyncOp, ABC):
    """A collective that may move several values. Ops with equal `fusion` indices become one."""

    fusion = opt_prop_def(IntegerAttr.constr(type=i64))


def _waits_for(op: Operation, started: AsyncOp) -> bool:
    return isinstance(op, WaitOp) and tuple(op.values) == tuple(started.outs)


@op_definition
class WaitOp(IRDLOperation, metaclass=OpClass):
    """Waits for an `async` collective, and returns its results."""

    name = "dist.wait"
    values = var_operand_def(TensorType)
    outs = var_result_def(TensorType)
    traits = traits_def(Pure())
    assembly_format = "$values attr-dict `:` functional-type(operands, results)"

    @property
    def started(self) -> AsyncOp:
        """The collective that this op waits for."""
        (op,) = {maker(v) for v in self.values}
        assert isinstance(op, AsyncOp)
        return op

    def verify_(self) -> None:
        if not self.values:
            message = "expected the results of an async collective, got none"
            raise VerifyException(coded("C15", message, use="drop the wait"))
        for v in self.values:
            op = maker(v)
            if op is None or not is_started(op):
                got = "an argument" if op is None else f"one of {op.name}"
                message = f"expected a result of an async collective, got {got}"
                raise VerifyException(coded("C15", message))
        have, want = ([v.type for v in end] for end in (self.values, self.outs))
        if have != want:
            message = f"expected results of types {_listed(have)}, got {_listed(want)}"
            raise VerifyException(coded("C15", message, use="write the types of the operands"))


def _listed(types: Sequence[Attribute]) -> str:
    return ", ".join(map(str, types))


class HandsOn(IRDLOperation, metaclass=OpClass):
    """An op of a loop that passes values to the next run or out of the loop, also values in
    flight."""


def maker(v: SSAValue) -> Operation | None:
    """Return the op that computed a value, looking through `HandsOn`; None for an argument."""
    while isinstance(v.owner, HandsOn):
        v = v.owner.operands[0]
    return v.owner if isinstance(v.owner, Operation) else None


def is_started(op: Operation) -> bool:
    """Whether an op is an `async` collective."""
    return "started" in op.properties and isinstance(op, AsyncOp)
