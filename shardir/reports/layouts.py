"""`--explain`: why a value has its layout, and what it and the alternatives cost.

@net at net.ir:6: %y, tensor<4x8xf32>: [@m, [{dp}, {}]]
  dimension 0 over {dp}: by %y = nn.matmul at net.ir:6 from dimension 0 of %x
    dimension 0 of %x: annotated at net.ir:5
  at %y = nn.matmul at net.ir:6 proposals conflicted: i over {dp} 186 us; j over {dp} 373 us
  its edges: 96 B, 186 us
  instead [@m, [{}, {dp}]], as dimension 1 of %w proposes: 144 B, 373 us; 187 us slower

Equal paragraphs of the values of equal layers are one, `x 32`.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.ir import BlockArgument, Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axes, Mesh, axes_text
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.propagation.conflicts import Alternative
from shardir.algebra.propagation.state import Provenance
from shardir.algebra.redistribution import plan_redistribution
from shardir.analysis.functions import name_of, values
from shardir.build.function import hint_of
from shardir.diagnostics import ShardirError, nearest, seconds_text, size_text
from shardir.dialects import dist
from shardir.dialects.locations import describe_maker, describe_op, location_suffix
from shardir.dialects.nn.base import TensorOp, strategy_factors
from shardir.dialects.nn.types import unsharded_type
from shardir.dialects.train import BackwardOp, arguments
from shardir.passes.propagate_strategies import (
    FunctionPropagation,
    PropagateStrategies,
    propagate_functions,
)
from shardir.rewriting.functions import bodies
from shardir.rewriting.placement import converts, itemsizes, strategy_op_sharding

SHOWN = 4
"""The number of steps of a long path that are shown at most, those within the value's layer and one
more, beside the last one."""


class Explanation:
    """Explains the layouts of requested values, each one once."""

    def __init__(self, names: Iterable[str]):
        """`names`: of values, or of modules, such as `layers.0.attn`: of one that is not the name
        of a value, all values within are requested. None: all values."""
        self.names = [n for n in (name.strip().lstrip("%") for name in names) if n]
        self.explained: set[SSAValue] = set()
        self._unknown = dict.fromkeys(self.names)
        self._requested: dict[str, list[str]] = {}
        """The requested names for which each value is explained, by the value's name."""
        self._known: dict[str, None] = {}

    def look_up(self, module: ModuleOp) -> None:
        """Look up the requested names in a module."""
        found: dict[str, None] = {}
        for f, block in bodies(module):
            keys: dict[SSAValue, str | None] = {
                v: a.key for v, a in zip(block.args, arguments(f), strict=True)
            }
            for v in values(block):
                if v.name_hint is not None and isinstance(v.type, TensorType):
                    found[v.name_hint] = None
                    known = keys.get(v) or v.name_hint
                    self._known |= dict.fromkeys(accumulate(known.split("."), "{}.{}".format))
        for name in self._unknown:
            hint = hint_of(name)
            within = [n for n in found if n.startswith(f"{hint}.")]
            for each in [hint] if hint in found else within:
                if name not in self._requested.setdefault(each, []):
                    self._requested[each].append(name)

    def check(self) -> None:
        """Raise ShardirError if there is a requested name without a layout to explain."""
        if self._unknown:
            wanted = ", ".join(self._unknown)
            near = nearest(next(iter(self._unknown)), self._known)
            use = f"; the nearest names are {near}" if near else ""
            raise ShardirError(
                f"expected names of values, or of modules, with layouts, got {wanted}{use}"
            )

    def of(self, v: SSAValue) -> bool:
        """Whether a value is requested and not explained yet."""
        named = not self.names or v.name_hint in self._requested
        return named and isinstance(v.type, TensorType) and v not in self.explained

    def explain(self, v: SSAValue, lines: Collection[str], where: str) -> str:
        self.explained.add(v)
        for name in self._requested.get(v.name_hint or "", ()):
            self._unknown.pop(name, None)
        layout = dist.layout_of(v)
        first = f"{where}{location_suffix(_maker(v), short=True)}: {named(v)}, "
        return "\n  ".join([f"{first}{unsharded_type(v)}: [{layout}]", *lines])

    def propagate(self, module: ModuleOp) -> list[str]:
        """Run propagate-strategies; return a paragraph for each value whose layout it set, equal
        ones of equal layers together."""
        return folded(self._propagate(module))

    def made(self, module: ModuleOp) -> list[str]:
        """Return a paragraph for each value of other passes, whose layout follows from its op."""
        return folded(self._made(module))

    def _propagate(self, module: ModuleOp) -> Iterator[str]:
        self.look_up(module)
        for found in propagate_functions(PropagateStrategies().concerned_functions(module)):
            for v in values(found.block):
                if self.of(v):
                    yield self.explain(v, reasons_of(found, v), f"@{name_of(found.f)}")

    def _made(self, module: ModuleOp) -> Iterator[str]:
        self.look_up(module)
        meshes = dist.meshes_of(module)
        for f, block in bodies(module):
            part = ""
            for op in block.ops:
                if isinstance(op, BackwardOp):
                    part = " (backward)"
                for v in op.results:
                    layout = dist.layout_of(v)
                    if layout is None or dist.is_local(v.type) or not self.of(v):
                        continue
                    if not self.names and not part:
                        continue  # the forward part again, or a redistribution in it
                    lines = list(_follows(op, v, layout, meshes[layout.mesh]))
                    yield self.explain(v, lines, f"@{name_of(f)}{part}")


def reasons_of(p: FunctionPropagation, v: SSAValue) -> list[str]:
    """Return why a value of a propagated function has its layout, and what it and others cost."""
    return [*_paths(p, v), *_costs(p, v)]


NAME = re.compile(r"%[\w.$-]+")

LAYER = re.compile(r"(?<=[\w.])\d+(?=\.)")
"""The number of a layer in the path of a name: `3` of `layers.3.up` and of `layer3.up`."""

ELIDED = re.compile(r"\n +\.\.\. \d+ more \.\.\.")
"""What stands for the steps of a path that are left out."""


def folded(paragraphs: Iterable[str]) -> list[str]:
    """Return paragraphs, with those that differ in the number of a layer, or in how many ops a path
    leaves out, as one: with a star for the number, and their count behind the first line."""
    groups: dict[str, list[str]] = {}
    for text in paragraphs:
        starred = NAME.sub(lambda name: LAYER.sub("*", name[0], count=1), text)
        groups.setdefault(ELIDED.sub("", starred), []).append(text)
    return [_folded(each) for each in groups.values()]


def _folded(paragraphs: Sequence[str]) -> str:
    *_, last = paragraphs
    if len(paragraphs) == 1:
        return last
    starred = NAME.sub(lambda name: LAYER.sub("*", name[0], count=1), last)
    first, *rest = ELIDED.sub("\n    ...", starred).split("\n")
    return "\n".join([f"{first} x {len(paragraphs)}", *rest])


def named(v: SSAValue) -> str:
    return f"%{v.name_hint}" if v.name_hint else describe_maker(v, short=True)


def _paths(p: FunctionPropagation, v: SSAValue) -> Iterator[str]:
    """Yield the ops through which the axes of each dimension came from their annotation, last one
    first, and the conflicts."""
    index, state = p.value_index[v], p.state
    for d, axes in enumerate(state.dims[index]):
        if not axes:
            continue
        (_, _, origin), *others = state.path(index, d)
        yield f"dimension {d} over {axes_text(axes)}: {_origin(p, v, origin)}"
        lines = [
            f"dimension {e} of {named(p.values[w])}: {_origin(p, p.values[w], found)}"
            for w, e, found in others
        ]
        within = [_layer(p.values[w]) == _layer(v) for w, _, _ in others]
        shown = min(SHOWN, within.index(False) + 1 if False in within else SHOWN)
        if len(lines) > shown + 1:
            lines[shown:-1] = [f"... {len(lines) - shown - 1} more ..."]
        yield from (f"  {line}" for line in lines)
    if not any(state.dims[index]):
        closed = state.is_closed(index)
        yield "annotated: replicated" if closed else "no axis was granted: replicated"
    if index in state.value_conflicts:
        yield f"for it proposals conflicted: {_conflict(state.value_conflicts[index])}"
    for n in state.graph.touching[index]:
        if n in state.node_conflicts:
            conflict = _conflict(state.node_conflicts[n])
            yield f"at {describe_op(p.ops[n], short=True)} proposals conflicted: {conflict}"


def _layer(v: SSAValue) -> str:
    """Return the name of a value up to its first number: `layers.3.` of `layers.3.up`."""
    found = LAYER.search(v.name_hint or "")
    return "" if found is None else found.string[: found.end()]


def _origin(p: FunctionPropagation, v: SSAValue, origin: Provenance) -> str:
    if origin.kind == "annotation":
        return f"annotated{location_suffix(_maker(v), short=True)}"
    if origin.kind == "input":
        return "an input that no annotation reaches, split along dimension 0"
    assert origin.node is not None
    op = p.ops[origin.node]
    if origin.kind == "strategy":
        return f"by the strategy of {describe_op(op, short=True)}"
    group = f" (group {op.group.value.data})" if isinstance(op, dist.ShardingGroupOp) else ""
    sources = " and ".join(
        f"dimension {s.dim} of {named(p.values[s.value])}" for s in origin.sources
    )
    sources = sources or "a layout for which a faster one was found"
    return f"by {describe_op(op, short=True)}{group} from {sources}"


def _conflict(alternatives: Sequence[Alternative]) -> str:
    return "; ".join(map(_alternative, alternatives))


def _alternative(alternative: Alternative) -> str:
    granted = ", ".join(
        f"{key if isinstance(key, str) else f'dimension {key}'} over {axes_text(axes)}"
        for key, axes in alternative.granted
    )
    return f"{granted} {seconds_text(alternative.seconds)}"


# ---- costs ----


def _costs(p: FunctionPropagation, v: SSAValue) -> Iterator[str]:
    layout = dist.layout_of(v)
    assert layout is not None
    price = _price(p, v, layout)
    yield f"its edges: {price}"
    for other, (w, e, op) in _alternatives(p, v, layout).items():
        parameter = p.state.is_parameter[p.value_index[w]]
        late = ", a parameter, which proposes after activations" if parameter else ""
        if isinstance(op, dist.PropagationBarrierOp):
            late += f", across {describe_op(op, short=True)}, which allows <{op.allowed.data}>"
        proposal = f"dimension {e} of {named(w)} proposes{late}"
        theirs = _price(p, v, other)
        change = _change(theirs.seconds - price.seconds)
        yield f"instead [{other}], as {proposal}: {theirs}; {change}"


class _EdgePrice(NamedTuple):
    """Bytes that a device receives, and seconds."""

    bytes: int
    seconds: float

    def __str__(self) -> str:
        if not self.bytes:
            return "no communication"
        return f"{size_text(self.bytes)}, {seconds_text(self.seconds)}"


def _change(seconds: float) -> str:
    if not seconds:
        return "as fast"
    return f"{seconds_text(abs(seconds))} {'slower' if seconds > 0 else 'faster'}"


def _price(p: FunctionPropagation, v: SSAValue, layout: Layout) -> _EdgePrice:
    """Return the price of the redistributions at the edges of a value, and of its group, if it had
    this layout and all other values kept theirs."""
    members = p.state.members[p.value_index[v]]
    group = {p.values[w] for w in members}
    received, seconds = 0, 0.0
    for n in dict.fromkeys(n for w in members for n in p.state.graph.touching[w]):
        for w, source, target in _moves(p, p.ops[n], group, layout):
            if source != target:
                t = unsharded_type(w)
                plan = plan_redistribution(
                    t.get_shape(), str(t.element_type), p.mesh, source, target
                )
                received, seconds = received + plan.received_bytes, seconds + plan.seconds
    return _EdgePrice(received, seconds)


def _moves(
    p: FunctionPropagation, op: Operation, group: Collection[SSAValue], layout: Layout
) -> Iterator[tuple[SSAValue, Layout, Layout]]:
    """Yield the values at an op, with their layouts before and after, if `group` had this one."""

    def now(w: SSAValue) -> Layout:
        found = layout if w in group else dist.layout_of(w)
        assert found is not None
        return found

    if isinstance(op, dist.SAME_VALUE):
        yield op.value, now(op.value), now(op.out)
    if not isinstance(op, TensorOp):
        return
    if op.strategy is not None:
        placement = strategy_op_sharding(op, p.mesh)
    else:
        operands, results = tuple(map(now, op.operands)), tuple(map(now, op.results))
        placement = choose_op_sharding(
            strategy_factors(op), operands, results, p.mesh, op.shapes(), itemsizes(op),
            converts=converts(op),
        )  # fmt: skip
    for w, want in zip(op.operands, placement.operands, strict=True):
        yield w, now(w), want
    for w, natural in zip(op.results, placement.results, strict=True):
        yield w, natural, now(w)


def _alternatives(
    p: FunctionPropagation, v: SSAValue, layout: Layout
) -> dict[Layout, tuple[SSAValue, int, Operation]]:
    """Return the layouts of `v` with one more proposal granted, each with the value, the dimension
    and the op of the proposal."""
    found: dict[Layout, tuple[SSAValue, int, Operation]] = {}
    index = p.value_index[v]
    for op in [p.ops[n] for n in p.state.graph.touching[index]]:
        if not isinstance(op, TensorOp | dist.PropagationBarrierOp) or p.state.is_closed(index):
            continue
        if isinstance(op, TensorOp) and op.strategy is not None:
            continue
        factors = op.factors()
        names = (*factors.operands, *factors.results)
        touched = (*op.operands, *op.results)
        mine = next(n for w, n in zip(touched, names, strict=True) if w is v)
        for w, names_of in zip(touched, names, strict=True):
            other = dist.layout_of(w)
            assert other is not None
            for e, (dim, axes) in enumerate(zip(names_of, other.dims, strict=True)):
                assigned, _ = factors.assign(dim, axes, p.mesh)
                for d, mine_of in enumerate(mine):
                    got = factors.compose(mine_of, assigned, p.mesh) if mine_of else None
                    if got and got != layout.dims[d]:
                        new = _with(layout, d, got, p.mesh)
                        found.setdefault(new, (w, e, op))
    return found


def _maker(v: SSAValue) -> Operation | BlockArgument:
    """Return the op that produces a value, or the value if it is an argument."""
    if isinstance(v, BlockArgument):
        return v
    assert isinstance(v.owner, Operation)
    return v.owner


def _with(layout: Layout, d: int, axes: Axes, mesh: Mesh) -> Layout:
    """Return `layout` with dimension d over `axes`, removed from other dimensions."""
    dims = [
        tuple(a for a in other if not any(mesh.overlap(a, b) for b in axes))
        for other in layout.dims
    ]
    return Layout(layout.mesh, tuple(dims)).with_dim(d, axes)


# ---- values of later passes ----


def _follows(op: Operation, v: SSAValue, layout: Layout, mesh: Mesh) -> Iterator[str]:
    """Yield the operands from which the axes of a result come."""
    if not isinstance(op, TensorOp):
        yield f"the layout of {describe_op(op, short=True)}"
        return
    factors = op.factors()
    yield f"follows from {describe_op(op, short=True)}, factors {factors}"
    from_where: dict[str, list[str]] = {}
    for w, names_of in zip(op.operands, factors.operands, strict=True):
        other = dist.layout_of(w)
        for e, (dim, axes) in enumerate(zip(names_of, other.dims if other else (), strict=False)):
            for f, a in factors.assign(dim, axes, mesh)[0].items():
                if a:
                    from_where.setdefault(f, []).append(
                        f"{f} over {axes_text(a)}, as dimension {e} of {named(w)}"
                    )
    i = next(i for i, w in enumerate(op.results) if w is v)
    for d, dim in enumerate(factors.results[i]):
        for line in [f for name in dim for f in from_where.get(name, ())]:
            yield f"dimension {d}: {line}"
    for name in factors.per_result[i]:
        for line in from_where.get(name, ()):
            yield f"partial: {line}"
