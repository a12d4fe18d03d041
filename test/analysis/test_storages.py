"""Values that share memory, and their last reads; the roles of arguments."""

import random
from pathlib import Path

import pytest
import torch
from support.extent import extent
from xdsl.dialects.builtin import StringAttr, UnitAttr
from xdsl.dialects.func import FuncOp, ReturnOp

import shardir
from shardir.analysis.aliasing import copies, maybe_shared, shared, strides, views
from shardir.analysis.roles import retained_arguments, ties
from shardir.analysis.storages import Span, Storages, live_ops
from shardir.cost.functions import functions
from shardir.dialects.train import Argument, ItemsOp, Role
from shardir.syntax.parser import parse

EXAMPLES = sorted((Path(__file__).parents[2] / "docs" / "examples").glob("*.ir"))

CHAIN = """func.func @f(%x: tensor<4x6xf32>) -> (tensor<24xf32>, tensor<24xf32>) {
  %a = nn.tanh %x : (tensor<4x6xf32>) -> tensor<4x6xf32>
  %flat = nn.reshape %a : (tensor<4x6xf32>) -> tensor<24xf32>
  %t = nn.transpose %a perm <1, 0> : (tensor<4x6xf32>) -> tensor<6x4xf32>
  %stopped = nn.stop_gradient %t : (tensor<6x4xf32>) -> tensor<6x4xf32>
  %copy = nn.reshape %stopped : (tensor<6x4xf32>) -> tensor<24xf32>
  %unused = nn.exp %copy : (tensor<24xf32>) -> tensor<24xf32>
  func.return %flat, %copy : tensor<24xf32>, tensor<24xf32>
}"""


def function(text: str) -> FuncOp:
    return next(op for op in parse(text).body.ops if isinstance(op, FuncOp))


def test_a_reshape_of_a_strided_view_is_a_copy():
    f = function(CHAIN)
    ((_, mesh),) = functions(parse(CHAIN))
    tanh, flat, transpose, stop, copy, *_ = f.body.block.ops
    assert [copies(op, mesh) for op in (flat, transpose, stop, copy)] == [False] * 3 + [True]
    for op in (flat, transpose, stop):
        assert list(shared(op, mesh)) == [(op.results[0], op.operands[0])]
    assert list(views(copy, mesh)) and not list(shared(copy, mesh))
    assert not list(maybe_shared(tanh, mesh))


def torch_views(draw: random.Random, x: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
    """Random views of x in a chain: the text of each, and torch's."""
    lines, made = [], [x]
    for i in range(6):
        x, rank = made[-1], made[-1].dim()
        old = f"tensor<{'x'.join(map(str, x.shape))}xf32>"
        match draw.randrange(4):
            case 0:
                perm = draw.sample(range(rank), rank)
                text, y = f"nn.transpose %v{i} perm <{', '.join(map(str, perm))}>", x.permute(perm)
            case 1:
                ends = [draw.randint(1, n) for n in x.shape]
                starts = [draw.randrange(end) for end in ends]
                steps = [draw.choice((1, 1, 2)) for _ in ends]
                parts = (", ".join(map(str, each)) for each in (starts, ends, steps))
                text = "nn.slice %v{} starts <{}> limits <{}> strides <{}>".format(i, *parts)
                y = x[tuple(slice(*each) for each in zip(starts, ends, steps, strict=True))]
            case 2 if x.numel() < 200:
                text = f"nn.broadcast %v{i} dims <{', '.join(map(str, range(1, rank + 1)))}>"
                y = x.expand(3, *x.shape)
            case _:
                sizes, rest = [], x.numel()
                while rest > 1:
                    sizes.append(draw.choice([n for n in range(2, rest + 1) if rest % n == 0]))
                    rest //= sizes[-1]
                shape = [*sizes, 1] if draw.random() < 0.3 else sizes or [1]
                text, y = f"nn.reshape %v{i}", x.reshape(shape)
        new = f"tensor<{'x'.join(map(str, y.shape))}xf32>"
        lines.append(f"  %v{i + 1} = {text} : ({old}) -> {new}")
        made.append(y)
    return lines, made


@pytest.mark.parametrize("seed", range(extent(30, 400)))
def test_views_are_those_of_torch(seed: int) -> None:
    """Values of a chain share memory where torch's do, with the same distances of elements."""
    lines, made = torch_views(random.Random(seed), torch.zeros(4, 6, 2))
    f = function("\n".join(["func.func @f(%v0: tensor<4x6x2xf32>) {", *lines, "  func.return\n}"]))
    base = made[0]
    for op, x in zip(f.body.block.ops, made[1:], strict=False):
        if x.untyped_storage().data_ptr() != base.untyped_storage().data_ptr():
            assert copies(op, None)
            base = x
        else:
            assert not copies(op, None)
        found = zip(strides(op.results[0], None), x.stride(), x.shape, strict=True)
        assert all(mine == theirs for mine, theirs, n in found if n > 1)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_values_that_share_memory_are_among_those_that_may(path: Path):
    module = parse(path.read_text())
    for f, mesh in functions(module):
        for op in f.body.block.ops:
            assert set(shared(op, mesh)) <= set(views(op, mesh)) <= set(maybe_shared(op, mesh))


def test_spans_and_last_reads():
    f = function(CHAIN)
    ops = live_ops(list(f.body.block.ops))
    tanh, flat, transpose, stop, copy, end = ops  # %unused is not computed
    assert isinstance(end, ReturnOp)
    (x,) = f.body.block.args
    a, t = tanh.results[0], transpose.results[0]
    storages = Storages([x], ops)
    assert storages.spans()[a] == Span(0, 2)
    assert storages.is_free(a, transpose) and not storages.is_free(a, flat)
    storages.join(flat.results[0], a)
    storages.join(t, a)
    storages.join(stop.results[0], t)
    assert storages.root(stop.results[0]) is a
    assert set(storages.members(a)) == {a, flat.results[0], t, stop.results[0]}
    assert storages.spans() == {
        x: Span(-1, 6), a: Span(0, 5), copy.results[0]: Span(4, 5),
    }  # fmt: skip
    assert not storages.is_last(t, copy) and storages.is_last(t, end)


def test_arguments_are_not_overwritten():
    f = function(CHAIN)
    ops = list(f.body.block.ops)
    (x,) = f.body.block.args
    end = ops[-1]
    storages = Storages([x], ops)
    a = ops[0].results[0]
    assert not storages.is_free(x, end) and storages.is_free(x, end, {x})
    assert storages.is_free(a, end)
    storages.pin(a)
    assert not storages.is_free(a, end)
    flat = ops[1].results[0]
    storages.join(flat, x)
    assert storages.root(flat) is x and not storages.is_free(flat, end)


def test_joined_to_an_argument_a_storage_is_the_callers():
    f = function(CHAIN)
    (x,) = f.body.block.args
    ops = list(f.body.block.ops)
    storages = Storages([x], ops)
    storages.join(x, ops[0].results[0])
    assert storages.root(ops[0].results[0]) is x


STARTED = """dist.mesh @m <d = 2>
#p = #dist.local<@m, [{}], partial sum {d}>
#w = #dist.local<@m, [{}]>
func.func @f(%x: tensor<4xf32, #p>, %y: tensor<4xf32, #w>) -> tensor<4xf32, #w> {
  %a = nn.neg %x : (tensor<4xf32, #p>) -> tensor<4xf32, #p>
  %r = dist.all_reduce <sum> %a over <d> async : (tensor<4xf32, #p>) -> tensor<4xf32, #w>
  %b = nn.exp %y : (tensor<4xf32, #w>) -> tensor<4xf32, #w>
  %w = dist.wait %r : (tensor<4xf32, #w>) -> tensor<4xf32, #w>
  %s = nn.add %b, %w : (tensor<4xf32, #w>, tensor<4xf32, #w>) -> tensor<4xf32, #w>
  func.return %s : tensor<4xf32, #w>
}"""


def test_a_collective_reads_until_its_wait():
    f = function(STARTED)
    ops = list(f.body.block.ops)
    neg, reduce, exp, wait, *_ = ops
    storages = Storages(f.body.block.args, ops)
    a = neg.results[0]
    assert storages.spans()[a] == Span(0, 3)
    assert [storages.is_last(a, op) for op in (reduce, exp, wait)] == [True, False, True]


RUNS = """func.func @f(%x: tensor<4x4xf32>, %w: tensor<4x4xf32>) -> (TYPES) {
  %h = train.carried %x : (tensor<4x4xf32>) -> tensor<4x4xf32>
  train.repeat 2
  %y = nn.matmul %h, %w : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  %t = nn.transpose %y perm <1, 0> : (tensor<4x4xf32>) -> tensor<4x4xf32>
  %n = nn.tanh %h : (tensor<4x4xf32>) -> tensor<4x4xf32>
  ITEMS
  %z = train.carry %n, %h : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
  train.end_repeat
  func.return RESULTS : TYPES
}"""


@pytest.mark.parametrize(
    ("listed", "own"),
    [("y", [True]), ("t", [True]), ("yt", [False] * 2), ("h", [False]), ("n", [False]),
     ("x", [False]), ("yn", [True, False])],
)  # fmt: skip
def test_what_the_runs_of_a_loop_make_is_apart(listed: str, own: list[bool]):
    """A list has memory of each run, unless another one has a view of it, it is what the next run
    begins with, or it is from before."""
    one = "tensor<4x4xf32>"
    items = "\n  ".join(
        f"%{v}0, %{v}1 = train.items %{v} : ({one}) -> ({one}, {one})" for v in listed
    )
    results = [f"%{v}{i}" for v in listed for i in range(2)] + ["%z"]
    text = RUNS.replace("ITEMS", items).replace("RESULTS", ", ".join(results))
    f = function(text.replace("TYPES", ", ".join([one] * len(results))))
    storages = Storages(f.body.block.args, ops := list(f.body.block.ops))
    lists = [op for op in ops if isinstance(op, ItemsOp)]
    for op in ops:
        for v, other in () if op in lists else maybe_shared(op, None):
            storages.join(v, other)
    assert [storages.is_of_each_run(op) for op in lists] == own


DRAWS = """func.func @f(%x: tensor<2xf32>, %y: tensor<2xf32>) -> tensor<2xf32> {
  %a = nn.neg %x : (tensor<2xf32>) -> tensor<2xf32>
  train.repeat 2
  %i = train.item %x, %a : (tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>
  train.repeat 2
  %j = train.item %i, %y : (tensor<2xf32>, tensor<2xf32>) -> tensor<2xf32>
  %e = nn.exp %j : (tensor<2xf32>) -> tensor<2xf32>
  train.end_repeat
  train.end_repeat
  func.return %a : tensor<2xf32>
}"""


def test_the_memory_of_an_item_may_be_that_of_each_value_that_a_loop_takes():
    """Of items of items too, and after their storages have been joined to others."""
    f = function(DRAWS)
    (x, y), ops = f.body.block.args, list(f.body.block.ops)
    a, i, j, e = (op.results[0] for op in ops if op.results)
    storages = Storages(f.body.block.args, ops)
    assert [set(storages.sources(v)) for v in (a, i, j)] == [{a}, {i, x, a}, {j, i, x, a, y}]
    storages.join(e, j)
    assert set(storages.sources(storages.root(e))) == {j, i, x, a, y}
    storages.join(i, y)  # the argument is its root
    assert set(storages.sources(y)) == {y, x, a}
    assert set(storages.sources(storages.root(e))) == {j, y, x, a}


def test_roles_are_read_from_attributes():
    weight = Argument.of({"train.parameter": StringAttr("w"), "train.init": UnitAttr()})
    state = Argument.of({"train.state": StringAttr("m")})
    given = Argument.of({"train.input": UnitAttr()})
    assert [(a.role, a.key, a.is_retained) for a in (weight, state, given, Argument.of({}))] == [
        (Role.PARAMETER, "w", True), (Role.STATE, "m", True),
        (Role.INPUT, None, False), (Role.INPUT, None, False),
    ]  # fmt: skip
    assert weight.init == given.init == UnitAttr() and state.init is None
    assert (weight.lr_scale, weight.weight_decay(0.5), weight.fusion) == (1.0, 0.5, None)


STEP = """func.func private @loss(
    %x: tensor<4xf32>,
    %w: tensor<4xf32> {train.parameter = "w", train.init = #train.init<normal>},
    %n: tensor<4xf32> {train.state = "n", train.init = #train.init<normal>}
) -> (tensor<f32>, tensor<4xf32> {train.updates = "n"}) {
  %y = nn.mul %x, %w : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %m = nn.add %n, %x : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %s = nn.reduce <sum> %y dims <0> : (tensor<4xf32>) -> tensor<f32>
  func.return %s, %m : tensor<f32>, tensor<4xf32>
}
train.step @step of @loss <momentum, lr = 0.1, momentum = 0.9>
"""


def test_results_are_tied_to_the_arguments_that_they_replace():
    f = function(STEP)
    _, w, n = f.body.block.args
    assert retained_arguments(f) == {w, n}
    assert [(v.name_hint, arg) for v, arg in ties(f).items()] == [("m", n)]
    step = shardir.compile(STEP, "single-device").module
    (made,) = (op for op in step.body.ops if isinstance(op, FuncOp))
    _, w, n, velocity = made.body.block.args
    assert set(ties(made).values()) == retained_arguments(made) == {w, n, velocity}
