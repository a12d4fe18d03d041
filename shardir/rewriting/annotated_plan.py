"""The plan that the annotations of a program are, or its layouts after a search.

   %up: tensor<4x6xf32, #dist.layout<@m, [{dp}, {tp}]>> {train.parameter = "mlp.up"}
   %up_1 = dist.redistribute %up {recompute} : ... -> tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>
-> "mlp.up" : [{dp}, {tp}], uses [{}, {tp}], recompute

annotated_plan    what people annotate: layouts of arguments, and values where some have none
complete_plan     all that has been decided on: a program with that plan is the same program
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
    """Return the plan of the layouts and marks of arguments and, where not all values have layouts,
    of values. Of a name of several functions that of a step counts, or else that of the first. The
    states of a step are those of its parameters."""
    found = _empty()
    for f, block in sorted(bodies(module), key=lambda each: not is_step(each[0])):
        names = names_in_plans(block)
        for kind, name, entry in (*_arguments(f, block, names), *_results(block, names)):
            found[kind].setdefault(name, entry)
    return LayoutPlan.of(found)


def complete_plan(module: ModuleOp) -> LayoutPlan:
    """Return the plan of all layouts, strategies and marks of the functions in the global view that
    have layouts. Lines are of one function where functions of the source differ in a name, and for
    functions that the source does not have as they are: those that a search left, and steps."""
    of: dict[str, Entries] = {}
    own, searched = set[str](), list[Line]()
    for f, block in bodies(module):
        if is_local_body(block) or not has_layouts(block):
            continue
        names, found = names_in_plans(block), of.setdefault(name_of(f), _empty())
        for kind, name, entry in (*_arguments(f, block, names, True), *_decided(block, names)):
            found[kind][name] = entry
        if (result := search_result(f)) is not None:
            searched.append(SearchLine(name_of(f), tuple(result.items())))
        if result is not None or is_step(f):
            own.add(name_of(f))
    shared = _shared([entries for name, entries in of.items() if name not in own])
    lines = [*LayoutPlan.of(shared).lines]
    for name, entries in of.items():
        rest = {
            kind: {n: PlanEntry() if name not in own and shared[kind][n].said else e
                   for n, e in named.items()}
            for kind, named in entries.items()
        }  # fmt: skip
        lines += LayoutPlan.of(rest, name).lines
    return LayoutPlan((*searched, *lines))


def _shared(functions: Sequence[Entries]) -> Entries:
    """Return the entries of names; empty ones for those that differ among functions."""
    found = _empty()
    for entries in functions:
        for kind, named in entries.items():
            for name, entry in named.items():
                if found[kind].setdefault(name, entry) != entry:
                    found[kind][name] = PlanEntry()
    return found


def _empty() -> Entries:
    return {NameKind.INPUT: {}, NameKind.PARAMETER: {}, NameKind.VALUE: {}}


def _arguments(
    f: FuncOp, block: Block, names: Mapping[SSAValue, str], states_too: bool = False
) -> Iterator[Named]:
    """Yield the entries of arguments; of a step those of the states of its parameters `states_too`,
    which else have those of the parameters."""
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
        again = RECOMPUTE in argument.attributes or (moved and RECOMPUTE in moved.attributes)
        entry = PlanEntry(
            _trimmed(layout_of(v)),
            _trimmed(layout_of(moved.out)) if moved else None,
            _of_states(v, argument, states)
            if argument.role is Role.PARAMETER and not (states_too and is_step(f))
            else None,
            True if again else None,
            argument.fusion.value.data if isinstance(argument.fusion, IntegerAttr) else None,
            parts=_of_parts(cut),
        )
        kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
        yield kind, argument.key or names[v], entry


def _of_states(
    v: SSAValue, argument: Argument, states: Mapping[str, Sequence[SSAValue]]
) -> Layout | None:
    """Return the axes of the states of a parameter, where they are not those of the parameter."""
    shape = unsharded_type(v).get_shape()
    mine = [w for w in states.get(argument.key or "", ()) if unsharded_type(w).get_shape() == shape]
    layouts = [argument.state_layout, *map(layout_of, mine)]
    return next(
        (_trimmed(layout) for layout in layouts if layout not in (None, layout_of(v))), None
    )


def _of_parts(cut: Sequence[SSAValue]) -> tuple[Layout, ...] | None:
    """Return the layouts in which the parts of a parameter are used, where some part is
    redistributed to its own."""
    moved = [redistribution_of(part) for part in cut]
    used = [layout_of(r.out if r else part) for part, r in zip(cut, moved, strict=True)]
    layouts = [trimmed(layout) for layout in used if layout is not None]
    return one_if_equal(layouts) if any(moved) and len(layouts) == len(cut) else None


def _trimmed(layout: Layout | None) -> Layout | None:
    return None if layout is None else trimmed(layout)


def _results(block: Block, names: Mapping[SSAValue, str]) -> Iterator[Named]:
    """Yield the entries of all results, which are empty for those without annotations."""
    for op in () if is_laid_out(block) else block.ops:
        own = not isinstance(op, RedistributeOp) and not cuts_argument(op)
        for v in op.results:
            if v in names:
                yield NameKind.VALUE, names[v], _entry(op, v, own)


def _decided(block: Block, names: Mapping[SSAValue, str]) -> Iterator[Named]:
    """Yield the entries of all results, with strategies."""
    for op in block.ops:
        strategy = op.strategy.data if isinstance(op, TensorOp) and op.strategy else None
        for v in op.results:
            if v in names and isinstance(v.type, TensorType):
                yield NameKind.VALUE, names[v], _entry(op, v, True, strategy)
                strategy = None


def _entry(op: Operation, v: SSAValue, own: bool, strategy: Strategy | None = None) -> PlanEntry:
    """Return the entry of a result; without its layout and its mark if they are not its `own`, but
    those of an argument."""
    tensor = own and isinstance(v.type, TensorType)
    return PlanEntry(
        _trimmed(layout_of(v)) if tensor else None,
        recompute=True if own and RECOMPUTE in op.attributes else None,
        stage=stage_of(op),
        strategy=strategy,
    )
