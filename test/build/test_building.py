"""Programs written in Python: what they compute, their text, their locations, their errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from xdsl.ir import Operation

import shardir
from shardir.build import FunctionBuilder, Module, Value, nn
from shardir.diagnostics import ShardirError
from shardir.dialects.locations import file_location
from shardir.interpret.evaluator import run
from shardir.syntax.printer import print_module

RNG = np.random.default_rng(0)
X, Y, W = RNG.normal(size=(3, 4)), RNG.normal(size=(3, 4)), RNG.normal(size=(4, 5))


def evaluated(build: Callable[..., Value | tuple[Value, ...]], *arrays: np.ndarray) -> list:
    m = Module()
    f = m.function("f")
    made = build(*(f.input(f"x{i}", a.shape, "f64") for i, a in enumerate(arrays)))
    f.returns(*(made if isinstance(made, tuple) else (made,)))
    return run(m.module, "f", list(arrays))


OPERATORS: dict[str, tuple[Callable, tuple]] = {
    "sum": (lambda x, y: x + y, (X, Y)),
    "numbers on either side": (lambda x: 1 - 2 * x / 3 + 0.5, (X,)),
    "reciprocal": (lambda x: 1 / x, (X,)),
    "product of matrices": (lambda x, w: x @ w, (X, W)),
    "power": (lambda x: (x * x) ** 1.5, (X,)),
    "remainder": (lambda x, y: x % y, (X, Y)),
    "negative": (lambda x: -x, (X,)),
    "sum of a dimension": (lambda x: x.sum(-1), (X,)),
    "mean": (lambda x: x.mean(), (X,)),
    "maximum, kept": (lambda x: x.max(0, True), (X,)),
    "slices": (lambda x: x[1:, ::2], (X,)),
    "an index, and a new dimension": (lambda x: x[-1, None], (X,)),
    "the last dimensions": (lambda x: x[..., 1:3], (X,)),
    "reshaped": (lambda x: x.reshape(2, -1), (X,)),
    "transposed": (lambda x: x.transpose(1, 0), (X,)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_numpy(name: str) -> None:
    function, arrays = OPERATORS[name]
    numpy = {"sum of a dimension": X.sum(-1), "mean": X.mean(), "maximum, kept": X.max(0)[None]}
    want = numpy[name] if name in numpy else function(*arrays)
    np.testing.assert_allclose(evaluated(function, *arrays)[0], want, rtol=1e-14)


def test_a_loop_runs_as_long_as_its_condition_holds() -> None:
    def root(x: Value) -> Value:
        f: Any = x.function
        ones, limit = x * 0 + 1, f.constant(1e-12, dtype="f64")
        out = f.while_loop(
            (ones, x, limit),
            lambda y, x, limit: abs_of(y * y - x).max() > limit,
            lambda y, x, limit: ((y + x / y) / 2, x, limit),
        )
        return out[0]

    def abs_of(v: Value) -> Value:
        return (v * v) ** 0.5

    np.testing.assert_allclose(evaluated(root, X * X)[0], abs(X), rtol=1e-9)


LOOPS: list[tuple[Callable[[Value, Value], object], str]] = [
    (lambda x, n: x, "expected 2 values that the body yields, got 1"),
    (lambda x, n: (n, x), r"expected value 0 that the body yields of type tensor<3xf32>, got"),
    (lambda x, n: (x, 1), "of the body of a loop in f, computed from its arguments, got 1"),
]


@pytest.mark.parametrize(("body", "message"), LOOPS)
def test_errors_of_loops(body: Callable[..., Any], message: str) -> None:
    f = Module().function("f")
    x, n = f.input("x", (3,)), f.input("n", (), "i32")
    with pytest.raises(ShardirError, match=message):
        f.while_loop((x, n), lambda x, n: n < 3, body)


def test_a_loop_reads_no_values_around_it() -> None:
    f = Module().function("f")
    x, n = f.input("x", (3,)), f.input("n", (), "i32")
    with pytest.raises(ShardirError, match="expected operands of @body of a loop in f, got"):
        f.while_loop((n,), lambda n: n < 3, lambda n: n + x.to("i32").sum())


def test_broadcasts_are_those_of_numpy() -> None:
    for have, want in (((4,), (3, 4)), ((3, 1), (3, 4)), ((), (2, 2)), ((1, 4, 1), (2, 4, 5))):
        x = RNG.normal(size=have)
        found = evaluated(lambda v, want=want: v.broadcast_to(*want), x)[0]
        np.testing.assert_array_equal(found, np.broadcast_to(x, want))


def test_a_flag_that_is_false_is_left_out() -> None:
    f = Module().function("f")
    x = f.input("x", (2,))
    assert not nn.gelu(x, exact=False).ssa.owner.properties
    assert nn.gelu(x, exact=True).ssa.owner.properties


def test_comparisons_select() -> None:
    found = evaluated(lambda x, y: nn.select((x < y) | ~(y >= 0.0), x, y), X, Y)[0]
    np.testing.assert_array_equal(found, np.where((X < Y) | ~(Y >= 0), X, Y))


def network(mesh: str | None = "dp = 2, tp = 2") -> Module:
    m = Module(mesh, "h200" if mesh else None)
    f = m.function("loss", private=True)
    layout = (lambda text: text) if mesh else (lambda text: None)
    x = f.input("x", (8, 4), layout=layout("[{dp}, {}]"), init="normal")
    w = f.parameter("layers.0.w", (4, 6), layout=layout("[{}, {tp}]"), init="normal", lr_scale=0.5)
    count = f.state("count", (), "i64", init="constant, value = 0.0")
    loss = nn.square(nn.gelu(x @ w, exact=True).named("h")).mean()
    f.update("count", count + 1)
    f.returns(loss)
    m.step("step", "loss", "momentum, lr = 0.1, momentum = 0.9", clip="norm, max = 1.0")
    return m


def test_its_text_parses_to_the_same_module() -> None:
    text = str(network())
    assert print_module(shardir.parse(text)) == text
    for part in (
        "%layers.0.w", "dist.mesh @m <dp = 2, tp = 2> on @h200", "train.lr_scale = 5", "%h = ",
        '{train.updates = "count"}', "train.step @step of @loss <momentum",
    ):  # fmt: skip
        assert part in text


def test_it_compiles_as_its_text_does() -> None:
    m = network()
    assert shardir.compile(m).text == shardir.compile(str(m)).text


def test_locations_are_lines_of_the_caller() -> None:
    f = Module().function("f")
    y = nn.relu(f.input("x", (2,)))
    op = y.ssa.owner
    assert isinstance(op, Operation)
    found = file_location(op.location)
    assert found is not None and found[0] == __file__
    assert "nn.relu(f.input" in Path(__file__).read_text().splitlines()[found[1] - 1]


def of(build: Callable[[FunctionBuilder], object], mesh: str | None = None) -> Callable[[], object]:
    return lambda: build(Module(mesh).function("f"))


def x(f: FunctionBuilder, *shape: int, dtype: str = "f32") -> Value:
    return f.input("x", shape, dtype)


def _unfinished() -> None:
    m = Module()
    m.function("f")
    str(m)


ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (of(lambda f: f.input("x", (2,), "f31")), "expected a dtype of f64, f32"),
    "layout without a mesh": (
        of(lambda f: f.input("x", (2,), layout="[{dp}]")), "expected a mesh, got none; use Module("
    ),
    "layout": (
        of(lambda f: f.input("x", (2,), layout="[dp"), "dp = 2"), "expected"
    ),
    "op": (of(lambda f: nn.rellu(x(f, 2))), "got 'rellu'; did you mean relu?"),
    "property": (of(lambda f: nn.gelu(x(f, 2), exakt=True)), "did you mean exact?"),
    "missing property": (of(lambda f: nn.softmax(x(f, 2))), "expected axis of nn.softmax"),
    "value of a property": (
        of(lambda f: nn.softmax(x(f, 2), axis="last")), "axis of nn.softmax to be an integer"
    ),
    "word": (of(lambda f: nn.reduce(x(f, 2), kind="som", dims=(0,))), "got 'som'"),
    "operands": (of(lambda f: nn.matmul(x(f, 2, 2))), "operands lhs, rhs of nn.matmul"),
    "shapes": (of(lambda f: x(f, 2, 3) @ x(f, 2, 3)), "expected"),
    "dtypes": (of(lambda f: x(f, 2) + x(f, 2, dtype="i32")), "expected equal element types"),
    "shape of an op that infers it": (
        of(lambda f: nn.relu(x(f, 2), shape=(2,))), "expected no shape and dtype of nn.relu"
    ),
    "another function's value": (
        of(lambda f: f.input("y", (2,)) + x(Module().function("g"), 2)), "expected operands of @f"
    ),
    "truth": (of(lambda f: bool(x(f, 2) > 0.0)), "expected a number or a bool of Python"),
    "index": (of(lambda f: x(f, 2)[2]), "expected an index from -2 to 1, got 2"),
    "indices": (of(lambda f: x(f, 2)[0, 0]), "expected at most 1 indices, got 2"),
    "negative step": (of(lambda f: x(f, 2)[::-1]), "use nn.flip"),
    "reshape": (of(lambda f: x(f, 2, 3).reshape(4, -1)), "expected a shape of 6 elements"),
    "no operand": (lambda: nn.iota(dim=0, shape=(2,)), "use function.nn.iota"),
    "no end": (_unfinished, "expected @f to return, got no end"),
    "cluster without a mesh": (lambda: Module(cluster="h200"), "expected a mesh on the cluster"),
    "init": (of(lambda f: f.input("x", (2,), init="norml")), "norml"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_say_what_was_expected(name: str) -> None:
    action, message = ERRORS[name]
    with pytest.raises((ShardirError, AttributeError)) as e:
        action()
    assert message in str(e.value)
