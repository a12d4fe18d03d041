"""Reopened grants: no step is slower than with activations first, nor than with parameters first
where grants are reopened, and layouts depend neither on the order of ops nor on how often
propagation runs."""

import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from support.extent import extent
from support.harness import apply
from xdsl.dialects.builtin import ModuleOp, TensorType
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Operation, SSAValue

from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Mesh
from shardir.algebra.propagation import PropagationState, propagate
from shardir.algebra.propagation.graph import PropagationGraph
from shardir.analysis.functions import values
from shardir.compat.xdsl import set_type
from shardir.cost import report
from shardir.dialects import dist, train
from shardir.dialects.nn.types import unsharded_type
from shardir.passes import PIPELINES, propagate_strategies
from shardir.rewriting.functions import update_signature
from shardir.search.problem.solver import solve
from shardir.search.propagations.mixture_costs import MixtureCosts
from shardir.search.propagations.reopening import Price, reopened
from shardir.syntax.parser import parse
from shardir.testing.random_layouts import random_layout
from shardir.tools import bench

communication = bench.load("bytes")

SEEDS = extent([12, 17], [0, 5, 12, 17])
"""In 12 and 17 grants are reopened."""

PRODUCTS = [1005, 1016, 1047, 1092, 1295, 1965]
"""In 1016 and 1047 grants are reopened; in the others the mixture of minimum estimated time is
slower, or was with a worse estimate."""


def annotated(seed: int) -> ModuleOp:
    """A training step of a transformer with random layouts on its weights and its batch."""
    draw = random.Random(seed)
    small = dict(batch=4, seq=4, hidden=8, heads=2, vocab=16)
    large = dict(batch=16, seq=64, hidden=256, heads=8, vocab=1024)
    sizes = draw.choice((small, large))
    module = parse(communication.gpt(layers=1, mesh=(2, 2), **sizes))
    (mesh,) = dist.meshes_of(module).values()
    for v in tensors(module):
        if dist.layout_of(v) is not None and draw.random() < 0.7:
            other = random_layout(draw, mesh, len(unsharded_type(v).get_shape()))
            set_type(v, dist.with_layout(unsharded_type(v), other))
    for f in functions(module):
        update_signature(f)
    return module


def products(seed: int) -> ModuleOp:
    """A training step of some products of square matrices, and ops between them, with random
    layouts on most of its arguments. All values are used."""
    draw = random.Random(seed)
    mesh = Mesh("m", tuple(zip("ab", draw.choice([(2, 2), (2, 4), (4, 2)]), strict=True)))
    n = draw.choice([16, 64, 256, 1024])

    def argument(likely: float) -> str:
        given = draw.random() < likely
        layout = f", #dist.layout<{random_layout(draw, mesh, 2)}>" if given else ""
        return f"tensor<{n}x{n}xf32{layout}>"

    weights = draw.randint(2, 4)
    types = {"x": argument(0.8)} | {f"w{i}": argument(0.7) for i in range(weights)}
    roles = {v: f'train.parameter = "{v}", train.init' for v in types} | {"x": "train.input"}
    signature = ", ".join(
        f"%{v}: {t} {{{roles[v]} = #train.init<normal>}}" for v, t in types.items()
    )
    lines, made = list[str](), ["x"]

    def op(text: str, *operands: str) -> None:
        y = f"y{len(lines)}"
        types[y] = f"tensor<{n}x{n}xf32>"
        given = ", ".join(types[v] for v in operands)
        names = ", ".join(f"%{v}" for v in operands)
        lines.append(f"  %{y} = {text.format(names)} : ({given}) -> {types[y]}")
        made.append(y)

    for _ in range(draw.randint(3, 7)):
        kind = draw.choice(["matmul", "matmul", "matmul", "add", "relu", "transpose", "mul"])
        a = draw.choice(made[-2:])
        if kind == "matmul":
            w = f"w{draw.randrange(weights)}"
            op("nn.matmul {}", *((a, w) if draw.random() < 0.8 else (w, a)))
        elif kind in ("add", "mul"):
            op(f"nn.{kind} {{}}", a, draw.choice(made))
        else:
            op("nn.relu {}" if kind == "relu" else "nn.transpose {} perm <1, 0>", a)
    for v in made[1:-1]:
        if not any(f"%{v}," in line or f"%{v} :" in line or f"%{v} perm" in line for line in lines):
            op("nn.add {}", made[-1], v)
    return parse("\n".join([
        f"dist.mesh @m <{', '.join(f'{a} = {s}' for a, s in mesh.axes)}>",
        f"func.func private @loss({signature}) -> tensor<f32> {{",
        *lines,
        f"  %l = nn.reduce <mean> %{made[-1]} dims <0, 1> : ({types[made[-1]]}) -> tensor<f32>",
        "  func.return %l : tensor<f32>",
        "}",
        "train.step @step of @loss <sgd, lr = 0.1>",
    ]))  # fmt: skip


def functions(module: ModuleOp) -> list[FuncOp]:
    return [f for f in module.body.ops if isinstance(f, FuncOp)]


def tensors(module: ModuleOp) -> list[SSAValue]:
    blocks = [f.body.block for f in functions(module)]
    return [v for b in blocks for v in values(b) if isinstance(v.type, TensorType)]


def layouts(module: ModuleOp) -> dict[str | None, Layout | None]:
    return {v.name_hint: dist.layout_of(v) for v in tensors(module)}


def seconds(module: ModuleOp) -> tuple[float, float]:
    """Return the times of a step with overlap and without."""
    (cost,) = report(apply(module, "propagate-strategies", *PIPELINES["lower-layouts"].split(",")))
    return cost.seconds, sum(op.seconds for op in cost.ops)


@pytest.mark.parametrize(
    ("step", "seed"),
    [*product([annotated], SEEDS), *product([products], extent(PRODUCTS, range(1000, 2000)))],
)
def test_no_step_is_slower_than_with_activations_first(
    step: Callable[[int], ModuleOp], seed: int, monkeypatch: pytest.MonkeyPatch
):
    found = seconds(step(seed))
    with monkeypatch.context() as m:
        m.setattr(propagate_strategies, "reopened", lambda graph, price: propagate(graph))
        first = seconds(step(seed))
    assert all(a <= b * (1 + 1e-9) for a, b in zip(found, first, strict=True))
    if seed in (12, 17, 1016, 1047):
        assert found[1] < first[1] * 0.99


@pytest.mark.parametrize("seed", [1047, 1080, 1092])
def test_the_estimate_alone_makes_these_steps_no_slower(seed: int, monkeypatch: pytest.MonkeyPatch):
    """It counts cotangents, their additions, and the operands that get one."""
    times = {}
    for name, unpriced in (
        ("mixture", lambda graph, price: reopened(graph, lambda state: None)),
        ("first", lambda graph, price: propagate(graph)),
    ):
        with monkeypatch.context() as m:
            m.setattr(propagate_strategies, "reopened", unpriced)
            _, times[name] = seconds(products(seed))
    assert times["mixture"] <= times["first"] * (1 + 1e-9)


@pytest.mark.parametrize("seed", extent([1047, 1061, 1079], range(1000, 1300)))
def test_no_layout_of_one_value_makes_a_reopened_step_much_faster(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Brute force, where few values have other layouts with parameters first."""

    def compared(graph: PropagationGraph, price: Price) -> PropagationState:
        found, both = reopened(graph, price), (propagate(graph), propagate(graph, True))
        groups = {found.members[v] for v in range(len(found.dims))}
        differing = [g[0] for g in groups if len({state.dims[g[0]] for state in both}) > 1]
        if (
            len(differing) <= 4
            and found.dims != both[0].dims
            and (times := price(found)) is not None
        ):
            for v in differing:
                (state,) = (state for state in both if state.dims[v] != found.dims[v])
                other = price(found.mixed(state, [v]))
                assert other is None or other[1] > times[1] * 0.95
        return found

    monkeypatch.setattr(propagate_strategies, "reopened", compared)
    apply(products(seed), "propagate-strategies")


@pytest.mark.parametrize("seed", SEEDS)
def test_the_order_of_ops_does_not_matter(seed: int):
    module, shuffled = annotated(seed), annotated(seed)
    draw = random.Random(seed)
    for f in functions(shuffled):
        shuffle(f, draw)
    apply(module, "propagate-strategies")
    apply(shuffled, "propagate-strategies")
    assert layouts(shuffled) == layouts(module)
    again = module.clone()
    apply(again, "propagate-strategies")
    assert layouts(again) == layouts(module)


def shuffle(f: FuncOp, draw: random.Random) -> None:
    """Put the ops of a function into another order, in which operands still come first."""
    block = f.body.block
    left, placed = list(block.ops), set[Operation]()

    def is_ready(op: Operation) -> bool:
        if isinstance(op, ReturnOp):
            return len(left) == 1
        return all(v.owner is block or v.owner in placed for v in op.operands)

    while left:
        op = draw.choice([op for op in left if is_ready(op)])
        left.remove(op)
        placed.add(op)
        op.detach()
        block.add_op(op)


def all_of(costs: MixtureCosts, other: bool) -> float:
    """Return the minimum estimate of a mixture with all layouts of one of its propagations."""
    options = [np.arange(len(c)) for c in costs.problem.unary]
    for v, i in costs.variable.items():
        mine = np.flatnonzero([is_other is other for is_other in costs.choices[v].is_other()])
        options[i] = mine if len(mine) else options[i]
    return solve(costs.problem.restricted(options)).objective


@pytest.mark.parametrize("seed", [1002, 1016, 1024, 1032, 1035])
def test_forward_programs_take_what_the_mixture_reckons(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Of a function without a gradient: the times of its lowered programs with the layouts of
    either propagation differ as their estimates do. Operands and results are redistributed."""
    estimates, lowered = list[float](), list[float]()
    for other in (False, True):

        def chosen(graph: PropagationGraph, _price: Price, other: bool = other) -> PropagationState:
            states = propagate(graph), propagate(graph, parameters_first=True)
            estimates.append(all_of(MixtureCosts(*states), other))
            return states[other]

        monkeypatch.setattr(propagate_strategies, "reopened", chosen)
        module = products(seed)
        for request in module.body.ops:
            if isinstance(request, train.StepOp):
                request.detach()
        lowered.append(seconds(module)[1])
    assert lowered[0] != pytest.approx(lowered[1])
    assert estimates[1] - estimates[0] == pytest.approx(lowered[1] - lowered[0], abs=1e-9)
