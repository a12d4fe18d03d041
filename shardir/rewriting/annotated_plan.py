"""The plan of a program's annotations, or of its layouts after a search.

   %up: tensor<4x6xf32, #dist.layout<@m, [{dp}, {tp}]>> {train.parameter = "mlp.up"}
   %up_1 = dist.redistribute %up {recompute} : ... -> tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>
-> "mlp.up" : [{dp}, {tp}], uses [{}, {tp}], recompute

annotated_plan    the annotations: layouts of arguments, and of values unless all have layouts
complete_plan     all decisions: applying the plan restores the program
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.plan import (
    LayoutPlan,
    Line,
    NameKind,
    PlanEntry,
    SearchLine,
    one_if_equal,
    trimmed,
)
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import has_layouts, is_laid_out, is_local_body, name_of
from shardir.dialects.dist import RedistributeOp, layout_of
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import Argument, Role, arguments, is_step, stage_of
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE, search_result
from shardir.rewriting.parts import cuts_argument, is_cut, parts
from shardir.rewriting.uses import names_in_plans, redistribution_of

Entries = dict[NameKind, dict[str, PlanEntry]]
Named = tuple[NameKind, str, PlanEntry]


def annotated_plan(module: ModuleOp) -> LayoutPlan:
    """Return the plan of the layouts and marks of arguments and, unless all values have layouts, of
    values. If several functions have a name, the step decides, or else the first function. The
    states of a step are written with its parameters."""
    entries = _no_entries()
    for f, block in sorted(bodies(module), key=lambda each: not is_step(each[0])):
        names = names_in_plans(block)
        for kind, name, entry in (
            *_argument_entries(f, block, names),
            *_annotated_entries(block, names),
        ):
            entries[kind].setdefault(name, entry)
    return LayoutPlan.of(entries)


def complete_plan(module: ModuleOp) -> LayoutPlan:
    """Return the plan of all layouts, strategies and marks of the functions in the global view that
    have layouts. A line names its function if functions of the source disagree on a name, or if the
    source does not have the function in this form: steps, and functions that a search left."""
    entries_of: dict[str, Entries] = {}
    separate, searched = set[str](), list[Line]()
    for f, block in bodies(module):
        if is_local_body(block) or not has_layouts(block):
            continue
        names, entries = names_in_plans(block), entries_of.setdefault(name_of(f), _no_entries())
        for kind, name, entry in (
            *_argument_entries(f, block, names, True),
            *_result_entries(block, names),
        ):
            entries[kind][name] = entry
        if (result := search_result(f)) is not None:
            searched.append(SearchLine(name_of(f), tuple(result.items())))
        if result is not None or is_step(f):
            separate.add(name_of(f))
    shared = _common_entries(
        [entries for name, entries in entries_of.items() if name not in separate]
    )
    lines = [*LayoutPlan.of(shared).lines]
    for name, entries in entries_of.items():
        differing = {
            kind: {n: PlanEntry() if name not in separate and shared[kind][n].said else e
                   for n, e in named.items()}
            for kind, named in entries.items()
        }  # fmt: skip
        lines += LayoutPlan.of(differing, name).lines
    return LayoutPlan((*searched, *lines))


def _common_entries(functions: Sequence[Entries]) -> Entries:
    """Return the entries on which all functions agree, by name; an empty entry where they
    differ."""
    common = _no_entries()
    for entries in functions:
        for kind, named in entries.items():
            for name, entry in named.items():
                if common[kind].setdefault(name, entry) != entry:
                    common[kind][name] = PlanEntry()
    return common


def _no_entries() -> Entries:
    return {NameKind.INPUT: {}, NameKind.PARAMETER: {}, NameKind.VALUE: {}}


def _argument_entries(
    f: FuncOp, block: Block, names: Mapping[SSAValue, str], states_too: bool = False
) -> Iterator[Named]:
    """Yield the entries of arguments. With `states_too` the states of a step have entries of their
    own; otherwise their parameter's entry covers them."""
    tensors = [
        (v, a) for v, a in zip(block.args, arguments(f), strict=True)
        if isinstance(v.type, TensorType)
    ]  # fmt: skip
    states: defaultdict[str, list[SSAValue]] = defaultdict(list)
    for v, argument in tensors:
        if argument.role is Role.STATE and argument.key:
            states[argument.key.rpartition(".")[0]].append(v)
    for v, argument in tensors:
        if is_step(f) and argument.role is Role.STATE and not states_too:
            continue
        moved = redistribution_of(v)
        cut = parts(v) if argument.is_retained and is_cut(v) else []
        repeats = RECOMPUTE in argument.attributes or (moved and RECOMPUTE in moved.attributes)
        entry = PlanEntry(
            _trimmed(layout_of(v)),
            _trimmed(layout_of(moved.out)) if moved else None,
            _state_layout(v, argument, states)
            if argument.role is Role.PARAMETER and not (states_too and is_step(f))
            else None,
            True if repeats else None,
            argument.fusion.value.data if isinstance(argument.fusion, IntegerAttr) else None,
            parts=_part_layouts(cut),
        )
        kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
        yield kind, argument.key or names[v], entry


def _state_layout(
    v: SSAValue, argument: Argument, states: Mapping[str, Sequence[SSAValue]]
) -> Layout | None:
    """Return the layout of the states of a parameter, if it differs from the parameter's."""
    shape = unsharded_type(v).get_shape()
    mine = [w for w in states.get(argument.key or "", ()) if unsharded_type(w).get_shape() == shape]
    layouts = [argument.state_layout, *map(layout_of, mine)]
    return next(
        (_trimmed(layout) for layout in layouts if layout not in (None, layout_of(v))), None
    )


def _part_layouts(cut: Sequence[SSAValue]) -> tuple[Layout, ...] | None:
    """Return the layouts in which the parts of a parameter are used, if a part is redistributed."""
    moved = [redistribution_of(part) for part in cut]
    used = [layout_of(r.out if r else part) for part, r in zip(cut, moved, strict=True)]
    layouts = [trimmed(layout) for layout in used if layout is not None]
    return one_if_equal(layouts) if any(moved) and len(layouts) == len(cut) else None


def _trimmed(layout: Layout | None) -> Layout | None:
    return None if layout is None else trimmed(layout)


def _annotated_entries(block: Block, names: Mapping[SSAValue, str]) -> Iterator[Named]:
    """Yield the entries of all results; empty ones for results without annotations."""
    for op in () if is_laid_out(block) else block.ops:
        own = not isinstance(op, RedistributeOp) and not cuts_argument(op)
        for v in op.results:
            if v in names:
                yield NameKind.VALUE, names[v], _result_entry(op, v, own)


def _result_entries(block: Block, names: Mapping[SSAValue, str]) -> Iterator[Named]:
    """Yield the entries of all results, with strategies."""
    for op in block.ops:
        strategy = op.strategy.data if isinstance(op, TensorOp) and op.strategy else None
        for v in op.results:
            if v in names and isinstance(v.type, TensorType):
                yield NameKind.VALUE, names[v], _result_entry(op, v, True, strategy)
                strategy = None


def _result_entry(
    op: Operation, v: SSAValue, own: bool, strategy: Strategy | None = None
) -> PlanEntry:
    """Return the entry of a result; without layout and mark unless they are its `own`, not an
    argument's."""
    tensor = own and isinstance(v.type, TensorType)
    return PlanEntry(
        _trimmed(layout_of(v)) if tensor else None,
        recompute=True if own and RECOMPUTE in op.attributes else None,
        stage=stage_of(op),
        strategy=strategy,
    )
