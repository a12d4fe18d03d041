"""The cotangents of values: sums of addends, one from each op that uses the value.

    w [{}, {tp}] is used twice  ->  two addends, partial over dp  ->  their sum, then one all-reduce

Addends of one layout are added as soon as they exist, while partial; then the sum is redistributed
once, to the layout of the value.
"""

from collections.abc import Iterable, Sequence
from math import fsum

from xdsl.ir import Operation, SSAValue

from shardir.algebra.estimates import ranked
from shardir.algebra.layout import Layout
from shardir.algebra.redistribution import estimated_seconds
from shardir.diagnostics import ShardirError, coded
from shardir.dialects.dist import layout_of
from shardir.dialects.nn.types import itemsize, unsharded_type
from shardir.dialects.train import stage_attrs, stage_in, stage_of
from shardir.rewriting.rewriter import Rewriter
from shardir.rewriting.varying import reduce_over, reinterpret

AddendPlace = tuple[Layout | None, int | None]
"""The layout of an addend, and the stage of the op that makes it."""


class Cotangents:
    """The sums of the addends of each value's cotangent, from the ops transposed so far.

    Attributes:
        sums: by value and place, in the order of the first addend. Addends of one place are added
            at once, so that only one is live.
    """

    def __init__(self, builder: Rewriter):
        self.builder = builder
        self.sums: dict[SSAValue, dict[AddendPlace, SSAValue]] = {}

    def __contains__(self, v: SSAValue) -> bool:
        return v in self.sums

    def add(self, v: SSAValue, addends: Sequence[SSAValue]) -> None:
        """Add addends to the cotangent of a value. They are made on the builder's stage, or, for an
        addition that passes them on, on the stage of their op."""
        stage = stage_in(self.builder.attributes)
        places = [(layout_of(d), _stage_of_maker(d) if stage is None else stage) for d in addends]
        self._add_up(v, self.sums.setdefault(v, {}), zip(places, addends, strict=True))

    def take(self, v: SSAValue) -> list[SSAValue]:
        """Remove the addends of a value, one for each place, and return them."""
        return [*self.sums.pop(v).values()]

    def sum(
        self, v: SSAValue, may_be_partial: bool = False, target: Layout | None = None
    ) -> SSAValue | None:
        """Return the cotangent of a value in the layout `target`, by default the value's layout;
        None without addends. With `may_be_partial` the sum is not reduced, unless its partial axes
        split the layout."""
        if v not in self.sums:
            return None
        layout = target or layout_of(v)
        total = self._total(v, layout)
        if self.builder.mesh is None or layout is None:
            return total
        mesh, current, target_layout = (
            self.builder.mesh,
            self.builder.layout(total),
            cotangent_layout(layout),
        )
        crossing = (mesh.overlap(a, b) for a in current.partial for b in target_layout.used)
        if may_be_partial and not target_layout.partial and not any(crossing):
            # reducing later takes no longer, and may then cover several values at once
            target_layout = target_layout.with_partial(current.partial, current.reduction)
        return move(self.builder, total, target_layout)

    def value(self, v: SSAValue) -> SSAValue:
        """Return the cotangent of a value with addends, in the layout of the value."""
        total = self.sum(v)
        assert total is not None
        return total

    def _total(self, v: SSAValue, end: Layout | None) -> SSAValue:
        places = self.sums.pop(v)
        if len(places) > 1 and self.builder.mesh is not None:
            layout = self._common_layout(v, [*places.values()], end)
            moved = [((layout, s), move(self.builder, d, layout))
                     for (_, s), d in places.items()]  # fmt: skip
            places = {}
            self._add_up(v, places, moved)
        total, *others = places.values()
        for d in others:
            total = self._add(total, d)
        if total.name_hint is None:
            total.name_hint = cotangent_name(v)
        return total

    def _add_up(
        self, v: SSAValue, sums: dict[AddendPlace, SSAValue],
        addends: Iterable[tuple[AddendPlace, SSAValue]],
    ) -> None:  # fmt: skip
        """Add addends to the sums of their places, each on its stage."""
        for place, d in addends:
            if place in sums:
                outer, self.builder.attributes = self.builder.attributes, stage_attrs(place[1])
                sums[place] = self._add(sums[place], d)
                self.builder.attributes = outer
                sums[place].name_hint = cotangent_name(v)
            else:
                sums[place] = d

    def _add(self, x: SSAValue, y: SSAValue) -> SSAValue:
        """Return the sum of two addends, on the host if both are there."""
        outer, self.builder.stays = self.builder.stays, True
        total = self.builder.add(x, y)
        self.builder.stays = outer
        return total

    def _common_layout(
        self, v: SSAValue, addends: Sequence[SSAValue], end: Layout | None
    ) -> Layout:
        """Return the layout in which addends of several layouts are added: `end` or the layout of
        an addend, whichever needs the cheapest redistributions to it and on to `end`."""
        b, t = self.builder, unsharded_type(v)
        end = cotangent_layout(end or b.layout(v))
        assert b.mesh is not None
        mesh = b.mesh
        if any(layout.varying for layout in (end, *map(b.layout, addends))):
            return end

        def seconds(layout: Layout) -> float:
            after = estimated_seconds(t.get_shape(), mesh, layout, end, itemsize(t))
            return fsum([*(b.redistribution_seconds(d, layout) for d in addends), after])

        options = dict.fromkeys((end, *map(b.layout, addends)))
        return ranked(options, seconds, lambda _: 0)[0][1]


def cotangent_layout(layout: Layout) -> Layout:
    """Return the layout of the cotangent of a value: complete, or varying as the value does."""
    return layout if layout.varying else layout.complete


def move(b: Rewriter, d: SSAValue, target: Layout) -> SSAValue:
    """Return an addend of a cotangent in the layout `target`. One that varies over more axes is the
    sum over these: each device has used the same value."""
    have, mesh = b.layout(d), b.mesh
    if mesh is None or have.varying == target.varying:
        return b.redistribute(d, target)
    shared = mesh.cut(target.varying, have.varying)
    summed = tuple(a for a in mesh.cut(have.varying, target.varying) if a not in shared)
    if any(mesh.overlap(a, b) for a in summed for b in target.varying):
        message = f"expected sub-axes that do not cross, got those of [{have}] and [{target}]"
        raise ShardirError(coded("G8", message, use="let values vary over whole axes"))
    if summed:
        d = reduce_over(b, d, summed)
    rest = b.layout(d).varying
    d = b.redistribute(d, target.with_partial(rest, "any"))
    return d if rest == target.varying else reinterpret(b, d, target)


def _stage_of_maker(v: SSAValue) -> int | None:
    """Return the stage of the op that makes a value, if it has one."""
    return stage_of(v.owner) if isinstance(v.owner, Operation) else None


def cotangent_name(v: SSAValue) -> str | None:
    """Return the name of a value's cotangent."""
    return f"d_{v.name_hint}" if v.name_hint else None
