"""The ops of Shardy, and its attributes on other ops.

Ops that keep the value and give it a sharding become annotations, or copies of the value with one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from xdsl.dialects.builtin import IntegerAttr, SymbolRefAttr, i64
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh
from shardir.algebra.sdy import manual_axes_from_sdy, shardings_from_sdy
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.build import Module, Value
from shardir.build.attributes import element_type
from shardir.dialects import dist
from shardir.dialects.dist import MeshAttr, StrategyAttr, tensor
from shardir.dialects.dist.manual import ManualOp
from shardir.dialects.text import word
from shardir.frontends.stablehlo.folding import FoldingBuilder
from shardir.frontends.stablehlo.form import HloBlock, HloOp
from shardir.frontends.stablehlo.manual import ManualBuilder
from shardir.frontends.stablehlo.reductions import (
    DeviceContents,
    add_reduction,
    axes_from_sdy,
    contents_of,
    is_reduction_of_parts,
    kind_from_sdy,
)
from shardir.frontends.stablehlo.translation import Refused, ValueFacts
from shardir.frontends.stablehlo.types import DTYPES
from shardir.rewriting.functions import update_signature

Results = Sequence[Value | None]


class BlockImporter(Protocol):
    """What the entries read of the importer of a function."""

    function: FoldingBuilder
    module: Module
    facts: ValueFacts
    manuals: int
    """The number of manual computations so far."""

    contents: dict[SSAValue, DeviceContents]
    """Those of the results of reductions."""

    @property
    def mesh(self) -> Mesh | None: ...
    @property
    def device_ids(self) -> list[int] | None: ...
    def sharding(self, text: str) -> Sharding | None: ...
    def shardings(self, text: str) -> list[Sharding | None]: ...
    def axes(self, text: str, axes: Axes) -> Axes: ...
    def constrained(self, value: Value, sharding: Sharding | None) -> Value: ...
    def translate(
        self, block: HloBlock, arguments: Sequence[Value | None]
    ) -> Sequence[Value | None]: ...
    def within(self, body: FoldingBuilder) -> "BlockImporter": ...
    def erase_unused(self) -> None: ...


DIRECTIONS = ("none", "forward", "backward", "both")
"""Shardy's directions of propagation, by number."""


def copied(importer: BlockImporter, value: Value, direction: str = "none") -> Value:
    """Return a copy of a value, to which layouts propagate in a direction."""
    op = dist.PropagationBarrierOp.create(
        operands=[value.ssa], result_types=[value.type],
        properties={"allowed": word(dist.DirectionAttr, direction)},
        location=importer.function.location(),
    )  # fmt: skip
    importer.function.block.add_op(op)
    return Value(importer.function, op.out)


def _constraint(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    return [importer.constrained(value, importer.sharding(op.attributes["sharding"]))]


def _reshard(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    text = op.attributes.get("sharding") or op.attributes["out_sharding"]
    return [importer.constrained(copied(importer, value), importer.sharding(text))]


def _reduction(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    """A sum of what devices have. Of parts of a sum it is in the global view the value itself."""
    mesh, read = importer.mesh, op.attributes
    text = str(read["out_sharding"])
    out = importer.sharding(text)
    if mesh is None or out is None or isinstance(importer.function, ManualBuilder):
        raise Refused("a reduction over devices, in a manual computation or without a mesh")
    lists = str(read.get("reduction_axes") or read.get("reduce_scatter_axes"))
    axes, kind = axes_from_sdy(lists), kind_from_sdy(str(read.get("reduction_op")))
    axes = importer.axes(text, axes)
    contents = contents_of(value.ssa, mesh, importer.contents)
    if is_reduction_of_parts(value.ssa, contents, kind, axes, mesh):
        whole = copied(importer, value)
    else:
        importer.manuals += 1
        name = f"{importer.function.name}.manual{importer.manuals}"
        body = importer.module.function(name, private=True, kind=ManualBuilder)
        body.on(mesh, {}, importer.device_ids)
        whole = add_reduction(importer.function, value, kind, axes, body)
    result = importer.constrained(whole, out)
    importer.contents[result.ssa] = contents.after(value.ssa, result.ssa, mesh, axes)
    return [result]


def _edge(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    text = op.attributes.get("sharding")
    return [value if text is None else importer.constrained(value, importer.sharding(text))]


def _barrier(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    direction = DIRECTIONS[op.attributes["allowed_direction"]]
    return [value if direction == "both" else copied(importer, value, direction)]


def _group(importer: BlockImporter, op: HloOp, value: Value) -> Results:
    group = IntegerAttr(op.attributes["group_id"], i64)
    importer.function.block.add_op(
        dist.ShardingGroupOp.create(
            operands=[value.ssa], properties={"group": group}, location=importer.function.location()
        )
    )
    return []


def _named(importer: BlockImporter, op: HloOp, *values: Value) -> Results:
    """The body of a named computation, with its shardings."""
    (region,) = op.regions
    results = importer.translate(region, _all_constrained(importer, op, "in_shardings", values))
    if any(v is None for v in results):
        return results
    return _all_constrained(importer, op, "out_shardings", [v for v in results if v is not None])


def _all_constrained(
    importer: BlockImporter, op: HloOp, key: str, values: Sequence[Value]
) -> Sequence[Value]:
    if (text := op.attributes.get(key)) is None:
        return values
    shardings = importer.shardings(text)
    return [importer.constrained(v, s) for v, s in zip(values, shardings, strict=True)]


def _manual(importer: BlockImporter, op: HloOp, *operands: Value) -> Results:
    """The body of a manual computation, as a function of the local view."""
    mesh, read = importer.mesh, op.attributes
    if isinstance(importer.function, ManualBuilder):
        raise Refused("a manual computation within another one")
    if mesh is None:
        raise Refused("a manual computation without a mesh; pass mesh=...")
    manual = manual_axes_from_sdy(read["manual_axes"])
    if free := [a for a, n in mesh.axes if n > 1 and a not in manual]:
        raise Refused(f"the free axes {', '.join(free)}; use shard_map over all axes")
    inputs, outputs = (
        [_border(s) for s in shardings_from_sdy(read[f"{side}_shardings"], mesh)]
        for side in ("in", "out")
    )
    importer.manuals += 1
    name = f"{importer.function.name}.manual{importer.manuals}"
    body = importer.module.function(name, private=True, kind=ManualBuilder)
    inner = importer.within(body)
    body.on(mesh, inner.facts.bounds, importer.device_ids)
    (region,) = op.regions
    with body.at(importer.function.location()):
        entries = enumerate(zip(region.arguments, operands, inputs, strict=True))
        arguments = [
            body.shard(a.name or f"arg{n}", v.shape, v.dtype, layout)
            for n, (a, v, layout) in entries
        ]
        values = [v for v in inner.translate(region, arguments) if v is not None]
        if len(values) < len(outputs):
            return [None for _ in op.results]
        body.returns(*map(body.assemble, values, outputs))
    inner.erase_unused()
    body.finish()
    update_signature(body.func)
    cuts = [tuple(layout.dims for layout in side) for side in (inputs, outputs)]
    types = [tensor(element_type(DTYPES[r.type.element]), r.type.shape) for r in op.results]
    call = ManualOp.create(
        operands=[v.ssa for v in operands], result_types=types,
        properties={
            "callee": SymbolRefAttr(name), "manual_axes": MeshAttr(mesh.axes),
            "strategy": StrategyAttr(Strategy(None, cuts[0], cuts[1])),
        },
        location=importer.function.location(),
    )  # fmt: skip
    importer.function.block.add_op(call)
    return [Value(importer.function, v) for v in call.results]


def _border(sharding: Sharding) -> Layout:
    """Return the layout of an operand or a result of a manual computation: over all axes of a mesh,
    open dimensions and priorities say nothing. Raises Refused where it has unreduced axes."""
    if sharding.layout.partial:
        raise Refused(f"the unreduced axes of [{sharding.layout}]; use psum")
    return sharding.layout


SHARDY: Mapping[str, Callable[..., Results]] = {
    "sdy.sharding_constraint": _constraint,
    "sdy.data_flow_edge": _edge,
    "sdy.func_data_flow_edge": _edge,
    "sdy.propagation_barrier": _barrier,
    "sdy.sharding_group": _group,
    "sdy.named_computation": _named,
    "sdy.manual_computation": _manual,
    **dict.fromkeys(
        ("sdy.reshard", "sdy.all_gather", "sdy.all_slice", "sdy.all_to_all",
         "sdy.collective_permute", "sdy.replicated_to_unreduced", "sdy.sharded_to_unreduced"),
        _reshard,
    ),
    "sdy.all_reduce": _reduction,
    "sdy.reduce_scatter": _reduction,
}  # fmt: skip
"""The ops of Shardy that are read: a function of the importer, the op and its operands."""

RULE = "sdy.sharding_rule"
"""The attribute with the factors of an op."""

_RULE = re.compile(
    r"(?:#sdy\.op_sharding_rule)?<(?P<operands>.*?)->(?P<results>.*?)\s*"
    r"\{(?P<sizes>[^}]*)\}(?P<sets>(?:\s*\w+=\{[^}]*\})*)(?:,\s*custom)?>"
)


def rule_from_sdy(text: str) -> str:
    """Return the text of a rule of a custom op: `(i, j), (j, k) -> (i, k)` of
    `#sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=4, k=2} reduction={j}>`. A factor
    along which devices would have to communicate stays unsharded.

    Raises:
        Refused: a dimension has several factors.
    """
    m = _RULE.fullmatch(text.strip())
    if m is None:
        raise Refused(f"the sharding rule {text}")
    sides = [[d.split(", ") if d else [] for d in re.findall(r"\[([^\]]*)\]", m[s])]
             for s in ("operands", "results")]  # fmt: skip
    factors = dict(re.findall(r"(\w+)=(\d+)", m["sizes"]))
    if compound := [f for side in sides for v in side for f in v if f and f not in factors]:
        raise Refused(f"the sharding rule {text}: dimension {compound[0]} has several factors")
    sets = {key: names.split(", ") for key, names in re.findall(r"(\w+)=\{([^}]*)\}", m["sets"])}
    operands, results = ({f for v in side for f in v} for side in sides)
    summed = {*sets.get("reduction", ())}
    whole = {f for f in operands - results if f not in summed} | (results - operands)
    for key in ("need_replication", "permutation", "blocked_propagation"):
        whole.update(sets.get(key, ()))
    values = [", ".join(f"({', '.join(v)})" for v in side) for side in sides]
    fixed = f" replicate {', '.join(sorted(whole))}" if whole else ""
    return f"{values[0]} -> {values[1]}{fixed}"
