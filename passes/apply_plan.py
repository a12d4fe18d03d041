"""apply-plan: a plan -> its layouts and marks on arguments and values of the program.

    "*.up" : [{}, {tp}]

    %up: tensor<4x6xf32> {train.parameter = "mlp.up"}
 -> %up: tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>> {train.parameter = "mlp.up"}

Runs after inline-calls, and before layouts are decided on. docs/plans.md has the notation.

1. Parameters and states have the names of `train.parameter` and `train.state`, inputs and values
   those of the printed text.
2. A layout of the plan annotates the value, in all functions. Where the program annotates the value
   too, the plan may split open dimensions; any other layout is an error.
3. An argument with `uses` is redistributed to that layout before its first use, of the value that
   it is converted to if that is its only use.
4. A parameter with `parts` is cut in place of its products, in all functions in which these are cut
   (rewriting/parts.py), and its parts are redistributed before their first use.
5. A pattern that matches no name of any function is an error. All errors are reported at once, each
   at its line of the plan.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from xdsl.dialects.builtin import IntegerAttr, TensorType, UnitAttr, i64
from xdsl.ir import Attribute, BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.plan import (
    ExpandedLine,
    LayoutPlan,
    NameKind,
    PlanEntry,
    PlanLine,
    PresetLine,
    padded,
    read,
)
from shardir.algebra.saved import LineError
from shardir.diagnostics import Located, ParseErrors, ShardirError, coded
from shardir.dialects.dist import LayoutAttr, RedistributeOp, layout_of, sharding_of, with_layout
from shardir.dialects.nn import ConvertOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import STAGE, Role, StepOp, arguments, is_step, stage_attrs
from shardir.dialects.train.roles import FUSION, STATE_LAYOUT, arg_attrs, set_arg_attrs
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.functions import update_signature
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.options import UsageError
from shardir.rewriting.parts import cut_products, is_cut, parts
from shardir.rewriting.rewriter import Rewriter, set_type
from shardir.search.preset_entries import FunctionPresets, by_axis, parts_of
from shardir.syntax.files import read_text
from shardir.syntax.printer import value_names
from shardir.syntax.source import Source


@dataclass(frozen=True)
class ApplyPlan(GlobalPass):
    """Sets the layouts and marks of a plan, or of presets, on a program."""

    name = "apply-plan"
    file: str = ""
    """The file of the plan."""
    plan: str = ""
    """The text of the plan, in place of a file."""

    def concerns(self, f: Function) -> bool:
        return super().concerns(f) and bool(f.block.args)

    def check(self, f: Function) -> Iterator[Located]:
        if f.mesh is None:
            message = f"expected a mesh for the layouts of @{f.name}, got none"
            yield f.op, f'{message}; declare one: dist.mesh @m <dp = 4>, or mesh="dp = 4"'

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        if bool(self.file) == bool(self.plan):
            got = "both" if self.file else "neither"
            raise UsageError(f"apply-plan: expected a file or the text of a plan, got {got}")
        source = Source(read_text(Path(self.file)) if self.file else self.plan, self.file or "plan")
        plan, errors = read(source.text)
        planned = _PlannedProgram(plan, functions)
        errors += planned.errors
        if errors:
            raise ParseErrors([source.at_line(error) for error in sorted(set(errors))])
        for f in planned.functions:
            f.write()


class _PlannedProgram:
    """The functions of a program, with what a plan says of them; `errors`: those of the plan."""

    def __init__(self, plan: LayoutPlan, functions: Sequence[Function]):
        for f in functions:
            _divide(plan, f)
        self.functions = [_PlannedFunction(f) for f in functions]
        self.functions.sort(key=lambda f: not f.is_main)
        self.errors: list[LineError] = []
        lines = [self.expanded(x) if isinstance(x, PresetLine) else x for x in plan.lines]
        matched = set[int]()
        for target in (t for f in self.functions for t in f.targets):
            for line in lines:
                if (entry := line.says(target.kind, target.name)) is not None:
                    matched.add(line.number)
                    target.hear(entry, line.number)
        self.errors += [
            self.unmatched(line)
            for line in plan.lines if isinstance(line, PlanLine) and line.number not in matched
        ]  # fmt: skip
        self.errors += [error for f in self.functions for error in f.errors()]
        self.errors += self.undivided()

    def expanded(self, line: PresetLine) -> ExpandedLine:
        """Return what presets say of the names of all functions: of a name of several functions,
        what they say in the one that is differentiated."""
        entries: dict[tuple[NameKind, str], PlanEntry] = {}
        for f in self.functions:
            try:
                presets = FunctionPresets(f.f.op, f.mesh, by_axis(line, f.mesh))
                if f.is_main:
                    presets.check()
            except ShardirError as e:
                self.errors.append(LineError(line.number, 0, str(e)))
                continue
            for kind, name, entry in presets.entries(f.names):
                entries.setdefault((kind, name), entry)
        return ExpandedLine(entries, line.number)

    def undivided(self) -> Iterator[LineError]:
        """Yield the lines with `parts` none of whose parameters has a product that is cut."""
        found: dict[int, list[_Target]] = {}
        for t in (t for f in self.functions for t in f.targets if "parts" in t.said):
            found.setdefault(t.lines["parts"], []).append(t)
        for number, targets in found.items():
            if not any(is_cut(t.value) for t in targets):
                message = (
                    f'expected products of "{targets[0].name}" that are cut in parts, got none'
                )
                yield LineError(number, 0, coded("N6", message))

    def unmatched(self, line: PlanLine) -> LineError:
        """Return the error of a line that matches no name, with the nearest names."""
        names = {t.name: None for f in self.functions for t in f.targets if t.kind is line.kind}
        wanted = re.sub(r"[*?{}\[\]]", "", line.pattern)
        near = ", ".join(get_close_matches(wanted, list(names), n=3, cutoff=0.0))
        message = f'expected a pattern of {line.kind}s of the program, got "{line.pattern}"'
        use = f"the nearest names are {near}" if near else f"the program has no {line.kind}s"
        return LineError(line.number, 0, coded("N2", message, use=use))


def _divide(plan: LayoutPlan, f: Function) -> None:
    """Cut the parameters that a plan says are cut, in place of their products."""
    assert f.mesh is not None
    cuts = cut_products(f.op)
    divided_by = set[str]()
    for line in plan.lines if cuts else ():
        if isinstance(line, PresetLine):
            with suppress(ShardirError):  # reported where the line is expanded
                divided_by |= parts_of(f.op, f.mesh, by_axis(line, f.mesh))
        else:
            said = {key: line.says(NameKind.PARAMETER, key) for key in cuts}
            divided_by |= {key for key, entry in said.items() if entry and entry.parts is not None}
    for key in divided_by:
        for cut in cuts[key]:
            cut.divide()


@dataclass
class _Target:
    """An argument, or a result of an op, that a plan may be for.

    Attributes:
        said: the fields of an entry that the plan has for it.
        lines: the number of the line of each.
    """

    kind: NameKind
    name: str
    value: SSAValue
    is_parameter: bool = False
    said: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)

    def hear(self, entry: PlanEntry, number: int) -> None:
        """Record what a line says, where no line before it said so."""
        for name in entry.said - self.said.keys():
            self.said[name] = getattr(entry, name)
            self.lines[name] = number

    @property
    def layouts(self) -> list[str]:
        """The fields with layouts."""
        names = ["layout", "uses", "parts", *(["states"] if self.is_parameter else [])]
        return [name for name in names if name in self.said]

    def layout(self, name: str, mesh: Mesh) -> Layout | None:
        """Return one of the layouts that the plan has."""
        if name not in self.layouts:
            return None
        return padded(self.said[name], mesh.name, self.shape).simplified(mesh)

    def check(self, name: str, mesh: Mesh) -> None:
        """Raise ShardirError where the value can't have one of the layouts."""
        padded(self.said[name], mesh.name, self.shape).check(mesh, self.shape)

    @property
    def shape(self) -> Shape:
        return unsharded_type(self.value).get_shape()


class _PlannedFunction:
    """A function with its targets."""

    def __init__(self, f: Function):
        assert f.mesh is not None
        self.f, self.mesh = f, f.mesh
        self.names = value_names(f.block)
        self.attributes = arg_attrs(f.op)
        self.targets = list(self._targets())

    def _targets(self) -> Iterator[_Target]:
        for v, argument in zip(self.f.block.args, arguments(self.f.op), strict=True):
            if isinstance(v.type, TensorType):
                kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
                name = argument.key or self.names[v]
                yield _Target(kind, name, v, argument.role is Role.PARAMETER)
        for op in self.f.block.ops:
            for v in op.results:
                if isinstance(v.type, TensorType):
                    yield _Target(NameKind.VALUE, self.names[v], v)

    @cached_property
    def steps(self) -> list[StepOp]:
        """The requests of steps of the function."""
        steps = [op for op in self.f.module.body.ops if isinstance(op, StepOp)]
        return [op for op in steps if op.function.root_reference.data == self.f.name]

    @cached_property
    def is_main(self) -> bool:
        """Whether the function is a step, or that of one."""
        return bool(self.steps) or is_step(self.f.op)

    # ---- errors ----

    def errors(self) -> Iterator[LineError]:
        """Yield the layouts that a value can't have, one of each line, and those that contradict
        an annotation."""
        wrong = set[int]()
        for t in self.targets:
            for name in t.layouts:
                number = t.lines[name]
                try:
                    if number not in wrong:
                        t.check(name, self.mesh)
                except ShardirError as e:
                    wrong.add(number)
                    yield LineError(number, 0, f'"{t.name}" of @{self.f.name}: {e}')
            if wrong.isdisjoint(t.lines.values()):
                yield from self.contradictions(t)
            for name in {"uses", "parts"} & t.said.keys():
                if "layout" not in t.said and layout_of(t.value) is None:
                    message = f'expected a layout of "{t.name}" of @{self.f.name} beside {name}'
                    yield LineError(t.lines[name], 0, coded("N1", f"{message}, got none"))
        marked = [t.lines["stage"] for t in self.targets if "stage" in t.said]
        if self.steps and not any(step.pipeline for step in self.steps):
            for number in sorted(set(marked)):
                message = f"expected a step of @{self.f.name} in stages, got one without"
                use = 'pipeline it: pipeline <1f1b, ranks = 2>, or stages="1f1b, ranks = 2"'
                yield LineError(number, 0, coded("G14", message, use=use))

    def contradictions(self, t: _Target) -> Iterator[LineError]:
        layout, annotated = t.layout("layout", self.mesh), sharding_of(t.value)
        where = f'"{t.name}" of @{self.f.name}'
        if layout and annotated and not annotated.allows(layout, self.mesh):
            message = f"expected {where} as annotated, [{annotated}], got [{layout}]"
            yield LineError(t.lines["layout"], 0, coded("N3", message))
        for name, (word, new) in self.marks(t).items():
            old = self.own_attributes(t).get(word)
            if old is not None and old != new:
                message = f"expected {word} of {where} as annotated, {old}, got {new}"
                yield LineError(t.lines[name], 0, coded("N3", message))

    def marks(self, t: _Target) -> dict[str, tuple[str, Attribute]]:
        """Return the attributes of a parameter, or of a value's op, that the plan has, each with
        its name."""
        found: dict[str, tuple[str, Attribute]] = {}
        if (stage := t.said.get("stage")) is not None:
            found["stage"] = STAGE, stage_attrs(stage)[STAGE]
        if t.is_parameter:
            if (states := t.layout("states", self.mesh)) is not None:
                found["states"] = STATE_LAYOUT, LayoutAttr(states)
            if (index := t.said.get("fusion")) is not None:
                found["fusion"] = FUSION, IntegerAttr(index, i64)
        return found

    def own_attributes(self, t: _Target) -> dict[str, Attribute]:
        """The attributes of an argument, or of the op of a value."""
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
            own = self.own_attributes(t)
            own |= dict(self.marks(t).values())
            if (used := t.layout("uses", self.mesh)) is not None:
                self.redistribute(t.value, used, position, t.said)
            elif "recompute" in t.said:
                own[RECOMPUTE] = UnitAttr()
            if (layout := t.layout("parts", self.mesh)) is not None:
                self.redistribute_parts(t.value, layout, position, t.said)
        if any(self.attributes):
            set_arg_attrs(self.f.op, self.attributes)
        update_signature(self.f.op)

    def redistribute_parts(
        self, v: SSAValue, layout: Layout, position: dict[Operation, int], said: dict[str, Any]
    ) -> None:
        """Redistribute the parts of an argument to the layout in which they are used."""
        source = layout_of(v)
        assert source is not None
        dims = said.get("uses", source.dims)
        for part in parts(v) if is_cut(v) else ():
            if "recompute" in said and isinstance(part.owner, Operation):
                part.owner.attributes[RECOMPUTE] = UnitAttr()
            t = unsharded_type(part)
            set_type(part, with_layout(t, padded(dims, self.mesh.name, t.get_shape())))
            self.redistribute(part, layout, position, said)

    def redistribute(
        self, v: SSAValue, layout: Layout, position: dict[Operation, int], said: dict[str, Any]
    ) -> None:
        """Redistribute an argument to the layout in which it is used."""
        users = {use.operation for use in v.uses}
        if len(users) == 1 and isinstance(cast := next(iter(users)), ConvertOp):
            set_type(cast.out, with_layout(unsharded_type(cast.out), layout_of(v)))
            self.redistribute(cast.out, layout, position, said)
        elif layout != layout_of(v) and not all(_moves_to(op, layout) for op in users):
            first = min(users, key=lambda op: position[op])
            new = Rewriter(self.mesh).before(first).redistribution(v, layout)
            v.replace_uses_with_if(new, lambda use: use.operation is not new.owner)
            if "recompute" in said and isinstance(new.owner, Operation):
                new.owner.attributes[RECOMPUTE] = UnitAttr()


def _moves_to(op: Operation, layout: Layout) -> bool:
    return isinstance(op, RedistributeOp) and layout_of(op.out) == layout
