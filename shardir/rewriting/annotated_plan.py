"""The plan that the annotations of a program are, or its layouts after a search.

   %up: tensor<4x6xf32, #dist.layout<@m, [{dp}, {tp}]>> {train.parameter = "mlp.up"}
   %up_1 = dist.redistribute %up {recompute} : ... -> tensor<4x6xf32, #dist.layout<@m, [{}, {tp}]>>
-> "mlp.up" : [{dp}, {tp}], uses [{}, {tp}], recompute
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.plan import LayoutPlan, NameKind, PlanEntry, trimmed
from shardir.algebra.sharding import DimAxes
from shardir.analysis.functions import is_laid_out
from shardir.dialects.dist import RedistributeOp, layout_of
from shardir.dialects.nn import ConvertOp
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import Argument, Role, arguments, is_step, stage_of
from shardir.rewriting.functions import bodies
from shardir.rewriting.marks import RECOMPUTE
from shardir.rewriting.parts import cuts_argument, is_cut, parts
from shardir.syntax.printer import value_names

Named = tuple[NameKind, str, PlanEntry]


def annotated_plan(module: ModuleOp) -> LayoutPlan:
    """Return the plan of the layouts and marks of arguments and, where not all values have layouts,
    of values. Of a name of several functions that of a step counts, or else that of the first. The
    states of a step are those of its parameters."""
    found: dict[NameKind, dict[str, PlanEntry]] = {
        NameKind.INPUT: {}, NameKind.PARAMETER: {}, NameKind.VALUE: {}
    }  # fmt: skip
    for f, block in sorted(bodies(module), key=lambda each: not is_step(each[0])):
        names = value_names(block)
        for kind, name, entry in (*_arguments(f, block, names), *_results(block, names)):
            found[kind].setdefault(name, entry)
    return LayoutPlan.of(found)


def _arguments(f: FuncOp, block: Block, names: dict[SSAValue, str]) -> Iterator[Named]:
    tensors = [
        (v, a) for v, a in zip(block.args, arguments(f), strict=True)
        if isinstance(v.type, TensorType)
    ]  # fmt: skip
    states: defaultdict[str, list[SSAValue]] = defaultdict(list)
    for v, argument in tensors:
        if argument.role is Role.STATE and argument.key:
            states[argument.key.rpartition(".")[0]].append(v)
    for v, argument in tensors:
        if is_step(f) and argument.role is Role.STATE:
            continue
        moves = [use.operation for use in v.uses]
        moved = moves[0] if len(moves) == 1 and isinstance(moves[0], RedistributeOp) else None
        cut = _moved(parts(v)[0]) if argument.is_retained and is_cut(v) else None
        again = RECOMPUTE in argument.attributes or (moved and RECOMPUTE in moved.attributes)
        entry = PlanEntry(
            _dims(layout_of(v)),
            _dims(layout_of(moved.out)) if moved else None,
            _of_states(v, argument, states) if argument.role is Role.PARAMETER else None,
            True if again else None,
            argument.fusion.value.data if isinstance(argument.fusion, IntegerAttr) else None,
            parts=_dims(layout_of(cut.out)) if cut else None,
        )
        kind = NameKind.PARAMETER if argument.is_retained else NameKind.INPUT
        yield kind, argument.key or names[v], entry


def _moved(v: SSAValue) -> RedistributeOp | None:
    """Return the op that redistributes a value, or what it is converted to."""
    for op in (use.operation for use in v.uses):
        if isinstance(op, RedistributeOp):
            return op
        if isinstance(op, ConvertOp):
            return _moved(op.out)
    return None


def _of_states(
    v: SSAValue, argument: Argument, states: Mapping[str, Sequence[SSAValue]]
) -> DimAxes | None:
    """Return the axes of the states of a parameter, where they are not those of the parameter."""
    shape = unsharded_type(v).get_shape()
    mine = [w for w in states.get(argument.key or "", ()) if unsharded_type(w).get_shape() == shape]
    layouts = [argument.state_layout, *map(layout_of, mine)]
    return next((_dims(layout) for layout in layouts if layout not in (None, layout_of(v))), None)


def _dims(layout: Layout | None) -> DimAxes | None:
    return None if layout is None else trimmed(layout)


def _results(block: Block, names: dict[SSAValue, str]) -> Iterator[Named]:
    """Yield the entries of all results, which are empty for those without annotations."""
    for op in () if is_laid_out(block) else block.ops:
        own = not isinstance(op, RedistributeOp) and not cuts_argument(op)
        recompute = (own and RECOMPUTE in op.attributes) or None
        for v in op.results:
            dims = _dims(layout_of(v)) if own and isinstance(v.type, TensorType) else None
            yield NameKind.VALUE, names[v], PlanEntry(dims, recompute=recompute, stage=stage_of(op))
