"""A function with the entries of a plan for its arguments and values: PlannedFunction.

    "*.up" : [{}, {tp}]   ->   %up: tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>

`names_in_plans` has the names that apply-plan matches with the lines of a plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.plan import LineError, NameKind, PlanEntry, padded
from shardir.compat.xdsl import set_type
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.dist import (
    LayoutAttr,
    RedistributeOp,
    StrategyAttr,
    layout_of,
    sharding_of,
    with_layout,
)
from shardir.dialects.nn import ConvertOp
from shardir.dialects.nn.base import TensorOp, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import (
    STAGE,
    ForwardOp,
    Role,
    StepOp,
    arguments,
    is_step,
    stage_attrs,
)
from shardir.dialects.train.roles import FUSION, STATE_LAYOUT, arg_attrs, set_arg_attrs
from shardir.rewriting.bases import Function
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.parts import is_cut, parts
from shardir.rewriting.rewriter import Rewriter
from shardir.rewriting.uses import names_in_plans


@dataclass
class Target:
    """An argument, or a result of an op, that a plan may name.

    Attributes:
        fields: the fields of the plan's entry for it.
        lines: for each field the number of its line.
    """

    kind: NameKind
    name: str
    value: SSAValue
    is_parameter: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def is_retained(self) -> bool:
        """Whether the target is a parameter or a state."""
        return self.kind is NameKind.PARAMETER

    def merge(self, entry: PlanEntry, number: int) -> None:
        """Record the fields of a line, unless an earlier line has set them."""
        for name in entry.said - self.fields.keys():
            self.fields[name] = getattr(entry, name)
            self.lines[name] = number

    @property
    def layouts(self) -> list[str]:
        """The fields with layouts."""
        names = ["layout", "uses", *(["states"] if self.is_parameter else [])]
        return [name for name in names if name in self.fields]

    def layout(self, name: str, mesh: Mesh) -> Layout | None:
        """Return the layout in a field of the plan; None without the field."""
        if name not in self.layouts:
            return None
        return padded(self.fields[name], mesh.name, self.shape).simplified(mesh)

    @property
    def parts(self) -> list[tuple[SSAValue, Layout]]:
        """The parts into which the value is cut, each with its layout in the plan."""
        cut, layouts = parts(self.value) if is_cut(self.value) else [], self.fields["parts"]
        return [*zip(cut, layouts * len(cut) if len(layouts) == 1 else layouts, strict=True)]

    def check_parts(self, mesh: Mesh) -> None:
        """Check the layouts of the parts of the value.

        Raises:
            ShardirError: a part can't have its layout.
        """
        cut, layouts = parts(self.value) if is_cut(self.value) else [], self.fields["parts"]
        if cut and len(layouts) not in (1, len(cut)):
            message = f"expected one layout of parts, or {len(cut)}, got {len(layouts)}"
            raise ShardirError(coded("N6", message, use="write a layout for each part"))
        for part, layout in self.parts:
            shape = unsharded_type(part).get_shape()
            padded(layout, mesh.name, shape).check(mesh, shape)

    def check(self, name: str, mesh: Mesh) -> None:
        """Check the layout in a field.

        Raises:
            ShardirError: the value can't have it.
        """
        padded(self.fields[name], mesh.name, self.shape).check(mesh, self.shape)

    @property
    def shape(self) -> Shape:
        return unsharded_type(self.value).get_shape()


class PlannedFunction:
    """A function with its targets."""

    def __init__(self, f: Function):
        assert f.mesh is not None
        self.f, self.mesh = f, f.mesh
        self.names = names_in_plans(f.block)
        self.attributes = arg_attrs(f.op)
        self.targets = list(self._targets())

    def _targets(self) -> Iterator[Target]:
        for v, argument in zip(self.f.block.args, arguments(self.f.op), strict=True):
            if isinstance(v.type, TensorType):
                kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
                name = argument.key or self.names[v]
                yield Target(kind, name, v, argument.role is Role.PARAMETER)
        for op in self.f.block.ops:
            for v in op.results:
                if isinstance(v.type, TensorType) and v in self.names:
                    yield Target(NameKind.VALUE, self.names[v], v)

    @cached_property
    def steps(self) -> list[StepOp | ForwardOp]:
        """The requests of the function that may be in stages."""
        steps = [op for op in self.f.module.body.ops if isinstance(op, StepOp | ForwardOp)]
        return [op for op in steps if op.function.root_reference.data == self.f.name]

    @cached_property
    def is_main(self) -> bool:
        """Whether the function is a step, or the source of a step."""
        return bool(self.steps) or is_step(self.f.op)

    # ---- errors ----

    def errors(self) -> Iterator[LineError]:
        """Yield one error for each line with a layout that a value can't have, and an error for
        each contradiction of an annotation."""
        wrong_lines = set[int]()
        for t in self.targets:
            for name in (*t.layouts, *({"parts"} & t.fields.keys())):
                number = t.lines[name]
                try:
                    if number in wrong_lines:
                        continue
                    if name == "parts":
                        t.check_parts(self.mesh)
                    else:
                        t.check(name, self.mesh)
                except ShardirError as e:
                    wrong_lines.add(number)
                    yield LineError(number, 0, f'"{t.name}" of @{self.f.name}: {e}')
            if wrong_lines.isdisjoint(t.lines.values()):
                yield from self.contradictions(t)
            yield from self.strategy_errors(t)
            for name in {"uses", "parts"} & t.fields.keys():
                if "layout" not in t.fields and layout_of(t.value) is None:
                    message = f'expected a layout of "{t.name}" of @{self.f.name} beside {name}'
                    yield LineError(t.lines[name], 0, coded("N1", f"{message}, got none"))
        stage_lines = [t.lines["stage"] for t in self.targets if "stage" in t.fields]
        if self.steps and not any(step.pipeline for step in self.steps):
            for number in sorted(set(stage_lines)):
                message = f"expected a step of @{self.f.name} in stages, got one without"
                use = 'pipeline it: pipeline <1f1b, ranks = 2>, or stages="1f1b, ranks = 2"'
                yield LineError(number, 0, coded("G14", message, use=use))

    def strategy_errors(self, t: Target) -> Iterator[LineError]:
        """Yield an error if the op of a value can't have its strategy."""
        if (strategy := t.fields.get("strategy")) is None:
            return
        op, where = t.value.owner, f'"{t.name}" of @{self.f.name}'
        if not isinstance(op, TensorOp):
            got = op.name if isinstance(op, Operation) else "an argument"
            message = f"expected an op with factors for the strategy of {where}, got {got}"
            yield LineError(t.lines["strategy"], 0, coded("N7", message))
            return
        annotated = None if op.strategy is None else op.strategy.data
        if annotated not in (None, strategy):
            message = f"expected the strategy of {where} as annotated, {annotated}, got {strategy}"
            yield LineError(t.lines["strategy"], 0, coded("N3", message))
        try:
            strategy.op_sharding(strategy_factors(op), self.mesh)
        except ShardirError as e:
            yield LineError(t.lines["strategy"], 0, f"{where}: {e}")

    def contradictions(self, t: Target) -> Iterator[LineError]:
        layout, annotated = t.layout("layout", self.mesh), sharding_of(t.value)
        where = f'"{t.name}" of @{self.f.name}'
        if layout and annotated and not annotated.allows(layout, self.mesh):
            message = f"expected {where} as annotated, [{annotated}], got [{layout}]"
            yield LineError(t.lines["layout"], 0, coded("N3", message))
        for name, (word, new) in self.marks(t).items():
            old = self.attributes_of(t).get(word)
            if old is not None and old != new:
                message = f"expected {word} of {where} as annotated, {old}, got {new}"
                yield LineError(t.lines[name], 0, coded("N3", message))

    def marks(self, t: Target) -> dict[str, tuple[str, Attribute]]:
        """Return the attributes that the plan sets on a parameter, or on a value's op: name and
        value for each field."""
        marks: dict[str, tuple[str, Attribute]] = {}
        if (stage := t.fields.get("stage")) is not None:
            marks["stage"] = STAGE, stage_attrs(stage)[STAGE]
        if t.is_parameter:
            if (states := t.layout("states", self.mesh)) is not None:
                marks["states"] = STATE_LAYOUT, LayoutAttr(states)
            if (index := t.fields.get("fusion")) is not None:
                marks["fusion"] = FUSION, IntegerAttr(index, i64)
        return marks

    def attributes_of(self, t: Target) -> dict[str, Attribute]:
        """Return the attributes of an argument, or of the op of a value."""
        if isinstance(t.value, BlockArgument):
            return self.attributes[t.value.index]
        assert isinstance(t.value.owner, Operation)
        return t.value.owner.attributes

    # ---- annotations ----

    def write(self) -> None:
        """Annotate the values and arguments of the function."""
        position = {op: i for i, op in enumerate(self.f.block.ops)}
        for t in self.targets:
            if (layout := t.layout("layout", self.mesh)) is not None:
                set_type(t.value, with_layout(unsharded_type(t.value), layout))
            own = self.attributes_of(t)
            own |= dict(self.marks(t).values())
            if "strategy" in t.fields and isinstance(t.value.owner, Operation):
                t.value.owner.properties["strategy"] = StrategyAttr(t.fields["strategy"])
            if (used := t.layout("uses", self.mesh)) is not None:
                self.redistribute(t.value, used, position, t.fields)
            elif "recompute" in t.fields:
                own[RECOMPUTE] = UnitAttr()
            if "parts" in t.fields:
                self.redistribute_parts(t, position)
        if any(self.attributes):
            set_arg_attrs(self.f.op, self.attributes)
        update_signature(self.f.op)

    def redistribute_parts(self, t: Target, position: dict[Operation, int]) -> None:
        """Redistribute the parts of an argument to the layouts in which they are used."""
        source = layout_of(t.value)
        assert source is not None
        used = t.fields.get("uses", source)
        for part, layout in t.parts:
            if "recompute" in t.fields and isinstance(part.owner, Operation):
                part.owner.attributes[RECOMPUTE] = UnitAttr()
            t_part, shape = unsharded_type(part), unsharded_type(part).get_shape()
            set_type(part, with_layout(t_part, padded(used, self.mesh.name, shape)))
            own = padded(layout, self.mesh.name, shape).simplified(self.mesh)
            self.redistribute(part, own, position, t.fields)

    def redistribute(
        self, v: SSAValue, layout: Layout, position: dict[Operation, int], fields: dict[str, Any]
    ) -> None:
        """Redistribute an argument to the layout in which it is used."""
        users = {use.operation for use in v.uses}
        if len(users) == 1 and isinstance(cast := next(iter(users)), ConvertOp):
            set_type(cast.out, with_layout(unsharded_type(cast.out), layout_of(v)))
            self.redistribute(cast.out, layout, position, fields)
        elif layout != layout_of(v) and not all(_moves_to(op, layout) for op in users):
            first = min(users, key=lambda op: position[op])
            new = Rewriter(self.mesh).before(first).redistribution(v, layout)
            v.replace_uses_with_if(new, lambda use: use.operation is not new.owner)
            if "recompute" in fields and isinstance(new.owner, Operation):
                new.owner.attributes[RECOMPUTE] = UnitAttr()


def _moves_to(op: Operation, layout: Layout) -> bool:
    return isinstance(op, RedistributeOp) and layout_of(op.out) == layout
