"""Laws of the layouts that propagation and search choose, on random programs and on small ones
whose answer can be counted. Single cases are in test/filecheck/propagate-strategies."""

import random
from itertools import product

import numpy as np
import pytest
from support.extent import sampled
from support.harness import (
    MESH,
    PIPELINE,
    apply,
    collectives,
    compiled,
    function,
    laid_out,
    layouts,
    parts,
)
from support.random_programs import random_problem
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp
from xdsl.ir import SSAValue

from shardir.algebra.layout import Layout, Shape
from shardir.algebra.mesh import Mesh
from shardir.algebra.sharding import Sharding
from shardir.algebra.strategy import Strategy
from shardir.analysis.functions import values
from shardir.analysis.roles import ties
from shardir.compat.xdsl import set_type
from shardir.dialects import dist, train
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type
from shardir.rewriting.functions import update_signature
from shardir.rewriting.rewriter import erase
from shardir.syntax.parser import parse
from shardir.syntax.verify import verify_all
from shardir.testing.random_layouts import random_form, random_layout
from shardir.tools import bench

communication = bench.load("bytes")

LATE = (PIPELINE[2], *PIPELINE[:2], *PIPELINE[3:])
"""The passes, with differentiation before everything."""
ORDERS = pytest.mark.parametrize(
    "order", [PIPELINE, LATE], ids=["laid out first", "differentiated first"]
)


def layout_on(v: SSAValue) -> Layout:
    found = dist.layout_of(v)
    assert found is not None
    return found


def every(module: ModuleOp) -> list[SSAValue]:
    """The tensors of all functions."""
    blocks = [f.body.block for f in module.body.ops if isinstance(f, FuncOp)]
    return [v for b in blocks for v in values(b) if isinstance(v.type, TensorType)]


# ---- random programs with random annotations ----


@pytest.mark.parametrize("seed", sampled(range(3000, 3030), 4))
def test_propagated_layouts_are_valid_and_as_annotated(seed: int):
    module, mesh = random_form(random_problem(seed).module, seed)
    annotated = {v: dist.sharding_of(v) for v in every(module)}
    apply(module, "propagate-strategies")
    assert not verify_all(module)
    assert all(dist.layout_of(v) is not None for v in every(module))
    group_layouts: dict[int, set] = {}
    for op in function(module, "f").body.block.ops:
        if isinstance(op, dist.ShardingGroupOp):
            group_layouts.setdefault(op.group.value.data, set()).add(layout_on(op.value).dims)
    assert all(len(found) == 1 for found in group_layouts.values())
    for v, annotation in annotated.items():
        if annotation is not None:
            check_annotated(layout_on(v), annotation.simplified(mesh), mesh)


def check_annotated(found: Layout, annotation: Sharding, mesh: Mesh) -> None:
    """A closed dimension is as annotated; of an open one each device has a part of its annotated
    shard; an axis that is to stay replicated splits nothing."""
    for d, (mine, axes) in enumerate(zip(found.dims, annotation.layout.dims, strict=True)):
        assert d in annotation.open or mine == axes
        more = mesh.extent(mine) // mesh.extent(axes)
        for rank in range(mesh.size):
            assert mesh.index(rank, mine) // more == mesh.index(rank, axes)
    assert not any(mesh.overlap(a, b) for a in found.used for b in annotation.replicated)


@pytest.mark.parametrize("seed", sampled(range(3300, 3308), 4))
def test_a_strategy_of_ones_reaches_its_operands(seed: int):
    """Nothing else is annotated, and the ops that use arguments are computed unsharded: so is all
    that follows, and nothing moves."""
    module = laid_out(random_problem(seed).module, MESH, [])
    block = function(module, "f").body.block
    for op in block.ops:
        if isinstance(op, TensorOp) and any(v in block.args for v in op.operands):
            ones = tuple([(1,) * len(shape) for shape in op.shapes()[: len(op.operands)]])
            op.properties["strategy"] = dist.StrategyAttr(Strategy(None, ones))
    apply(module, "propagate-strategies", "insert-redistributions", "lower-to-spmd")
    assert not collectives(block.ops)


@pytest.mark.parametrize("seed", sampled(range(3110, 3120), 4))
def test_no_axis_passes_a_barrier(seed: int):
    """Before and after a barrier layouts are those of a program in which the ops after it begin
    with an argument without annotation."""
    module, mesh = random_form(random_problem(seed).module, seed)
    for op in list(function(module, "f").body.block.ops):
        if isinstance(op, dist.ShardingGroupOp | dist.PropagationBarrierOp):
            erase(op) if isinstance(op, dist.ShardingGroupOp) else cut(op, op.value)
    f = function(module, "f")
    made = [op for op in f.body.block.ops if isinstance(op, TensorOp) and op.operands]
    at = made[len(made) // 2]
    v = at.results[0]
    barrier = dist.PropagationBarrierOp.create(
        operands=[v], result_types=[unsharded_type(v)],
        properties={"allowed": dist.DirectionAttr("none")},
    )  # fmt: skip
    v.replace_all_uses_with(barrier.out)
    barrier.operands[0] = v
    f.body.block.insert_op_after(barrier, at)
    other = module.clone()
    apply(module, "propagate-strategies")
    block = function(other, "f").body.block
    (gap,) = (op for op in block.ops if isinstance(op, dist.PropagationBarrierOp))
    arg = block.insert_arg(unsharded_type(v), len(block.args))
    rank = len(unsharded_type(v).get_shape())
    unknown = Sharding(Layout(mesh.name, ((),) * rank), frozenset(range(rank)))
    t = unsharded_type(v)
    set_type(arg, TensorType(t.element_type, t.get_shape(), dist.ShardingAttr(unknown)))
    cut(gap, arg)
    update_signature(function(other, "f"))
    apply(other, "propagate-strategies")
    ours = [v for v in every(module) if v is not barrier.out]
    theirs = [v for v in every(other) if v is not arg]
    assert [*map(layout_on, ours)] == [*map(layout_on, theirs)]
    assert layout_on(barrier.out) == layout_on(arg)


def cut(op: dist.PropagationBarrierOp, value: SSAValue) -> None:
    """Replace the result of a barrier by another value."""
    op.out.replace_all_uses_with(value)
    erase(op)


@pytest.mark.parametrize("seed", sampled(range(3200, 3208), 1))
def test_searched_layouts_are_valid_and_right(seed: int):
    p = random_problem(seed, 6)
    module, _ = random_form(p.module, seed)
    apply(module, "distributed-autodiff")
    members: dict[int, list[SSAValue]] = {}
    for op in list(function(module, p.name).body.block.ops):
        if isinstance(op, dist.ShardingGroupOp):
            members.setdefault(op.group.value.data, []).append(op.value)
        elif isinstance(op, dist.PropagationBarrierOp):
            cut(op, op.value)
    apply(module, "search-strategies")
    assert not verify_all(module)
    assert all(len({layout_on(v).dims for v in group}) == 1 for group in members.values())
    for name in ("insert-redistributions", "lower-to-spmd"):
        apply(module, name)
        assert not verify_all(module)
        assert not p.errors(module, 100), name


# ---- steps: parameters, what is new of them, and their states ----


OPTIMIZERS = ("sgd, lr = 0.1", "adam, lr = 0.1", "lamb, lr = 0.1")


@pytest.mark.parametrize(
    ("seed", "optimizer"),
    sampled(product(range(6), OPTIMIZERS), 2),
)
def test_no_step_moves_a_parameter_or_a_state(optimizer: str, seed: int):
    """Differentiated before propagation; some of the weights' layouts are changed, some removed."""
    draw = random.Random(seed)
    sizes = {"layers": 1, "batch": 4, "seq": 4, "hidden": 8, "heads": 2, "vocab": 12}
    module = parse(communication.gpt(**sizes, mesh=(2, 2), fsdp=bool(seed % 2)))
    (mesh,) = dist.meshes_of(module).values()
    for v in every(module):
        if dist.layout_of(v) is not None and (chance := draw.random()) < 0.7:
            other = random_layout(draw, mesh, len(unsharded_type(v).get_shape()))
            set_type(
                v, unsharded_type(v) if chance < 0.3 else dist.with_layout(unsharded_type(v), other)
            )
    (request,) = (op for op in module.body.ops if isinstance(op, train.StepOp))
    request.properties["optimizer"] = train.OptimizerAttr.read(optimizer)
    update_signature(function(module, "loss"))
    apply(module, "distributed-autodiff", "propagate-strategies")
    f = function(module, "step")
    found = ties(f)
    assert len(found) > 10
    for new, old in found.items():
        assert layout_on(new) == layout_on(old), old.name_hint
    named = {a.key: v for v, a in zip(f.body.block.args, train.arguments(f), strict=True)}
    for key, v in named.items():
        parameter = named.get((key or "").rpartition(".")[0])
        if parameter is not None:
            assert layout_on(v) == layout_on(parameter), v.name_hint


TIED = {
    "plain": """
  %r = nn.tanh %h : (tensor<4x8xf64>) -> tensor<4x8xf64>
  %t = nn.transpose %w perm <1, 0> : (tensor<8x8xf64>) -> tensor<8x8xf64>
  %y = nn.matmul %r, %t : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
""",
    "residual": """
  %a = nn.matmul %h, %w : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  %b = nn.add %h, %a : (tensor<4x8xf64>, tensor<4x8xf64>) -> tensor<4x8xf64>
  %c = nn.matmul %b, %w : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  %d = nn.tanh %c : (tensor<4x8xf64>) -> tensor<4x8xf64>
  %y = nn.add %b, %d : (tensor<4x8xf64>, tensor<4x8xf64>) -> tensor<4x8xf64>
""",
    "calls of calls": """
  %a = func.call @outer(%h, %w) : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  %y = func.call @outer(%a, %w) : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
""",
    "views": """
  %v = nn.reshape %w : (tensor<8x8xf64>) -> tensor<8x2x4xf64>
  %a = nn.einsum "ik,khd->ihd" %h, %v : (tensor<4x8xf64>, tensor<8x2x4xf64>) -> tensor<4x2x4xf64>
  %y = nn.reshape %a : (tensor<4x2x4xf64>) -> tensor<4x8xf64>
""",
}
"""Uses of a parameter w that is also the table of an embedding %h."""
LAYERS = """
func.func private @outer(%x: tensor<4x8xf64>, %w: tensor<8x8xf64>) -> tensor<4x8xf64> {
  %a = func.call @inner(%x, %w) : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  %y = func.call @inner(%a, %w) : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  func.return %y : tensor<4x8xf64>
}
func.func private @inner(%x: tensor<4x8xf64>, %w: tensor<8x8xf64>) -> tensor<4x8xf64> {
  %h = nn.matmul %x, %w : (tensor<4x8xf64>, tensor<8x8xf64>) -> tensor<4x8xf64>
  %y = nn.tanh %h : (tensor<4x8xf64>) -> tensor<4x8xf64>
  func.return %y : tensor<4x8xf64>
}
"""


@ORDERS
@pytest.mark.parametrize("uses", TIED)
def test_a_tied_parameter_is_reduced_once(uses: str, order: tuple[str, ...]):
    """No use redistributes it, and its gradient is reduced over the batch's axis once; the only
    other collective is the loss's sum."""
    ids = "tensor<4xi32, #dist.layout<@m, [{d}]>>"
    module = parse(
        f"dist.mesh @m <d = 4>\nfunc.func private @loss(%ids: {ids}, "
        '%w: tensor<8x8xf64> {train.parameter = "w", train.init = #train.init<normal>}) '
        "-> tensor<f64> {\n  %h = nn.gather %w, %ids axis 0 : "
        f"(tensor<8x8xf64>, {ids}) -> tensor<4x8xf64>{TIED[uses]}"
        "  %s = nn.reduce <sum> %y dims <0, 1> : (tensor<4x8xf64>) -> tensor<f64>\n"
        "  func.return %s : tensor<f64>\n}\ntrain.step @step of @loss <sgd, lr = 0.1>"
        + (LAYERS if "call" in uses else "")
    )
    compiled(module, ("inline-calls", *order[:-1]), check=True)  # without fusion
    forward, backward = parts(module, "step")
    assert collectives(forward) == {"all_reduce": 1}
    assert collectives(backward) == {"all_reduce": 1}
    (reduced,) = (op for op in backward if isinstance(op, dist.AllReduceOp))
    assert unsharded_type(reduced.outs[0]).get_shape() == (8, 8)


# ---- reshapes ----

SHAPES = [
    ((8,), (2, 4)), ((4, 2), (8,)), ((8, 4), (4, 2, 4)), ((4, 2, 4), (8, 4)), ((4, 8), (8, 4)),
    ((2, 8, 2), (4, 4, 2)), ((4, 6), (6, 4)), ((4, 1, 6), (4, 6)), ((4, 4), (2, 2, 2, 2)),
    ((6, 4), (3, 8)),
]  # fmt: skip


def held(shape: Shape, where: Layout, mesh: Mesh) -> list[frozenset[np.int_]]:
    """Per rank, the places in row-major order of the elements that it holds."""
    places = np.arange(np.prod(shape)).reshape(shape)
    return [frozenset(places[where.slices(mesh, shape, r)].flat) for r in range(mesh.size)]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_a_reshape_is_split_wherever_nothing_need_be_moved(old: Shape, new: Shape):
    """If a layout of the result has on each device the elements that it had, it is chosen;
    otherwise the result is split as far as devices have more elements than they need."""
    text = (
        "dist.mesh @m <a = 2, b = 2>\nfunc.func @f(%x: TX) -> TY {\n"
        "  %y = nn.reshape %x : (TX) -> TY\n  func.return %y : TY\n}"
    )
    of = ["tensor<" + "x".join(map(str, (*s, "f32"))) + ">" for s in (old, new)]
    module = parse(text.replace("TX", of[0]).replace("TY", of[1]))
    every_result = {l: held(new, l, MESH) for l in layouts(len(new)) if l.even(MESH, new)}
    for where in layouts(len(old)):
        if not where.even(MESH, old):
            continue
        laid = module.clone()
        (x,) = function(laid, "f").body.block.args
        set_type(x, dist.with_layout(unsharded_type(x), where))
        update_signature(function(laid, "f"))
        apply(laid, "propagate-strategies")
        y = every(laid)[-1]
        mine, ours = held(old, where, MESH), held(new, layout_on(y), MESH)
        if mine in every_result.values():
            assert ours == mine, where
        else:
            better = [
                l
                for l, theirs in every_result.items()
                if all(a <= b for a, b in zip(mine, theirs, strict=True))
                and len(theirs[0]) < len(ours[0])
            ]
            assert not better, (where, layout_on(y), better)
