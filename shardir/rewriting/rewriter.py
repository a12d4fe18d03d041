"""The rewriter: inserts new ops at a point of a block, and replaces existing ops.

    rewriter = Rewriter(mesh)
    rewriter.before(op)                                  # the insertion point, and the location
    y = rewriter.value(nn.ReluOp, x)                     # types inferred, placed, operands moved
    new = rewriter.create(kind, operands, types)         # exactly this op
    rewriter.replace(op, new.results)                    # names handed on, uses redirected

Without a mesh values have no layouts, and nothing is placed.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from xdsl.dialects.builtin import LocationAttr, TensorType
from xdsl.ir import Attribute, Block, BlockArgument, Operation, Region, SSAValue

from shardir.algebra.layout import Layout, replicated
from shardir.algebra.mesh import Mesh
from shardir.algebra.op_sharding import choose_op_sharding
from shardir.algebra.redistribution import estimated_seconds
from shardir.compat.xdsl import name_of, type_of
from shardir.dialects.dist import RedistributeOp, StrategyAttr, laid_out, layout_of, with_layout
from shardir.dialects.nn.base import (
    Composite,
    Props,
    TensorOp,
    decomposes,
    is_in_parts,
    rule_of,
)
from shardir.dialects.nn.repeated import repeated, repeated_layout
from shardir.dialects.nn.types import itemsize, unsharded_type, without_layout
from shardir.dialects.signatures import SignatureMemo
from shardir.dialects.train import available_after
from shardir.rewriting.spellings import Spellings

OpT = TypeVar("OpT", bound=Operation)

placements = SignatureMemo()
"""For each signature, the layouts to which operands are moved, and the types of results."""
inferred = SignatureMemo()
"""For each signature, the inferred types of results."""


class Rewriter(Spellings):
    """Makes ops at a point of a block, and replaces ops by them."""

    def __init__(self, mesh: Mesh | None = None, block: Block | None = None):
        self.mesh = mesh
        self.block = block
        self.next: Operation | None = None
        """The op before which new ops are inserted; None: at the end of the block."""
        self.location: LocationAttr | None = None
        """The location of new ops: the location of the op that causes them."""
        self.attributes: dict[str, Attribute] = {}
        """The attributes of new tensor ops."""
        self.name_hint: str | None = None
        """The name of the first result of new tensor ops."""
        self.stays = False
        """Whether new ops run on the host if all their operands are there."""
        self._moved: dict[tuple[SSAValue, Layout], SSAValue] = {}
        self._complete: dict[SSAValue, SSAValue] = {}

    # ---- the insertion point ----

    def before(self, op: Operation) -> "Rewriter":
        """Set the insertion point before an op; new ops get its location."""
        self.block, self.next, self.location = op.parent, op, op.location
        return self

    def after(self, op: Operation) -> "Rewriter":
        """Set the insertion point where the results of an op are available; new ops get its
        location."""
        self.block, self.next, self.location = op.parent, available_after(op).next_op, op.location
        return self

    def insert(self, op: Operation) -> None:
        """Insert an op at the insertion point."""
        assert self.block is not None
        if self.next is None:
            self.block.add_op(op)
        else:
            self.block.insert_op_before(op, self.next)

    def move(self, op: Operation) -> None:
        """Move an op to the insertion point."""
        op.detach()
        self.insert(op)

    # ---- any op ----

    def create(
        self,
        kind: type[OpT],
        operands: Sequence[SSAValue],
        types: Sequence[Attribute],
        properties: Mapping[str, Attribute] | None = None,
        attributes: Mapping[str, Attribute] | None = None,
        names: Sequence[SSAValue] = (),
        regions: Sequence[Region] = (),
    ) -> OpT:
        """Insert a new op with these operands and result types; results are named like `names`."""
        new = kind.create(
            operands=operands, result_types=types, properties=properties or {},
            attributes=attributes or {}, location=self.location, regions=regions,
        )  # fmt: skip
        for result, value in zip(new.results, names, strict=False):
            if name_of(value) is not None:
                result.name_hint = value.name_hint
        self.insert(new)
        return new

    def copy(
        self,
        op: OpT,
        operands: Sequence[SSAValue] | None = None,
        types: Sequence[Attribute] | None = None,
        properties: Mapping[str, Attribute] | None = None,
    ) -> OpT:
        """Insert a copy of an op, with new operands, types or properties where they are passed."""
        return self.create(
            type(op),
            op.operands if operands is None else operands,
            [v.type for v in op.results] if types is None else types,
            op.properties if properties is None else properties,
            op.attributes,
            op.results,
            [region.clone() for region in op.regions],
        )

    @staticmethod
    def replace(op: Operation, values: Sequence[SSAValue]) -> None:
        """Replace the results of an op by values, which get its names and uses, and erase the
        op."""
        for old, new in zip(op.results, values, strict=True):
            old.replace_all_uses_with(new)
        erase(op)

    def erase_unused(self, first: Operation | None, end: Operation | None) -> None:
        """Erase the tensor ops and redistributions after `first` (None: from the first op on) and
        before `end` whose results have no uses."""
        assert self.block is not None
        op = self.block.last_op if end is None else end.prev_op
        while op is not first and op is not None:
            before = op.prev_op
            if isinstance(op, TensorOp | RedistributeOp) and all(
                v.first_use is None for v in op.results
            ):
                if isinstance(op, RedistributeOp):
                    self._moved.pop((op.value, self.layout(op.out)), None)
                erase(op)
            op = before

    # ---- tensor ops ----

    def op(
        self,
        kind: type[TensorOp],
        *operands: SSAValue,
        props: Props | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
        regions: Sequence[Region] = (),
    ) -> TensorOp:
        props = props or {}
        hint = None
        if self.mesh is not None:
            hint = like if isinstance(like, Layout) or like is None else self.layout(like)
            if self._complete:
                operands = tuple([self._complete.get(v, v) for v in operands])
        result_types = (result,) if result is None or isinstance(result, TensorType) else result
        parts = (
            kind,
            self.mesh,
            hint,
            self.stays,
            *[type_of(v) for v in operands],
            None,
            *result_types,
        )
        moved, outs = placements.get_or(
            parts, props, lambda: self._placement(kind, operands, result, props, hint)
        )
        if moved:
            operands = tuple(
                [v if to is None else self.redistribute(v, to)
                 for v, to in zip(operands, moved, strict=True)]
            )  # fmt: skip
        new = self.create(kind, operands, outs, props, self.attributes, regions=regions)
        if self.name_hint is not None:
            new.results[0].name_hint = self.name_hint
        return new

    def _placement(
        self,
        kind: type[TensorOp],
        operands: Sequence[SSAValue],
        result: TensorType | Sequence[TensorType] | None,
        props: Props,
        hint: Layout | None,
    ) -> tuple[tuple[Layout | None, ...], list[TensorType]]:
        """Return the layouts to which operands are moved (None for an operand that stays; empty if
        all stay), and the types of the results."""
        types = [unsharded_type(v) for v in operands]
        outs = _result_types(kind, types, props, result)
        if self.mesh is None:
            return (), outs
        factors = rule_of(kind, tuple(types), tuple(outs), props)
        layouts = tuple(self.layout(v) for v in operands)
        if kind.KEEPS_STRATEGY and isinstance(strategy := props.get("strategy"), StrategyAttr):
            placement = strategy.data.op_sharding(factors, self.mesh)
            wanted = zip(layouts, placement.operands, strict=True)
            return tuple(None if have == want else want for have, want in wanted), [
                laid_out(t.element_type, t.get_shape(), l)
                for t, l in zip(outs, placement.results, strict=True)
            ]
        hints = tuple(
            hint.complete if hint is not None and len(hint.dims) == len(t.get_shape()) else None
            for t in outs
        )
        if not operands and hint is None:
            hints = tuple(replicated(self.mesh.name, len(t.get_shape())) for t in outs)
        shapes, sizes = zip(*((t.get_shape(), itemsize(t)) for t in (*types, *outs)), strict=True)
        converts = len({t.element_type for t in (*types, *outs)}) > 1
        placement = choose_op_sharding(
            factors, layouts, hints, self.mesh, shapes, sizes, converts=converts
        )
        result_layouts = tuple(
            h or r.on_host if self.stays else h
            for h, r in zip(hints, placement.results, strict=True)
        )
        if kind.runs_on_host(layouts, result_layouts):
            placement = placement.on_host
        wanted = zip(layouts, placement.operands, strict=True)
        moved = tuple(None if have == want else want for have, want in wanted)
        return moved if any(moved) else (), [
            laid_out(t.element_type, t.get_shape(), l)
            for t, l in zip(outs, placement.results, strict=True)
        ]

    def results(
        self,
        kind: type[TensorOp],
        *operands: SSAValue,
        props: Props | None = None,
        result: TensorType | Sequence[TensorType] | None = None,
        like: SSAValue | Layout | None = None,
    ) -> Sequence[SSAValue]:
        decomposed = issubclass(kind, Composite)
        if not decomposed and (self.mesh is None or not decomposes(kind)):
            return self.op(kind, *operands, props=props, result=result, like=like).results
        types = tuple(unsharded_type(v) for v in operands)
        outs = _result_types(kind, types, props or {}, result)
        if not decomposed:
            factors = rule_of(kind, types, tuple(outs), props or {})
            decomposed = is_in_parts(kind, factors, [self.layout(v) for v in operands])
        if not decomposed:
            return self.op(kind, *operands, props=props, result=result, like=like).results
        op = kind.create(operands=operands, result_types=outs, properties=props or {})
        values = op.parts(self)
        op.erase()
        assert values is not None
        return values

    # ---- layouts ----

    def layout(self, value: SSAValue) -> Layout:
        assert self.mesh is not None
        return layout_of(value) or replicated(
            self.mesh.name, len(unsharded_type(value).get_shape())
        )

    def redistribute(self, value: SSAValue, layout: Layout) -> SSAValue:
        if self.mesh is None or (have := self.layout(value)) is layout or have == layout:
            return value
        if (moved := self._moved.get((value, layout))) is not None:
            return moved
        new = self.redistribution(value, layout)
        self._moved[value, layout] = new
        return new

    def redistribution(self, value: SSAValue, layout: Layout) -> SSAValue:
        """Insert a new redistribution of the value. A broadcast's result is redistributed through
        its operand, if that is smaller. Hosts compute scalars of states themselves: they need a
        copy of the count of steps, but not of the numbers computed from it."""
        new, op = with_layout(unsharded_type(value), layout), value.owner
        if layout.host and isinstance(op, TensorOp) and is_of_scalars(value):
            operands = [self.redistribute(v, layout) for v in op.operands]
            copy = self.create(type(op), operands, [new], op.properties, op.attributes, [value])
            return copy.results[0]
        if (smaller := self._broadcast_source(value, layout)) is not None:
            assert isinstance(op, Operation)
            x, properties = self.redistribute(*smaller), {**op.properties}
            properties.pop("strategy", None)
            return self.create(type(op), [x], [new], properties, op.attributes, [value]).results[0]
        return self.create(RedistributeOp, [value], [new], names=[value]).out

    def _broadcast_source(self, value: SSAValue, layout: Layout) -> tuple[SSAValue, Layout] | None:
        """Return the operand of a broadcast, and its layout that broadcasts to `layout`; None if
        the value is no broadcast or was placed in a different layout."""
        if self.mesh is None or (broadcast := repeated(value)) is None:
            return None
        x, dims = broadcast
        is_broadcast_layout = self.layout(x) == repeated_layout(self.layout(value), dims)
        return (x, repeated_layout(layout, dims)) if is_broadcast_layout else None

    def complete(self, value: SSAValue) -> SSAValue:
        """Return a value without partial values to reduce. A scalar is reduced to device memory,
        where devices communicate."""
        if self.mesh is None or not (layout := self.layout(value)).partial or layout.varying:
            return value
        complete = layout.complete
        return self.redistribute(value, complete if layout.dims else complete.on_device)

    def redistribution_seconds(self, value: SSAValue, layout: Layout) -> float:
        """Return the estimated seconds to redistribute a value to a layout; 0 if this has been
        done."""
        have, t = self.layout(value), unsharded_type(value)
        if self.mesh is None or have == layout or (value, layout) in self._moved:
            return 0.0
        if (smaller := self._broadcast_source(value, layout)) is not None:
            return self.redistribution_seconds(*smaller)
        return estimated_seconds(t.get_shape(), self.mesh, have, layout, itemsize(t))

    def record_known(self, value: SSAValue, same: SSAValue) -> None:
        """Record `same` as the value in a second layout: it is not redistributed to that layout
        again. If `same` is the reduced form of a partial value, ops use it. A value that varies
        and its reduction are two values."""
        if self.layout(value).varying != self.layout(same).varying:
            return
        self._moved.setdefault((value, self.layout(same)), same)
        if self.layout(value).partial and not self.layout(same).partial:
            self._complete.setdefault(value, same)


def is_of_scalars(v: SSAValue) -> bool:
    """Whether a value is a scalar that depends only on scalar arguments."""
    layout, op = layout_of(v), v.owner
    if layout is None or layout.dims or layout.partial:
        return False
    if not isinstance(op, TensorOp):
        return isinstance(v, BlockArgument)
    return len(op.results) == 1 and all(map(is_of_scalars, op.operands))


def erase(op: Operation) -> None:
    """Detach an unused op from its block and erase it. Unlike in xDSL, no placeholder values are
    made for unused results."""
    op.detach()
    for v in op.results:
        if v.first_use is not None:
            op.erase()
            return
    op.drop_all_references()


def _result_types(
    kind: type[TensorOp],
    operands: Sequence[TensorType],
    props: Props,
    result: TensorType | Sequence[TensorType] | None,
) -> list[TensorType]:
    """Return the types of an op's results: as passed, or inferred."""
    if result is None:
        return inferred.get_or((kind, *operands), props, lambda: kind.infer(operands, props))
    return [*map(without_layout, [result] if isinstance(result, TensorType) else result)]
