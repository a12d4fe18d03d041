"""Programs of shard_map: imported, on 8 ranks of the interpreter and on real ones, against JAX on 8
devices of the CPU."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from support import xla

import shardir
from shardir import ShardirError
from shardir.interpret.evaluator import run
from shardir.rewriting.one_device import unroll_manual

Body = Callable[..., Any]
Program = tuple[Body, Sequence[P], Sequence[P], Sequence[tuple[int, ...]]]


def sharded(
    body: Body, ins: Sequence[P], outs: Sequence[P], mesh: Any = None, checked: bool = False
) -> Any:
    mesh = mesh or jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    return jax.shard_map(
        body, mesh=mesh, in_specs=tuple(ins), out_specs=tuple(outs), check_vma=checked
    )


def collectives() -> Program:
    """Each collective, over one axis and over both."""

    def body(a: Any, b: Any) -> Any:
        c = lax.psum(a @ b, "y")
        d = lax.ppermute(c, "x", [(0, 1), (1, 0)])
        some = lax.ppermute(c + lax.axis_index("y"), "y", [(0, 1), (1, 2), (2, 3)])
        gathered = lax.all_gather(d, "x", axis=0, tiled=True)
        scattered = lax.psum_scatter(gathered, "y", scatter_dimension=0, tiled=True)
        moved = lax.all_to_all(a, "y", 0, 1, tiled=True)
        within = lax.all_to_all(a, "y", 0, 0, tiled=True)
        largest = lax.pmax(a, ("x", "y")) + lax.pmin(lax.pmean(a, "x"), "y")
        return d * lax.axis_index("x"), some, scattered, moved, within, largest

    both = P(("x", "y"))
    return (
        body,
        (P("x", "y"), P("y")),
        (P("x"), both, P("y"), P("x", "y"), both, P()),
        ((32, 8), (8, 4)),
    )


def ring_attention() -> Program:
    """Keys and values go round a ring; each block's own softmax is corrected."""

    def body(q: Any, k: Any, v: Any) -> Any:
        n = lax.axis_size("y")
        pairs = [(i, (i + 1) % n) for i in range(n)]

        def turn(carry: Any, _: Any) -> Any:
            k, v, total, out, top = carry
            scores = q @ k.T
            new = jnp.maximum(top, scores.max(-1))
            weights = jnp.exp(scores - new[:, None])
            scale = jnp.exp(top - new)
            total = total * scale + weights.sum(-1)
            out = out * scale[:, None] + weights @ v
            k, v = (lax.ppermute(x, "y", pairs) for x in (k, v))
            return (k, v, total, out, new), None

        first = k, v, jnp.zeros(q.shape[0]), jnp.zeros_like(q), jnp.full(q.shape[0], -1e30)
        (_, _, total, out, _), _ = lax.scan(turn, first, None, length=n)
        return (out / total[:, None],)

    rows = P(("x", "y"))
    return body, (rows, P("y"), P("y")), (rows,), ((16, 4), (8, 4), (8, 4))


def tensor_parallel_step() -> Program:
    """Gradients of a layer whose weights are split: JAX transposes the collectives."""

    def body(x: Any, w: Any, v: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            return lax.psum(jnp.sum(lax.psum(jnp.tanh(x @ w) @ v, "y") ** 2), "x")

        value, (dw, dv) = jax.value_and_grad(loss, (0, 1))(w, v)
        return value, lax.psum(dw, "x"), lax.psum(dv, "x")

    ins = P("x"), P(None, "y"), P("y")
    return body, ins, (P(), P(None, "y"), P("y")), ((8, 4), (4, 8), (8, 4))


PROGRAMS = {f.__name__: f for f in (collectives, ring_attention, tensor_parallel_step)}


def drawn(shapes: Sequence[tuple[int, ...]], dtype: Any = np.float32) -> list[np.ndarray]:
    random = np.random.default_rng(3)
    return [random.standard_normal(s).astype(dtype) for s in shapes]


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_jax(name: str) -> None:
    body, ins, outs, shapes = PROGRAMS[name]()
    args = drawn(shapes)
    f = sharded(body, ins, outs)
    compiled, expected = shardir.from_jax(f, *args), jax.jit(f)(*args)
    for module in (compiled.original, compiled.module):  # dist.manual; the local view
        for got, want in zip(run(module, compiled.name, args), expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def transposed() -> Program:
    """Collectives with transposes: of values that are equal on devices, that vary, and of both."""

    def body(a: Any, w: Any, s: Any) -> Any:
        n = lax.axis_index("y")
        some = lax.ppermute(jnp.tanh(a @ w), "y", [(0, 2), (3, 1)])
        summed = lax.psum(jnp.where(a > 0, a, s), "x")
        gathered = lax.all_gather(summed * (n + 1.0), "y")
        mean = lax.pmean(jnp.exp(w.sum() * s) * (n + a.sum()), ("x", "y"))
        scattered = lax.psum_scatter(jnp.sin(w) * (n + a.mean()), "y", scatter_dimension=1)
        row = lax.dynamic_slice_in_dim(w, n, 1, 0)
        moved = lax.all_to_all(w * (1.0 + n), "y", 1, 1, tiled=True)
        return some, gathered.sum(0) * mean, scattered, row, moved, mean + s**2

    both = P(("x", "y"))
    return body, (P("x"), P(), P()), (both, P(), both, P("y"), P("y"), P()), ((4, 4), (4, 4), ())


def typed() -> Program:
    """JAX checks which values vary, and transposes by this."""

    def body(a: Any, w: Any) -> Any:
        c = lax.psum(lax.all_gather(a, "x", tiled=True) @ w, "x") / 2
        d = lax.psum(lax.pcast(w, ("x", "y"), to="varying") * a.sum(), ("x", "y"))
        return c, d @ d, lax.psum(lax.ppermute(a, "x", [(0, 1)]), "x")

    return body, (P("x"), P()), (P(), P(), P()), ((4, 4), (4, 4))


GRADIENTS = {
    f.__name__: f for f in (transposed, typed, collectives, ring_attention, tensor_parallel_step)
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str) -> None:
    """In f64 those of jax.grad; those of difference quotients where JAX has none (pmax)."""
    body, ins, outs, shapes = GRADIENTS[name]()
    with jax.enable_x64(True):
        f, args = sharded(body, ins, outs, checked=name == "typed"), drawn(shapes, np.float64)

        def loss(args: Any) -> Any:
            return sum(jnp.sum(jnp.sin(y) * (i + 1)) for i, y in enumerate(f(*args)))

        compiled = shardir.from_jax(loss, args, optimizer="sgd, lr = 1.0")
        value, *new = run(compiled.module, "step", args)
        got = [a - b for a, b in zip(args, new, strict=True)]
        if name == "collectives":
            above, below = (
                run(compiled.original, "loss", [a * (1 + h) for a in args])[0]
                for h in (1e-5, -1e-5)
            )
            slope = sum(float((g * a).sum()) for g, a in zip(got, args, strict=True))
            np.testing.assert_allclose((above - below) / 2e-5, slope, rtol=1e-6)
            return
        expected, gradients = jax.jit(jax.value_and_grad(loss))(args)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    for g, want in zip(got, gradients, strict=True):
        np.testing.assert_allclose(g, want, rtol=1e-9, atol=1e-12 * np.abs(want).max())


def test_complex_values() -> None:
    """Both parts cross the borders of a body, and go through collectives."""

    def body(c: Any) -> Any:
        turned = c * (1 + 1j * lax.axis_index("y"))
        moved = lax.ppermute(turned, "y", [(0, 1), (2, 0)])
        gathered = lax.all_gather(lax.psum(turned, "x"), "y", axis=1, tiled=True)
        scattered = lax.psum_scatter(c * moved, "x", scatter_dimension=0, tiled=True)
        return moved, gathered, lax.all_to_all(scattered, "y", 1, 0, tiled=True)

    f = sharded(body, [P("x", "y")], [P("x", "y"), P(), P(("x", "y"))])

    def loss(a: Any) -> Any:
        return sum(jnp.sum(jnp.sin(y.real) * y.imag) for y in f(a + 1j * a.T))

    with jax.enable_x64(True):
        (a,) = drawn([(16, 16)], np.float64)
        compiled = shardir.from_jax(loss, a, optimizer="sgd, lr = 1.0")
        expected = jax.jit(jax.value_and_grad(loss))(a)
    value, new = run(compiled.module, "step", [a])
    for got, want in zip((value, a - new), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def test_on_real_ranks() -> None:
    """The ring on four ranks is attention."""
    body, ins, outs, shapes = ring_attention()
    q, k, v = drawn(shapes)
    mesh = AbstractMesh((2, 2), ("x", "y"))
    (got,) = shardir.from_jax(sharded(body, ins, outs, mesh), q, k, v)()
    weights = np.exp(q @ k.T)
    expected = weights @ v / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_training_on_real_ranks() -> None:
    """Steps through the ring on four ranks, two microbatches each, are those of JAX."""
    body, ins, outs, shapes = ring_attention()
    q, k, v = drawn(shapes)
    attend = sharded(body, ins, outs, AbstractMesh((2, 2), ("x", "y")))

    def loss(weights: Any, q: Any) -> Any:
        return jnp.mean((attend(q, *weights)[0] - 1.0) ** 2)

    compiled = shardir.from_jax(
        loss,
        (k, v),
        q,
        optimizer="sgd, lr = 1.0",
        recompute="full",
        accumulate="mean, microbatches = 2",
    )
    report = compiled.run(steps=3, verbose=False, check=True)
    assert report.checks and all(
        c.agrees for c in report.checks
    )  # the bodies of all devices on one

    def attention(weights: Any, q: Any) -> Any:
        k, v = weights
        return jnp.mean((jax.nn.softmax(q @ k.T) @ v - 1.0) ** 2)

    weights, losses = (k, v), []
    for _ in range(3):
        value, gradients = jax.value_and_grad(attention)(weights, q)
        weights = jax.tree.map(lambda w, g: w - g, weights, gradients)
        losses.append(float(value))
    np.testing.assert_allclose(report.losses["step"], losses, rtol=1e-5)


def test_a_replicated_result_that_differs_is_found() -> None:
    f = sharded(lambda x: (x,), [P("x")], [P()])
    compiled = shardir.from_jax(f, np.arange(8.0, dtype=np.float32))
    with pytest.raises(ShardirError, match="expected equal replicas"):
        run(compiled.original, compiled.name, [np.arange(8.0)])


GROUPS = """
sdy.mesh @mesh = <["x"=2, "y"=4]>
func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{"x", "y"}]>]
      out_shardings=[<@mesh, [{"x", "y"}]>] manual_axes={"x", "y"} (%a: tensor<1xf32>) {
    %1 = "stablehlo.all_reduce"(%a) <{replica_groups = dense<GROUPS> : tensor<SHAPExi64>CHANNEL}> ({
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.REDUCTION %p, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
    }) : (tensor<1xf32>) -> tensor<1xf32>
    sdy.return %1 : tensor<1xf32>
  } : (tensor<8xf32>) -> tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""
CHANNEL = ", channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
GLOBAL = f"{CHANNEL}, use_global_device_ids"


def of_groups(groups: Any, channel: str = GLOBAL, reduction: str = "add") -> str:
    text = GROUPS.replace("GROUPS", str(groups)).replace("CHANNEL", channel)
    shape = "x".join(map(str, np.shape(groups)))
    return text.replace("SHAPE", shape).replace("REDUCTION", reduction)


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], "y"),
        ([[4, 0], [1, 5], [2, 6], [7, 3]], "x"),  # a sum has no order
        ([[0, 1], [2, 3], [4, 5], [6, 7]], "y:(2)2"),
        ([[0, 2, 4, 6], [1, 3, 5, 7]], "x, y:(1)2"),
        ([[0, 1, 2, 3, 4, 5, 6, 7]], "x, y"),
        ([[i] for i in range(8)], ""),
    ],
)
def test_groups_are_axes(groups: list[list[int]], axes: str) -> None:
    compiled = shardir.from_stablehlo(of_groups(groups))
    assert f"over <{axes}>" in str(compiled.original)
    x = np.arange(1.0, 9.0)
    expected = np.array([next(x[g].sum() for g in groups if i in g) for i in range(8)])
    np.testing.assert_array_equal(run(compiled.original, "main", [x])[0], expected)


@pytest.mark.parametrize(
    ("named", "axes", "groups"),
    [
        ('<name = "y">', "y", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ('<name = "y", sub_axis_info = (1)2>', "y:(1)2", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_groups_are_named(named: str, axes: str, groups: list[list[int]]) -> None:
    old = f"dense<{groups}> : tensor<{'x'.join(map(str, np.shape(groups)))}xi64>"
    new = f"#stablehlo.replica_group_mesh_axes<mesh = @mesh, axes = [#stablehlo.axis_ref{named}]>"
    compiled = shardir.from_stablehlo(of_groups(groups).replace(old, new))
    assert f"over <{axes}>" in str(compiled.original)


@pytest.mark.parametrize("reduction", ["multiply", "or", "and"])
def test_products_and_logical_reductions(reduction: str) -> None:
    groups, x = [[0, 2, 4, 6], [1, 3, 5, 7]], np.arange(1.0, 9.0)
    text, reduce = of_groups(groups, reduction=reduction), np.multiply
    if reduction != "multiply":
        text, x = text.replace("xf32>", "xi1>").replace("tensor<f32>", "tensor<i1>"), x % 3 == 1
        reduce = np.logical_or if reduction == "or" else np.logical_and
    compiled = shardir.from_stablehlo(text)
    expected = np.array([reduce.reduce(x[groups[i % 2]]) for i in range(8)])
    for module in (compiled.original, compiled.module):
        np.testing.assert_array_equal(run(module, "main", [x])[0], expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (of_groups([[0, 1], [3, 2], [4, 6], [5, 7]]), r"which are no axes of the mesh @mesh"),
        (of_groups([[0, 3], [1, 2], [4, 7], [5, 6]]), r"which are no axes of the mesh @mesh"),
        (of_groups([[0, 1]], CHANNEL), r"replica groups of replicas"),
        (of_groups([[0]], ""), r"replica groups of replicas"),
        (of_groups([[0, 1, 2, 3, 4, 5, 6, 7]], GLOBAL, "subtract"), r"a reduction by subtract"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ShardirError, match=message):
        shardir.from_stablehlo(text)


def mapped(x: Any, w: Any, v: Any) -> Any:
    """Over `y`; rows are mapped, and summed up in three ways."""
    h = jnp.tanh(x @ w) * (1 + lax.axis_index("y"))
    out = lax.psum(h @ v, "y")
    return out, lax.psum(jnp.mean(h), "y"), h.sum(0), lax.psum(h.max(0) * h.max(), "y")


def reordered(x: Any, w: Any, v: Any) -> Any:
    """Rows are merged with other dimensions, selected by position, and go round a ring."""
    y = (x.reshape(2, 4, 4) @ w).transpose(1, 0, 2)
    y = jnp.where(lax.broadcasted_iota(jnp.int32, y.shape, 1) == 1, y, jnp.flip(y, 0))
    y = lax.ppermute(y, "y", [(i, (i + 1) % 4) for i in range(4)])
    return jnp.cumsum(y, 0), jnp.sort(v, 1)


def ordered(x: Any, w: Any, v: Any) -> Any:
    """Rows need each other: the columns are split instead."""
    return lax.psum(jnp.cumsum(x, 0) @ w, "y"), lax.psum(jnp.tanh(x @ x.T + x @ x.T), "y")


def nested(x: Any, w: Any, v: Any) -> Any:
    """A manual computation over the free axis."""

    def inner(a: Any) -> Any:
        return lax.psum(a * a, "x"), a * 2 + lax.axis_index("x")

    s, t = jax.shard_map(inner, in_specs=P("x"), out_specs=(P(), P("x")), axis_names={"x"})(x)
    return lax.psum(s @ w, "y"), t @ w


COLUMNS = P(None, "y")

FREE = {
    mapped: ((P(), P(), P("y"), P()), "(({x}, {}), ({}, {y}), ({y}, {}))", ""),
    reordered: ((P(None, None, "y"), P("y")), "(({x}, {}), ({}, {y}), ({y}, {}))", ""),
    ordered: ((P(), P()), "(({}, {x}), ({x}, {y}), ({y}, {}))", "dimension 0 of operand 0"),
    nested: ((P(), COLUMNS), "(({}, {}), ({}, {y}), ({y}, {}))", r"devices along {x} compute"),
}
"""Bodies over `y`: the layouts of results, the strategy for operands, and the warning."""


@pytest.mark.parametrize("body", FREE)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_free_axes(body: Body) -> None:
    """Along axes that a shard_map leaves out its body is global: values and gradients are JAX's,
    and devices share what the body maps, or a warning says that they don't."""
    outs, strategy, message = FREE[body]
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    with jax.enable_x64(True):
        args = drawn(((8, 4), (4, 8), (8, 4)), np.float64)
        f = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), COLUMNS, P("y")), out_specs=outs, axis_names={"y"}
        )
        options: dict[str, Any] = {"in_shardings": (P("x"), None, None)}
        with pytest.warns(match=message) if message else nullcontext():
            compiled = shardir.from_jax(f, *args, **options)
        assert strategy in str(compiled.original)
        expected = jax.jit(f)(*args)
        for module in (compiled.original, compiled.module):
            for got, want in zip(run(module, compiled.name, args), expected, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)

        def loss(*args: Any) -> Any:
            return sum(jnp.sum(jnp.sin(y)) for y in f(*args))

        options |= {"optimizer": "sgd, lr = 1.0", "parameters": (0, 1, 2)}
        compiled = shardir.from_jax(loss, *args, **options)
        value, *new = run(compiled.module, "step", args)
        want_value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*args)
    np.testing.assert_allclose(value, want_value, rtol=1e-12)
    for a, b, g in zip(args, new, gradients, strict=True):
        np.testing.assert_allclose(a - b, g, rtol=1e-10, atol=1e-12)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_come_back_from_stablehlo() -> None:
    """The global view with manual computations, in StableHLO: run by XLA, and read again."""
    body, ins, outs, shapes = collectives()
    programs: list[tuple[Any, list[np.ndarray], Any]] = [
        (sharded(body, ins, outs), drawn(shapes), None)
    ]
    mesh = jax.make_mesh((2, 4), ("x", "y"), (AxisType.Auto,) * 2)
    for body in (mapped, nested):
        f = jax.shard_map(
            body, mesh=mesh, in_specs=(P(), COLUMNS, P("y")), out_specs=FREE[body][0],
            axis_names={"y"},
        )  # fmt: skip
        programs.append((f, drawn(((8, 4), (4, 8), (8, 4))), (P("x"), None, None)))
    texts = [
        shardir.to_stablehlo(shardir.from_jax(f, *args, in_shardings=layouts).original)
        for f, args, layouts in programs
    ]
    answers = xla.run([xla.Request(t, a) for t, (_, a, _) in zip(texts, programs, strict=True)])
    for text, answer, (f, args, _) in zip(texts, answers, programs, strict=True):
        assert "sdy.manual_computation" in text and not answer.error, answer.error
        again = run(shardir.from_stablehlo(text).original, "main", args)
        for want, *got in zip(jax.jit(f)(*args), answer.results, again, strict=True):
            for values in got:
                np.testing.assert_allclose(values, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", ["collectives", "transposed"])
def test_on_one_device(name: str) -> None:
    """The bodies of all devices, one after another, with ops in place of collectives."""
    body, ins, outs, shapes = GRADIENTS[name]()
    args = drawn(shapes)
    f = sharded(body, ins, outs)
    compiled, expected = shardir.from_jax(f, *args), jax.jit(f)(*args)
    unroll_manual(compiled.original)
    compiled.original.verify()
    for got, want in zip(run(compiled.original, compiled.name, args), expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)
