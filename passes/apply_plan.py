"""apply-plan: a plan -> its layouts and marks on arguments and values of the program.

    "*.up" : [{}, {tp}]

    %up: tensor<4x6xf32> {train.parameter = "mlp.up"}
 -> %up: tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>> {train.parameter = "mlp.up"}

Runs after inline-calls, before layouts are decided on. docs/reference/plans.md has the notation.

1. Parameters and states are named by `train.parameter` and `train.state`, inputs and values by the
   printed text.
2. A layout of the plan annotates the value, in all functions. If the program annotates the value
   too, the plan may only split open dimensions; a different layout is an error.
3. An argument with `uses` is redistributed to that layout before its first use. If its only use is
   a conversion, the converted value is redistributed instead.
4. A parameter with `parts` is cut in place of its products, in all functions that cut the products
   (rewriting/parts.py), and its parts are redistributed before their first use.
5. A `strategy` goes to the op that makes the value.
6. A function of a line with `search` is as search-strategies leaves it: without composites,
   barriers and groups, and with the attribute `search`.
7. A pattern that matches no name of any function is an error. All errors are reported at once, each
   at its line of the plan.
8. Where the pass runs before and after differentiation (`lines`), the second run applies the lines
   that name a function. The first run skips functions that differentiation makes, and functions
   that a search left: their gradient was made before that search, and has layouts of its own.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from shardir.algebra.plan import (
    ExpandedLine,
    LayoutPlan,
    Line,
    LineError,
    NameKind,
    PlanEntry,
    PlanLine,
    PresetLine,
    SearchLine,
    UnshardedParameter,
    unsharded_texts,
)
from shardir.algebra.plan_notation import read, text_of
from shardir.diagnostics import (
    Located,
    ParseErrors,
    ShardirError,
    coded,
    did_you_mean,
    nearest,
    size_text,
)
from shardir.dialects.train import Request
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.composites import expand
from shardir.rewriting.marks import resolve_markers, set_search_result
from shardir.rewriting.options import UsageError
from shardir.rewriting.parts import cut_products, is_cut
from shardir.rewriting.planned_function import PlannedFunction, Target
from shardir.search.plans.preset_entries import (
    FunctionPresets,
    by_axis,
    known_products,
    parts_of,
    splits_more_than_columns,
)
from shardir.syntax.files import read_text
from shardir.syntax.source import Source, remark, warn

ALL, BEFORE, AFTER = "all", "before", "after"


@dataclass(frozen=True)
class ApplyPlan(GlobalPass):
    """Sets the layouts and marks of a plan, or of presets, on a program."""

    name = "apply-plan"
    file: str = ""
    """The file of the plan."""
    plan: str = ""
    """The text of the plan, in place of a file."""
    lines: str = ALL
    """The lines to apply, where layouts are decided on after differentiation: `before` it all lines
    except lines of functions that it makes or that a line with `search` names; `after` it the lines
    of one function."""

    def check(self, f: Function) -> Iterator[Located]:
        if f.mesh is None and self.lines != AFTER:
            message = f"expected a mesh for the layouts of @{f.name}, got none"
            yield f.op, f'{message}; declare one: dist.mesh @m <dp = 4>, or mesh="dp = 4"'

    def rewrite_all(self, functions: Sequence[Function]) -> None:
        if bool(self.file) == bool(self.plan):
            got = "both" if self.file else "neither"
            raise UsageError(f"apply-plan: expected a file or the text of a plan, got {got}")
        if self.lines not in (ALL, BEFORE, AFTER):
            raise UsageError(
                f"apply-plan: expected lines={ALL}, {BEFORE} or {AFTER}, got {self.lines}"
            )
        source = Source(read_text(Path(self.file)) if self.file else self.plan, self.file or "plan")
        plan, errors = read(source.text)
        plan, of_added = _with_added_presets(plan)
        errors += of_added
        errors += _unknown_functions(plan, functions, self.lines)
        planned = _PlannedProgram(_select_lines(plan, functions, self.lines), functions)
        errors += planned.errors
        if errors:
            raise ParseErrors([source.at_line(error) for error in sorted(set(errors))])
        planned.report_unsharded()
        for f in planned.functions:
            f.write()


def _with_added_presets(plan: LayoutPlan) -> tuple[LayoutPlan, list[LineError]]:
    """Return the plan with the lines of presets that packages add as functions, and their
    errors."""
    lines, errors, products = list[Line](), list[LineError](), known_products()
    for line in plan.lines:
        name, axes = line.factors[0] if isinstance(line, PresetLine) else ("", ())
        make = products.get(name)
        if not callable(make) or not isinstance(line, PresetLine) or len(line.factors) > 1:
            lines.append(line)
            continue
        try:
            given = make(", ".join(axes))
            added, wrong = read(given if isinstance(given, str) else text_of(given))
        except ShardirError as e:
            errors.append(LineError(line.number, 0, f"the preset {name}: {e}"))
            continue
        lines += [replace(x, number=line.number) for x in added.lines]
        errors += [LineError(line.number, 0, f"the preset {name}: {e.message}") for e in wrong]
    return LayoutPlan(tuple(lines)), errors


def _unknown_functions(
    plan: LayoutPlan, functions: Sequence[Function], lines: str
) -> Iterator[LineError]:
    """Yield an error for each line of a function that the program lacks."""
    module = functions[0].module if functions else None
    names = [f.name for f in functions]
    requested = (
        [op.sym_name.data for op in module.body.ops if isinstance(op, Request)] if module else []
    )
    for line in plan.lines:
        if isinstance(line, PresetLine) or line.function in (None, *names):
            continue
        message = f"expected a function of the program, got @{line.function}"
        if lines == AFTER:  # the first run has reported the other lines
            if isinstance(line, SearchLine):
                message += ", which differentiation removes before the search"
                use = "drop the line with search"
                yield LineError(line.number, 0, coded("N2", message, use=use))
        elif line.function not in requested:
            near = did_you_mean(f"@{line.function}", [f"@{n}" for n in (*names, *requested)])
            use = near.removeprefix("; ") or None
            yield LineError(line.number, 0, coded("N2", message, use=use))
        elif lines == ALL:
            message += ", which differentiation makes after layouts are decided on"
            yield LineError(line.number, 0, coded("N2", message, use="use the mode auto"))


def _select_lines(plan: LayoutPlan, functions: Sequence[Function], lines: str) -> LayoutPlan:
    """Return the part of the plan that this run applies."""
    known = {f.name for f in functions}
    if lines == BEFORE:  # gradients of searched functions must not get these layouts
        known -= {line.function for line in plan.lines if isinstance(line, SearchLine)}

    def is_selected(line: Line) -> bool:
        if isinstance(line, PresetLine) or line.function is None:
            return lines != AFTER
        return line.function in known

    return LayoutPlan(tuple([line for line in plan.lines if is_selected(line)]))


class _PlannedProgram:
    """The functions of a program, with the entries of a plan; `errors`: the errors of the plan."""

    def __init__(self, plan: LayoutPlan, functions: Sequence[Function]):
        for f in functions:
            _restore_search(plan, f)
            _cut_parameters(plan, f)
        self.functions = [PlannedFunction(f) for f in functions if f.mesh is not None]
        self.functions.sort(key=lambda f: not f.is_main)
        self.errors: list[LineError] = []
        lines = [
            self.expand_presets(x) if isinstance(x, PresetLine) else x
            for x in plan.lines if not isinstance(x, SearchLine)
        ]  # fmt: skip
        matched = set[int]()
        for f in self.functions:
            for target in f.targets:
                for line in lines:
                    if (entry := line.says(f.f.name, target.kind, target.name)) is not None:
                        matched.add(line.number)
                        target.merge(entry, line.number)
        self.unsharded = {
            t.name: line.unsharded[t.name]
            for line in lines if isinstance(line, ExpandedLine)
            for f in self.functions for t in f.targets
            if t.name in line.unsharded and t.is_retained
            and {t.lines[word] for word in t.fields.keys() & {"layout", "states"}} == {line.number}
        }  # fmt: skip
        """Parameters that presets leave unsharded, if no other line lays them out."""
        self.errors += [
            self.unmatched_error(line)
            for line in plan.lines if isinstance(line, PlanLine) and line.number not in matched
        ]  # fmt: skip
        self.errors += [error for f in self.functions for error in f.errors()]
        self.errors += self.uncut_errors()

    def expand_presets(self, line: PresetLine) -> ExpandedLine:
        """Return the entries of a line of presets for the names of all functions. If several
        functions have a name, the function that is differentiated decides."""
        entries: dict[tuple[NameKind, str], PlanEntry] = {}
        unsharded: dict[str, UnshardedParameter] = {}
        for f in self.functions:
            try:
                presets = FunctionPresets(f.f.op, f.mesh, by_axis(line, f.mesh))
                if f.is_main and (missing := presets.missing()):
                    if not splits_more_than_columns(line):
                        raise ShardirError(missing)
                    warn(f.f.op, f"{missing}; its devices compute the same")
            except ShardirError as e:
                self.errors.append(LineError(line.number, 0, str(e)))
                continue
            for kind, name, entry in presets.entries(f.names):
                entries.setdefault((kind, name), entry)
            unsharded = dict(presets.unsharded_parameters()) | unsharded
        return ExpandedLine(entries, unsharded, line.number)

    def report_unsharded(self) -> None:
        """Remark on the parameters that presets leave unsharded, and warn of large parameters that
        presets should have split."""
        names = [t.name for f in self.functions for t in f.targets if t.is_retained]
        for text in unsharded_texts({name: self.unsharded.get(name) for name in names}):
            remark(f"whole: {text}")
        missed = {name: e for name, e in self.unsharded.items() if e.is_meant}
        if missed:
            texts = ", ".join(unsharded_texts({name: missed.get(name) for name in names}))
            size = size_text(sum(e.bytes for e in missed.values()))
            use = "use axes that divide them, or write their layouts before the presets"
            warn(None, f"presets leave {size} of large parameters unsharded: {texts}; {use}")

    def uncut_errors(self) -> Iterator[LineError]:
        """Yield an error for each line with `parts` whose parameters have no product that is
        cut."""
        targets_of_line: dict[int, list[Target]] = {}
        for t in (t for f in self.functions for t in f.targets if "parts" in t.fields):
            targets_of_line.setdefault(t.lines["parts"], []).append(t)
        for number, targets in targets_of_line.items():
            if not any(is_cut(t.value) for t in targets):
                message = (
                    f'expected products of "{targets[0].name}" that are cut in parts, got none'
                )
                yield LineError(number, 0, coded("N6", message))

    def unmatched_error(self, line: PlanLine) -> LineError:
        """Return the error of a line that matches no name, with the nearest names."""
        scope = [f for f in self.functions if line.function in (None, f.f.name)]
        names = {t.name: None for f in scope for t in f.targets if t.kind is line.kind}
        literal = re.sub(r"[*?{}\[\]]", "", line.pattern)
        near = nearest(literal, names, cutoff=0.0)
        where = "the program" if line.function is None else f"@{line.function}"
        message = f'expected a pattern of {line.kind}s of {where}, got "{line.pattern}"'
        use = f"the nearest names are {near}" if near else f"{where} has no {line.kind}s"
        return LineError(line.number, 0, coded("N2", message, use=use))


def _restore_search(plan: LayoutPlan, f: Function) -> None:
    """Leave a function as a search left it, if the plan has a search line of it."""
    for line in plan.lines:
        if isinstance(line, SearchLine) and line.function == f.name:
            resolve_markers(f.block, None)
            expand(f.block, None)
            set_search_result(f.op, dict(line.found))


def _cut_parameters(plan: LayoutPlan, f: Function) -> None:
    """Cut the parameters whose entries have `parts`, in place of their products."""
    if f.mesh is None:
        return
    cuts = cut_products(f.op)
    divided_by = set[str]()
    for line in plan.lines if cuts else ():
        if isinstance(line, PresetLine):
            with suppress(ShardirError):  # reported where the line is expanded
                divided_by |= parts_of(f.op, f.mesh, by_axis(line, f.mesh))
        elif isinstance(line, PlanLine):
            entries = {key: line.says(f.name, NameKind.PARAMETER, key) for key in cuts}
            divided_by |= {
                key for key, entry in entries.items() if entry and entry.parts is not None
            }
    for key in divided_by:
        for cut in cuts[key]:
            cut.split_product()
