"""Marks that passes leave for later ones, and the ops that are markers."""

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
"""The attribute of an op, or of an argument, that is computed again in the backward part, and of
its repetition there; and that of a function in which that was chosen, with the figures."""

NO_RECOMPUTE = "off"
"""The value of the option `recompute` with which nothing is computed again."""

SEARCHED = "search"
"""The attribute of a function with the result of a search."""

PRESETS = "presets"
"""The field of that attribute with the product of presets that the plan is of."""

SMALLEST = "smallest"
"""The field of that attribute with the smallest objective that was found, if the plan is of presets
that are faster with overlap."""

BUDGET = "memory"
"""The field of that attribute with the bytes on a device that `choose-recompute` has to keep the
program of the plan to."""


def search_budget(f: FuncOp) -> int | None:
    """Return the bytes on a device that a search relies on `choose-recompute` to keep to."""
    found = f.attributes.get(SEARCHED)
    memory = found.data.get(BUDGET) if isinstance(found, DictionaryAttr) else None
    return memory.value.data if isinstance(memory, IntegerAttr) else None


def recompute_budget(f: FuncOp) -> int | None:
    """Return the bytes on a device that `choose-recompute` kept a function to, if it did."""
    memory = _chosen(f).get("memory")
    return memory.value.data if isinstance(memory, IntegerAttr) else None


def allowed_memory(f: FuncOp, mesh: Mesh) -> int:
    """Return the bytes on a device that passes after `choose-recompute` may use: its budget, or the
    memory of the cluster's devices; 0 if neither is known."""
    return recompute_budget(f) or mesh.cluster_or_default.memory or 0


def recompute_bound(f: FuncOp) -> float | None:
    """Return the lower bound that it found on the seconds of all repetitions within these bytes."""
    bound = _chosen(f).get("bound")
    return bound.value.data if isinstance(bound, FloatAttr) else None


def hosted_bytes(f: FuncOp) -> int:
    """Return the bytes that it keeps in host memory in place of the device's."""
    found = _chosen(f).get("hosted")
    return found.value.data if isinstance(found, IntegerAttr) else 0


def _chosen(f: FuncOp) -> dict[str, Attribute]:
    found = f.attributes.get(RECOMPUTE)
    return dict(found.data) if isinstance(found, DictionaryAttr) else {}


def found_by_search(f: FuncOp) -> dict[str, float]:
    """Return the result that a search reports on a function: the sum of estimated seconds of its
    plan (`objective`), a lower bound on that of any plan (`bound`), and the relative gap between
    both; of a plan of presets also the smallest objective that was found (`smallest`); empty
    without a search."""
    found = f.attributes.get(SEARCHED)
    numbers = found.data.items() if isinstance(found, DictionaryAttr) else ()
    return {k: x.value.data for k, x in numbers if isinstance(x, FloatAttr)}


def search_result(f: FuncOp) -> dict[str, float | str] | None:
    """Return all that a search reports on a function, by plain values, in its order; a mark
    is 1."""
    found = f.attributes.get(SEARCHED)
    if not isinstance(found, DictionaryAttr):
        return None
    values: dict[str, float | str] = {}
    for name, x in found.data.items():
        match x:
            case FloatAttr() | IntegerAttr():
                values[name] = x.value.data
            case StringAttr():
                values[name] = x.data
            case UnitAttr():
                values[name] = 1
    return values


def set_search_result(f: FuncOp, found: Mapping[str, float | str]) -> None:
    """Record on a function what `search_result` returned."""
    values: dict[str, Attribute] = {}
    for name, x in found.items():
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
    """Return the product of presets that the plan of a search is of; empty if it is of none."""
    found = f.attributes.get(SEARCHED)
    presets = found.data.get(PRESETS) if isinstance(found, DictionaryAttr) else None
    return presets.data if isinstance(presets, StringAttr) else ""


class RepeatedRedistributions:
    """Tells which redistributions of a forward part, asked for in their order, are made again for
    the backward part: those with the mark `recompute`, those of arguments with it, and those of a
    redistribution's result that are made again. `gathers`: also one whose result is larger than its
    operand, since a search found that memory needs it."""

    def __init__(self, f: FuncOp, mesh: Mesh):
        args = zip(f.body.block.args, arg_attrs(f), strict=True)
        self._marked: set[SSAValue] = {v for v, attributes in args if RECOMPUTE in attributes}
        self._mesh = mesh

    def __call__(self, op: RedistributeOp, gathers: bool) -> bool:
        found = (
            RECOMPUTE in op.attributes
            or op.value in self._marked
            or (gathers and self._elements(op.out) > self._elements(op.value))
        )
        if found:
            self._marked.add(op.out)
        return found

    def _elements(self, v: SSAValue) -> int:
        layout = layout_of(v)
        assert layout is not None
        return prod(layout.local_shape(self._mesh, unsharded_type(v).get_shape()))


def resolve_marker(op: PropagationBarrierOp | ShardingGroupOp, rewriter: Rewriter) -> None:
    """Erase a barrier or a group, where layouts are decided. A barrier between two layouts becomes
    a redistribution."""
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
