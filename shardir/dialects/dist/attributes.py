"""The attributes of meshes, layouts, strategies and collectives: values of the algebra as text."""

from xdsl.irdl import irdl_attr_definition

from shardir.algebra.cluster import Cluster
from shardir.algebra.layout import REDUCTIONS, Layout, LocalLayout
from shardir.algebra.mesh import Axes
from shardir.algebra.notation import (
    parse_axes,
    parse_cluster,
    parse_layout,
    parse_local,
    parse_mesh,
    parse_sharding,
    parse_strategy,
)
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.dialects.text import IntsAttr, TextAttr, WordAttr


@irdl_attr_definition
class MeshAttr(TextAttr[tuple[tuple[str, int], ...]]):
    """`<dp = 2, tp = 4>`: axis names and sizes, major to minor."""

    name = "dist.axis_sizes"

    @classmethod
    def from_text(cls, text: str) -> tuple[tuple[str, int], ...]:
        return parse_mesh(text)

    @classmethod
    def to_text(cls, data: tuple[tuple[str, int], ...]) -> str:
        return ", ".join(f"{n} = {s}" for n, s in data)


@irdl_attr_definition
class ClusterAttr(TextAttr[Cluster]):
    """`<levels [node = 8 {bandwidth = 4.5e+11, latency = 3e-06}], memory = 80000000000>`: the
    capabilities of devices and of the links between them."""

    name = "dist.devices"

    @classmethod
    def from_text(cls, text: str) -> Cluster:
        return parse_cluster(text)


@irdl_attr_definition
class LayoutAttr(TextAttr[Layout]):
    """`<@m, [{dp}, {tp}], partial sum {x}>`: the layout of a global value."""

    name = "dist.layout"

    @classmethod
    def from_text(cls, text: str) -> Layout:
        return parse_layout(text)


@irdl_attr_definition
class ShardingAttr(TextAttr[Sharding]):
    """`<@m, [{dp, ?}, {?}p1], replicated {tp}>`: the annotated part of a global value's layout, to
    which propagate-strategies may add axes; no other pass sees one."""

    name = "dist.sharding"

    @classmethod
    def from_text(cls, text: str) -> Sharding:
        return parse_sharding(text)


@irdl_attr_definition
class LocalAttr(TextAttr[LocalLayout]):
    """`<@m, [{dp}, {tp}], of [10, 16]>`: the layout of a local value; `of` is the global shape,
    where shards are uneven."""

    name = "dist.local"

    @classmethod
    def from_text(cls, text: str) -> LocalLayout:
        return parse_local(text)


@irdl_attr_definition
class AxesAttr(TextAttr[Axes]):
    """`<dp, tp:(1)2>`: the axes of a collective's groups, major to minor."""

    name = "dist.axes"

    @classmethod
    def from_text(cls, text: str) -> Axes:
        return parse_axes(text)

    @classmethod
    def to_text(cls, data: Axes) -> str:
        return ", ".join(map(str, data))


@irdl_attr_definition
class StrategyAttr(TextAttr[Strategy]):
    """`<((2, 4), (4, 1))>`: the number of slices of each dimension of an op's operands."""

    name = "dist.strategy"

    @classmethod
    def from_text(cls, text: str) -> Strategy:
        return parse_strategy(text)


@irdl_attr_definition
class ReductionAttr(WordAttr):
    """`<sum>`, `<max>`, `<min>` or `<mean>`."""

    name = "dist.reduction"

    @classmethod
    def words(cls) -> tuple[str, ...]:
        return tuple(r for r in REDUCTIONS if r != "any")


@irdl_attr_definition
class PairsAttr(IntsAttr):
    """`<0, 1, 1, 0>`: source and target positions in the group, one pair after the other."""

    name = "dist.pairs"


ATTRS = [
    ClusterAttr, MeshAttr, LayoutAttr, ShardingAttr, LocalAttr, AxesAttr, StrategyAttr,
    ReductionAttr, PairsAttr,
]  # fmt: skip
