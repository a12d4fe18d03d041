"""Marks that passes leave for later passes, and the ops that are markers."""

from collections.abc import Mapping
from math import prod

from xdsl.dialects.builtin import DictionaryAttr, FloatAttr, IntegerAttr, StringAttr, UnitAttr
from xdsl.dialects.func import FuncOp
from xdsl.ir import Attribute, Block, SSAValue

from shardir.algebra.mesh import Mesh
from shardir.dialects.blocks import of_kind, ops_of
from shardir.dialects.dist import PropagationBarrierOp, RedistributeOp, ShardingGroupOp, layout_of
from shardir.dialects.nn.properties import float_attr, int_attr
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import arg_attrs
from shardir.rewriting.rewriter import Rewriter, erase

RECOMPUTE = "recompute"
"""The attribute of an op or argument that is computed again in the backward part, and of its
repetition; on a function, the numbers of the choice."""

NO_RECOMPUTE = "off"
"""The value of the option `recompute` that turns recompute off."""

SEARCHED = "search"
"""The attribute of a function with the result of a search."""

PRESETS = "presets"
"""The field of that attribute with the product of presets of the plan."""

SMALLEST = "smallest"
"""The field of that attribute with the smallest objective found, if the plan is of presets that are
faster with overlap."""

BUDGET = "memory"
"""The field of that attribute with the bytes on a device to which `choose-recompute` has to keep
the program of the plan."""


def search_budget(f: FuncOp) -> int | None:
    """Return the bytes on a device to which `choose-recompute` has to keep the plan of a search."""
    result = f.attributes.get(SEARCHED)
    memory = result.data.get(BUDGET) if isinstance(result, DictionaryAttr) else None
    return memory.value.data if isinstance(memory, IntegerAttr) else None


def recompute_budget(f: FuncOp) -> int | None:
    """Return the bytes on a device to which `choose-recompute` kept a function; None if it did
    not."""
    memory = _recompute_choice(f).get("memory")
    return memory.value.data if isinstance(memory, IntegerAttr) else None


def allowed_memory(f: FuncOp, mesh: Mesh) -> int:
    """Return the bytes on a device that passes after `choose-recompute` may use: its budget, or the
    memory of the cluster's devices; 0 if neither is known."""
    return recompute_budget(f) or mesh.cluster_or_default.memory or 0


def recompute_bound(f: FuncOp) -> float | None:
    """Return the lower bound of `choose-recompute` on the seconds of all repetitions within its
    budget."""
    bound = _recompute_choice(f).get("bound")
    return bound.value.data if isinstance(bound, FloatAttr) else None


def hosted_bytes(f: FuncOp) -> int:
    """Return the bytes that `choose-recompute` keeps in host memory instead of the device's."""
    hosted = _recompute_choice(f).get("hosted")
    return hosted.value.data if isinstance(hosted, IntegerAttr) else 0


def _recompute_choice(f: FuncOp) -> dict[str, Attribute]:
    choice = f.attributes.get(RECOMPUTE)
    return dict(choice.data) if isinstance(choice, DictionaryAttr) else {}


def found_by_search(f: FuncOp) -> dict[str, float]:
    """Return the numbers of a search on a function: the estimated seconds of its plan
    (`objective`), a lower bound for any plan (`bound`), and their relative gap; for a plan of
    presets also the smallest objective (`smallest`). Empty without a search."""
    result = f.attributes.get(SEARCHED)
    numbers = result.data.items() if isinstance(result, DictionaryAttr) else ()
    return {k: x.value.data for k, x in numbers if isinstance(x, FloatAttr)}


def search_result(f: FuncOp) -> dict[str, float | str] | None:
    """Return the whole record of a search on a function as plain values, in order; a mark is 1."""
    result = f.attributes.get(SEARCHED)
    if not isinstance(result, DictionaryAttr):
        return None
    values: dict[str, float | str] = {}
    for name, x in result.data.items():
        match x:
            case FloatAttr() | IntegerAttr():
                values[name] = x.value.data
            case StringAttr():
                values[name] = x.data
            case UnitAttr():
                values[name] = 1
    return values


def set_search_result(f: FuncOp, result: Mapping[str, float | str]) -> None:
    """Record on a function the numbers that `search_result` returns."""
    values: dict[str, Attribute] = {}
    for name, x in result.items():
        match x:
            case str():
                values[name] = StringAttr(x)
            case float():
                values[name] = float_attr(x)
            case int() if name == BUDGET:
                values[name] = int_attr(x)
            case _:
                values[name] = UnitAttr()
    f.attributes[SEARCHED] = DictionaryAttr(values)


def presets_of(f: FuncOp) -> str:
    """Return the product of presets of a searched plan; empty if it has none."""
    result = f.attributes.get(SEARCHED)
    presets = result.data.get(PRESETS) if isinstance(result, DictionaryAttr) else None
    return presets.data if isinstance(presets, StringAttr) else ""


class RepeatedRedistributions:
    """Tells whether a redistribution of a forward part is repeated for the backward part; called on
    redistributions in order.

    A redistribution is repeated if it has the mark `recompute`, or if its operand is a marked
    argument or the result of a repeated redistribution. With `gathers` it is also repeated if its
    result is larger than its operand, since a search found that memory needs it.
    """

    def __init__(self, f: FuncOp, mesh: Mesh):
        args = zip(f.body.block.args, arg_attrs(f), strict=True)
        self._marked: set[SSAValue] = {v for v, attributes in args if RECOMPUTE in attributes}
        self._mesh = mesh

    def __call__(self, op: RedistributeOp, gathers: bool) -> bool:
        is_repeated = (
            RECOMPUTE in op.attributes
            or op.value in self._marked
            or (gathers and self._local_elements(op.out) > self._local_elements(op.value))
        )
        if is_repeated:
            self._marked.add(op.out)
        return is_repeated

    def _local_elements(self, v: SSAValue) -> int:
        layout = layout_of(v)
        assert layout is not None
        return prod(layout.local_shape(self._mesh, unsharded_type(v).get_shape()))


def resolve_marker(op: PropagationBarrierOp | ShardingGroupOp, rewriter: Rewriter) -> None:
    """Erase a barrier or a group after layouts are decided. A barrier between two layouts becomes a
    redistribution."""
    if isinstance(op, ShardingGroupOp):
        erase(op)
        return
    layout = layout_of(op.out)
    value = op.value if layout is None else rewriter.redistribute(op.value, layout)
    op.out.replace_all_uses_with(value)
    erase(op)


def resolve_markers(block: Block, mesh: Mesh | None) -> None:
    """Erase all barriers and groups of a block; without a mesh there are no layouts either."""
    rewriter = Rewriter(mesh)
    for op in of_kind(ops_of(block), PropagationBarrierOp, ShardingGroupOp):
        resolve_marker(op, rewriter.before(op))
