"""The ops of Shardy, and its attributes on other ops.

Ops that keep the value and give it a sharding become annotations, or copies of the value with one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from xdsl.dialects.builtin import IntegerAttr, SymbolRefAttr, i64
from xdsl.ir import SSAValue

from shardir.algebra.factors import Factors
from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.sdy import manual_axes_from_sdy
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
from shardir.rewriting.free_axes import free_axes
from shardir.rewriting.functions import update_signature
from shardir.syntax.source import warn

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
    def manual_axes(self, text: str, names: Sequence[str]) -> list[str]: ...
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
    axes, kind = axes_from_sdy(lists), kind_from_sdy(read.get("reduction_op"))
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
    if mesh is None:
        raise Refused("a manual computation without a mesh; pass mesh=...")
    texts = [str(read[f"{side}_shardings"]) for side in ("in", "out")]
    manual = importer.manual_axes("".join(texts), manual_axes_from_sdy(read["manual_axes"]))
    inputs, outputs = ([_border(s) for s in importer.shardings(text)] for text in texts)
    if isinstance(importer.function, ManualBuilder):
        return _nested(importer, op, operands, manual, inputs, outputs)
    for layout in (*inputs, *outputs):
        if any(a.name in manual and a not in mesh.names for a in layout.used):
            raise Refused(f"parts of axes of mesh {mesh} in [{layout}]; write it on one mesh")
    importer.manuals += 1
    name = f"{importer.function.name}.manual{importer.manuals}"
    body = importer.module.function(name, private=True, kind=ManualBuilder)
    inner = importer.within(body)
    body.on(mesh, inner.facts.bounds, importer.device_ids)
    (region,) = op.regions
    with body.at(importer.function.location()):
        entries = enumerate(zip(region.arguments, operands, inputs, strict=True))
        arguments = [
            body.shard(a.name or f"arg{n}", v.shape, v.dtype, _over(layout, manual))
            for n, (a, v, layout) in entries
        ]
        values = [v for v in inner.translate(region, arguments) if v is not None]
        if len(values) < len(outputs):
            return [None for _ in op.results]
        for v in values:
            if free := [a for a in body.varies_over(v) if a.name not in manual]:
                raise Refused(f"a result that differs along the free axis {free[0]}; name it")
        body.returns(*(body.assemble(v, _over(l, manual))
                       for v, l in zip(values, outputs, strict=True)))  # fmt: skip
    inner.erase_unused()
    operand_cuts, result_cuts, warnings = _over_free_axes(body, manual, operands, inputs, outputs)
    body.finish()
    update_signature(body.func)
    types = [tensor(element_type(DTYPES[r.type.element]), r.type.shape) for r in op.results]
    over = tuple((a, n) for a, n in mesh.axes if a in manual or n == 1)
    call = ManualOp.create(
        operands=[v.ssa for v in operands], result_types=types,
        properties={
            "callee": SymbolRefAttr(name), "manual_axes": MeshAttr(over),
            "strategy": StrategyAttr(Strategy(None, operand_cuts, result_cuts)),
        },
        location=importer.function.location(),
    )  # fmt: skip
    importer.function.block.add_op(call)
    for message in warnings:
        warn(call, message)
    return [Value(importer.function, v) for v in call.results]


def _over(layout: Layout, axes: Sequence[str]) -> Layout:
    """Return a layout over some of its axes."""
    return replace(layout, dims=tuple(tuple(a for a in d if a.name in axes) for d in layout.dims))


Cuts = tuple[tuple[Axes, ...], ...]


def _over_free_axes(
    body: ManualBuilder, manual: Sequence[str], operands: Sequence[Value],
    inputs: Sequence[Layout], outputs: Sequence[Layout],
) -> tuple[Cuts, Cuts, list[str]]:  # fmt: skip
    """Return the axes of the dimensions of operands and results, and warnings. Free axes split
    dimensions that the body maps: those which shardings name, otherwise the first one."""
    mesh = body.mesh
    axes = free_axes(mesh, manual)
    if not axes:
        return tuple(l.dims for l in inputs), tuple(l.dims for l in outputs), []
    free = body.free_dimensions()
    arguments, results = free.borders
    own = [dist.sharding_of(v.ssa) for v in operands]
    wanted = [(v, dims) for v, dims in body.wanted if v.uses]
    hints: list[tuple[str, Sequence[SSAValue], list[tuple[Axes, ...]]]] = [
        ("operand", arguments, [l.dims for l in inputs]),
        ("operand", arguments, [() if s is None else s.layout.dims for s in own]),
        ("result", results, [l.dims for l in outputs]),
        ("constrained value", [v for v, _ in wanted], [dims for _, dims in wanted]),
    ]
    warnings = []
    for what, values, dims in hints:
        for i, d in free.grant(values, dims, manual):
            split = axes_text(tuple(a for a in dims[i][d] if a.name not in manual))
            warnings.append(f"dimension {d} of {what} {i} of shard_map is not split over {split}: "
                            "its body needs it whole, or another one is")  # fmt: skip
    if rest := free.grant_rest(axes):
        warnings.append(
            f"devices along {axes_text(rest)} compute the same in shard_map, whose body has no "
            "dimension to split over it; let the axes of shard_map have it"
        )
    return tuple(map(free.cuts, arguments)), tuple(map(free.cuts, results)), warnings


def _nested(
    importer: BlockImporter, op: HloOp, operands: Sequence[Value], manual: Sequence[str],
    inputs: Sequence[Layout], outputs: Sequence[Layout],
) -> Results:  # fmt: skip
    """A manual computation in the body of another one: over further axes, along which the values
    around it are equal."""
    body = importer.function
    assert isinstance(body, ManualBuilder)
    (region,) = op.regions
    entered = [body.enter(v, _over(l, manual)) for v, l in zip(operands, inputs, strict=True)]
    values = importer.translate(region, entered)
    return [
        None if v is None else body.leave(v, _over(l, manual), manual)
        for v, l in zip(values, outputs, strict=True)
    ]


def _border(sharding: Sharding | None) -> Layout:
    """Return the layout of an operand or a result of a manual computation, over whose axes open
    dimensions and priorities say nothing. Raises Refused where it has unreduced axes, or is on a
    mesh of one device or none."""
    if sharding is None:
        raise Refused("a manual computation on a mesh of one device or none")
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


FACTOR = re.compile(r"[a-z](?:_\d+)?")


class SdyRule(NamedTuple):
    """The factors of an op, as Shardy's text has them.

    Attributes:
        operands, results: the factors of each dimension.
        sizes: of the factors, as digits.
        reduction: the factors that are summed.
        whole: those along which devices would have to communicate.
    """

    operands: list[list[list[str]]]
    results: list[list[list[str]]]
    sizes: dict[str, str]
    reduction: set[str]
    whole: set[str]

    @staticmethod
    def parse(text: str) -> "SdyRule":
        """Raises Refused if the text is no rule."""
        m = _RULE.fullmatch(text.strip())
        if m is None:
            raise Refused(f"the sharding rule {text}")
        operands, results = (
            [[FACTOR.findall(d) for d in dims.split(", ")] if dims else []
             for dims in re.findall(r"\[([^\]]*)\]", m[side])]
            for side in ("operands", "results")
        )  # fmt: skip
        sets = {k: {*names.split(", ")} for k, names in re.findall(r"(\w+)=\{([^}]*)\}", m["sets"])}
        sides = ({f for v in side for d in v for f in d} for side in (operands, results))
        (read, written), reduction = sides, sets.pop("reduction", set[str]())
        whole = set.union((read - written) - reduction, written - read, *sets.values())
        sizes = dict(re.findall(r"(\w+)=(\d+)", m["sizes"]))
        return SdyRule(operands, results, sizes, reduction, whole)


def rule_from_sdy(text: str) -> str:
    """Return the text of a rule of a custom op: `(i, j), (j, k) -> (i, k)` of
    `#sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=4, k=2} reduction={j}>`. A factor
    along which devices would have to communicate stays unsharded.

    Raises:
        Refused: the text is no rule.
    """
    rule = SdyRule.parse(text)
    sides = [[[" ".join(d) for d in v] for v in side] for side in (rule.operands, rule.results)]
    values = [", ".join(f"({', '.join(v)})" for v in side) for side in sides]
    fixed = f" replicate {', '.join(sorted(rule.whole))}" if rule.whole else ""
    alone = {d for side in sides for v in side for d in v}
    merged = [f"{f} = {n}" for f, n in rule.sizes.items() if f not in alone]
    return f"{values[0]} -> {values[1]}{fixed}" + (f" sizes {', '.join(merged)}" if merged else "")


def held_dims(text: str, own: Factors) -> list[list[int]]:
    """Return the dimensions of each operand, then of each result, that a rule leaves unsharded, of
    an op with factors of its own. A rule may hold back factors; it can add none.

        own (i, j) -> (j, i)    ([i, j])->([j, i]) {i=8, j=4} need_replication={j}    [1], [0]

    Raises:
        Refused: the text is no rule of such an op, or allows what the op's own factors do not.
    """
    rule = SdyRule.parse(text)
    values, own_values = [*rule.operands, *rule.results], [*own.operands, *own.results]
    if [len(v) for v in values] != [len(v) for v in own_values]:
        raise Refused(f"a sharding rule of other operands or dimensions, {text}")
    sizes = {f: int(n) for f, n in rule.sizes.items()}
    places, own_places = _places(values, sizes), _places(own_values, dict(own.sizes))
    is_whole = own.replicate | own.moved
    free: set[tuple[int, int, int]] = set()
    for f, at in places.items():
        if f in rule.whole or sizes.get(f) == 1:
            continue
        same = [g for g, own_at in own_places.items() if own_at == at and g not in is_whole]
        if not same or (same[0] in own.reduced) != (f in rule.reduction):
            raise Refused(
                f"a sharding rule that splits its factor {f}, as the op's own factors, {own}, do "
                "not; such a rule may only leave factors unsharded (need_replication)"
            )
        free |= {(i, d, n) for i, d, n, _ in at}
    return [
        [d for d, dim in enumerate(v)
         if any(own.size(f) > 1 and (i, d, n) not in free for n, f in enumerate(dim))]
        for i, v in enumerate(own_values)
    ]  # fmt: skip


def _places(
    values: Sequence[Sequence[Sequence[str]]], sizes: Mapping[str, int]
) -> dict[str, set[tuple[int, int, int, int]]]:
    """Return where each factor is: value, dimension, place in it; and its size."""
    places: dict[str, set[tuple[int, int, int, int]]] = {}
    for i, v in enumerate(values):
        for d, dim in enumerate(v):
            for n, f in enumerate(dim):
                places.setdefault(f, set()).add((i, d, n, sizes.get(f, 0)))
    return places


def hold(importer: BlockImporter, value: Value, dims: Sequence[int]) -> None:
    """Leave dimensions of a value unsharded; the others take what propagates."""
    mesh, rank = importer.mesh, len(value.shape)
    if dims and mesh is not None:
        is_open = frozenset(range(rank)) - {*dims}
        importer.constrained(value, Sharding(replicated(mesh.name, rank), open=is_open))
