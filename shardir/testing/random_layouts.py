"""Random meshes, layouts, strategies and other annotations for the random programs."""

import random

from xdsl.dialects.builtin import IntegerAttr, ModuleOp, TensorType, i64
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, SSAValue

from shardir.algebra.factors import FactorAxes, try_op_sharding
from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Axes, Axis, Mesh
from shardir.algebra.notation import mesh_of
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.compat.xdsl import set_type
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.text import word
from shardir.rewriting.functions import update_signature
from shardir.testing.programs import ELEMENTS, function, laid_out, shape_of

MESHES = [
    mesh_of("m", t)
    for t in ("a = 2, b = 2", "a = 4", "a = 2, b = 3", "a = 2, b = 4", "a = 2, b = 2, c = 2")
]


def pieces(draw: random.Random, mesh: Mesh) -> list[Axis]:
    """Return the axes of a mesh, some of them split in two, shuffled."""
    out = []
    for a in mesh.names:
        n = mesh.extent((a,))
        if n == 4 and draw.random() < 0.3:
            out += mesh.split(a, 2)
        else:
            out.append(a)
    draw.shuffle(out)
    return out


def random_layout(draw: random.Random, mesh: Mesh, rank: int, partial: bool = False) -> Layout:
    """Return a random layout; where `partial`, perhaps of a partial sum."""
    dims: list[Axes] = [()] * rank
    left = []
    for a in pieces(draw, mesh):
        d = draw.randint(0, rank)
        if d < rank:
            dims[d] += (a,)
        else:
            left.append(a)
    partial_axes = tuple(a for a in left if partial and draw.random() < 0.3)
    found = Layout(mesh.name, tuple(map(mesh.simplify, dims)))
    return found.with_partial(mesh.simplify(tuple(sorted(partial_axes, key=mesh.order))))


def random_strategy(draw: random.Random, mesh: Mesh, op: TensorOp) -> Strategy | None:
    """Return axes for some factors of an op, as its strategy; None where that is none."""
    factors = op.factors()
    chosen: FactorAxes = {}
    names = [f for f, _ in factors.sizes]
    for a in pieces(draw, mesh):
        f = draw.choice([*names, ""]) if names else ""
        unsharded = type(op).decompose is TensorOp.decompose and f in factors.replicate
        if f and not unsharded:
            chosen[f] = (*chosen.get(f, ()), a)
    found = [[factors.compose(d, chosen, mesh) for d in dims] for dims in factors.operands]
    if (
        any(axes is None for dims in found for axes in dims)
        or try_op_sharding(factors, chosen, mesh) is None
    ):
        return None
    operands = tuple(tuple(axes or () for axes in dims) for dims in found)
    return Strategy(None, operands)


def random_form(program: ModuleOp, seed: int) -> tuple[ModuleOp, Mesh]:
    """Return a copy of a program @f with a random mesh, and layouts, strategies and other
    annotations on some of its values and ops."""
    draw = random.Random(seed)
    mesh = draw.choice(MESHES)
    block = function(program, "f").body.block
    given = [
        random_layout(draw, mesh, len(shape_of(v)), is_sum(v)) if draw.random() < 0.6 else None
        for v in block.args
    ]
    module = laid_out(program, mesh, given)
    for op in function(module, "f").body.block.ops:
        if not isinstance(op, TensorOp) or isinstance(op.next_op, ReturnOp):
            continue
        if draw.random() < 0.25 and op.operands:
            strategy = random_strategy(draw, mesh, op)
            if strategy is not None and any(c for cuts in strategy.operands for c in cuts):
                op.properties["strategy"] = dist.StrategyAttr(strategy)
        elif draw.random() < 0.15:
            t = op.results[0].type
            assert isinstance(t, TensorType)
            pinned = random_layout(draw, mesh, len(t.get_shape()))
            set_type(op.results[0], dist.with_layout(t, pinned))
    annotate(function(module, "f"), mesh, random.Random(-seed - 1))
    return module, mesh


def annotate(f: FuncOp, mesh: Mesh, draw: random.Random) -> None:
    """Add annotations for propagation: open layouts, barriers, and sharding groups, in which at
    most one value has a layout or a strategy."""
    block = f.body.block
    free: dict[Shape, list[SSAValue]] = {}
    for v in [*block.args, *(v for op in block.ops for v in op.results)]:
        if not isinstance(v.type, TensorType):
            continue
        if not is_annotated(v) and draw.random() < 0.15:
            t = v.type
            set_type(v, TensorType(t.element_type, t.get_shape(), sharding(draw, mesh, v)))
        members = free.setdefault(shape_of(v), [])
        if draw.random() < 0.3 and not (is_annotated(v) and any(map(is_annotated, members))):
            members.append(v)
        if draw.random() < 0.1 and not isinstance(v.owner, Block):
            allowed = word(dist.DirectionAttr, draw.choice(dist.DirectionAttr.words()))
            barrier = dist.PropagationBarrierOp.create(
                operands=[v], result_types=[dist.with_layout(v.type, None)],
                properties={"allowed": allowed},
            )  # fmt: skip
            v.replace_uses_with_if(barrier.out, lambda use: not isinstance(use.operation, ReturnOp))
            barrier.operands[0] = v
            block.insert_op_after(barrier, v.owner)
    end = block.last_op
    assert end is not None
    for i, members in enumerate(m for m in free.values() if len(m) > 1):
        for v in members:
            group = dist.ShardingGroupOp.create(
                operands=[v], properties={"group": IntegerAttr(i, i64)}
            )
            block.insert_op_before(group, end)
    update_signature(f)


def is_annotated(v: SSAValue) -> bool:
    """Whether a value has a layout, or its op a strategy."""
    strategy = isinstance(v.owner, TensorOp) and v.owner.strategy is not None
    return strategy or dist.sharding_of(v) is not None


def sharding(draw: random.Random, mesh: Mesh, v: SSAValue) -> dist.ShardingAttr:
    """Return a random open layout: some axes on some dimensions, some of which are open, with two
    priorities; an unused axis is perhaps to stay replicated."""
    rank = len(shape_of(v))
    layout = random_layout(draw, mesh, rank)
    unused = tuple(a for a in mesh.names if not any(mesh.overlap(a, b) for b in layout.used))
    found = Sharding(
        layout,
        frozenset(d for d in range(rank) if draw.random() < 0.7),
        tuple(draw.randint(0, 1) for _ in range(rank)),
        tuple(a for a in unused if draw.random() < 0.3),
    )
    return dist.ShardingAttr(found.simplified(mesh))


def is_sum(v: SSAValue) -> bool:
    """Whether a value can be a partial sum."""
    return isinstance(v.type, TensorType) and v.type.element_type == ELEMENTS["f64"]
