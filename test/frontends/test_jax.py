"""Programs of JAX: imported in the global view, on 8 ranks of the interpreter, and on 4 real ranks,
against JAX itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from bench import jax_bytes
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import jax_programs
from support.extent import extent, sampled
from support.jax_programs import PROGRAMS
from support.runlines import run_tool

import shardir
from shardir import ShardirError
from shardir.dialects.blocks import ops_of
from shardir.interpret.evaluator import function, run

MESH = "dp = 2, tp = 4"

ALWAYS = ("mlp", "scan", "unet", "mixed", "sampling", "indices", "integers", "segments", "vmapped")

ROUNDING = {"mixed": 2**-8}
"""The tolerances of programs that are not in f64: XLA retains more digits of bf16 between ops."""


@pytest.fixture(autouse=True)
def in_f64() -> Any:
    """Arrays are in f64; what XLA compiles runs once."""
    with jax.enable_x64(True):
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)


class Case:
    """A program of JAX."""

    def __init__(self, name: str, **options: Any):
        f, self.args, self.layouts = PROGRAMS[name]()
        self.jitted = jax.jit(f, keep_unused=True, **options)
        self.tolerance = ROUNDING.get(name, 1e-9)

    def compiled(self, mesh: str) -> Any:
        return shardir.from_jax(self.jitted, *self.args, in_shardings=self.layouts, mesh=mesh)

    @cached_property
    def results(self) -> list[np.ndarray]:
        return arrays(self.jitted(*self.args))


case_of = cache(Case)
"""JAX traces and compiles the function of a case once."""


def arrays(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def assert_equal(got: Sequence[Any], expected: Any, tolerance: float = 1e-9) -> None:
    """Compare results, relative to the greatest element of each."""
    for x, y in zip(got, arrays(expected), strict=True):
        y = y.astype(np.float64)
        finite = y[np.isfinite(y)]
        largest = max(1.0, np.abs(finite).max()) if finite.size else 1.0
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance * largest
        )


@pytest.mark.parametrize("name", sampled(PROGRAMS, 1, also=ALWAYS))
def test_equals_jax(name: str) -> None:
    """One device, and 8 ranks of the interpreter."""
    case = case_of(name)
    compiled, expected = case.compiled(MESH), case.results
    inputs = arrays(case.args)
    assert_equal(run(compiled.original, compiled.name, inputs), expected, case.tolerance)
    assert_equal(run(compiled.module, compiled.name, inputs), expected, case.tolerance)


def test_trains_on_real_ranks() -> None:
    """Donated arguments are states: three steps of Adam have the losses of JAX."""
    report = (
        Case("mlp", donate_argnums=(0, 1)).compiled("dp = 2, tp = 2").run(steps=3, verbose=False)
    )
    case, losses = case_of("mlp"), []
    params, state, *batch = case.args
    for _ in range(3):
        loss, params, state = case.jitted(params, state, *batch)
        losses.append(float(loss))
    np.testing.assert_allclose(report.losses["step"], losses, rtol=1e-9)


ON_RANKS = ("scan", "dropout", "embedding", "gpt", "moe", "sampling", "unet", "segments", "vmapped")


@pytest.mark.parametrize("name", extent(["embedding"], ON_RANKS))
def test_results_of_real_ranks_are_a_tree(name: str) -> None:
    case = case_of(name)
    got = case.compiled("dp = 2, tp = 2")()
    assert jax.tree.structure(got) == jax.tree.structure(jax.eval_shape(case.jitted, *case.args))
    assert_equal(jax.tree.leaves(got), case.results)


def test_attention_on_ranks() -> None:
    """A step that JAX has differentiated, with the result of its attention: the batch and the
    heads, in groups, are split, and some queries have no keys. Ranks are real in the long form."""

    def loss(p: Any, x: Any, lengths: Any) -> Any:
        q, k, v = (jax.numpy.einsum("btd,dhe->bthe", x, p[n]) for n in "qkv")
        keys = jax.numpy.arange(6) < lengths[:, None, None, None]
        h = attention(q, k, v, mask=keys)
        h = attention(h, k, v, is_causal=True, scale=0.3)
        return (h**2).mean(), h

    attention = jax.nn.dot_product_attention
    random = np.random.default_rng(0)
    shapes = {"q": (8, 4, 4), "k": (8, 2, 4), "v": (8, 2, 4)}
    params = {n: random.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    args = params, random.normal(size=(4, 6, 8)).astype(np.float32), np.array([6, 0, 3, 1], "int32")
    layouts = {n: P(None, "tp") for n in params}, P("dp"), P("dp")
    step = jax.value_and_grad(loss, has_aux=True)
    compiled = shardir.from_jax(step, *args, in_shardings=layouts, mesh="dp = 2, tp = 2")
    names = [op.name for op in ops_of(function(compiled.original, compiled.name).body.block)]
    assert names.count("nn.attention") == names.count("nn.attention_grad") == 2
    got = extent(
        lambda: run(compiled.module, compiled.name, arrays(args)),
        lambda: jax.tree.leaves(compiled()),
    )()
    assert_equal(got, jax.tree.leaves(jax.jit(step)(*args)), 2e-6)


def test_layers_of_a_scan_are_a_loop() -> None:
    """Layers by scan are written in loops, forward and backward: 6 are as long as 4."""

    def loss(weights: Any, x: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.numpy.tanh(jax.nn.standardize(x) @ w[0]) @ w[1], None

        return (jax.lax.scan(layer, x, weights)[0] ** 2).mean()

    products = []
    for n in (4, 6):
        w1, w2, x = (jax.ShapeDtypeStruct(s, "float32") for s in ((n, 8, 16), (n, 16, 8), (8, 8)))
        grad = jax.grad(loss)
        program = shardir.from_jax(grad, (w1, w2), x, mesh="d = 2", parameters=0).program
        assert program.count(f"in range({n - 1})") == 2
        products.append(program.count(" @ "))
    assert products[0] == products[1]


def regression(params: Any, x: Any, key: Any) -> Any:
    noise = jax.random.normal(key, x.shape, jax.numpy.float32) * 0.1
    h = jax.numpy.tanh((x + noise) @ params["w1"])
    return ((h @ params["w2"]) ** 2).mean(), {"size": abs(h).mean()}


def regression_arguments() -> tuple[Any, ...]:
    n = jax_programs.Draw()
    return {"w1": n(6, 8), "w2": n(8, 4)}, n(8, 6), jax.random.key(2)


AUTO: dict[str, Any] = {"mode": "auto"}


def test_a_loss_is_differentiated() -> None:
    """With an optimizer: gradients are those of jax.grad, and so are steps of Adam on ranks; with
    all activations computed again; in the long form with a searched plan."""
    args = regression_arguments()
    with_gradients = jax.value_and_grad(regression, has_aux=True)
    (value, aux), grads = with_gradients(*args)
    compiled = shardir.from_jax(
        regression, *args, in_shardings=({"w1": P(None, "tp"), "w2": P("tp")}, P("dp"), None),
        mesh="dp = 2, tp = 2", optimizer="sgd, lr = 1.0", recompute="full",
    )  # fmt: skip
    inputs = [*arrays(args[:2]), jax.random.key_data(args[2])]
    loss, *rest = run(compiled.module, "step", inputs)
    assert_equal([loss, rest[0]], [value, aux])
    new = jax.tree.map(lambda p, g: p - g, args[0], grads)
    assert_equal(rest[1:], new)

    adam: dict[str, Any] = {"optimizer": "adam, lr = 1e-2", "mesh": "dp = 2, tp = 2"}
    trained = shardir.from_jax(regression, *args, **adam, **extent(dict[str, Any](), AUTO))
    params, state, losses = args[0], jax_programs.adam_state(args[0]), []
    for _ in range(3):
        (value, _), grads = with_gradients(params, *args[1:])
        params, state = jax_programs.adam(params, grads, state)
        losses.append(float(value))
    report = trained.run(steps=3, verbose=False)
    np.testing.assert_allclose(report.losses["step"], losses, rtol=1e-9)


def test_gradients_that_jax_defines() -> None:
    """jax.lax.stop_gradient, also in a function that jax has lowered before, and relu at 0."""

    @jax.jit
    def loss(w: Any, x: Any) -> Any:
        fixed = jax.lax.stop_gradient(jax.numpy.sin(w))
        return (jax.nn.relu(w) * fixed + jax.nn.softmax(w * x)).sum() + (w * x) @ x

    w, x = jax.numpy.array([-1.0, 0.0, 2.0, 3.0]), jax.numpy.arange(4.0)
    expected = loss(w, x), w - jax.grad(loss)(w, x)
    compiled = shardir.from_jax(loss, w, x, optimizer="sgd, lr = 1.0", mesh="d = 2")
    assert_equal(run(compiled.module, "step", arrays((w, x))), expected)


def test_gradients_that_are_not_those_of_ops() -> None:
    """A rule of the user's own, and a system, whose factors JAX does not differentiate; rules of
    JAX are those of its ops."""
    signs, clipped = jax.custom_jvp(jax.numpy.sign), jax.custom_vjp(jax.numpy.tanh)
    signs.defjvp(lambda x, t: (signs(*x), t[0]))
    clipped.defvjp(lambda x: (clipped(x), None), lambda _, d: (d,))

    def loss(w: Any) -> Any:
        own = jax.lax.cond(w.sum() > 0, signs, clipped, w)
        own = jax.lax.reduce_precision(jax.numpy.ldexp(own, 2), 5, 2)
        same = jax.lax.reduce_precision(w, 8, 7) + jax.lax.reduce_precision(w, 8, 23)
        return (jax.nn.silu(own) + jax.numpy.linalg.inv(w) + jax.nn.relu(same)).sum()

    with pytest.raises(ShardirError) as raised:
        shardir.from_jax(loss, jax.numpy.ones((4, 4)), optimizer="sgd, lr = 1.0", mesh="d = 2")
    message = str(raised.value)
    for name in (
        "jax.custom_jvp of sign at", "jax.custom_vjp of tanh at", "(solve, inv)",
        "jax.custom_jvp of _frexp at", "jax.lax.reduce_precision",
    ):  # fmt: skip
        assert message.count(name) == 1
    assert "relu" not in message and "silu" not in message


@pytest.mark.parametrize("kind", ["alias", "donor"])
def test_donated_arguments_of_a_text_are_states(kind: str) -> None:
    def step(params: Any, momentum: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: (x @ p["w"]).sum())(params)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        return value, jax.tree.map(lambda p, m: p - m, params, momentum), momentum

    trees: Any = [{"w": np.ones((4, 3), np.float32)}] * 2
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(*trees, x)
    text = lowered.as_text(debug_info=True)
    if kind == "donor":
        text = re.sub(r"tf.aliasing_output = \d : i32", "jax.buffer_donor = true", text)
    compiled = shardir.from_stablehlo(text, mesh="d = 2")
    assert 'train.parameter = "params.w"' in str(compiled.input_module)
    assert 'train.state = "momentum.w"' in str(compiled.input_module)
    assert_equal(run(compiled.module, "main", [*arrays(trees), x]), step(trees[0], trees[1], x))


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    w: Any
    scale: Any


def forms_of_arguments() -> dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """Functions, arguments and options as users of JAX have them."""
    ones = jax.numpy.ones((4, 4), jax.numpy.float32)
    mesh = jax.make_mesh((2, 4), ("dp", "tp"))
    on_rows = NamedSharding(mesh, P("dp"))
    return {
        "dataclass": (lambda m, x: x @ m.w * m.scale, (Weights(ones, 2.0), ones), {}),
        "partial": (partial(lambda config, x: x * config["a"], {"a": 2}), (ones,), {}),
        "static": (
            jax.jit(lambda n, x, how, y: (x * n).T @ y if how == "t" else x, static_argnums=(0, 2)),
            (3, ones, "t", ones), {"in_shardings": (None, P("d"), None, P())},
        ),
        "keywords": (lambda x, *, by: x * by, (ones,), {"keywords": {"by": 3}}),
        "out_shardings": (
            jax.jit(lambda x: x.T, in_shardings=on_rows, out_shardings=on_rows), (ones,),
            {"mesh": None},
        ),
        "placed": (lambda x: x * 2, (jax.device_put(ones, on_rows),), {"mesh": mesh}),
        "keys": (
            lambda k, x: (jax.random.permutation(k, x), jax.random.randint(k, (3,), 0, 7)),
            (jax.random.key(0), ones), {},
        ),
        "halves": (lambda x, y: (x @ x, y + 1), (ones.astype("float16"), ones.astype("bfloat16")),
                   {}),
        "cache": (
            jax.jit(lambda c, x, i: (c.sum(0) * x, c.at[i].set(x)), donate_argnums=0),
            (ones, ones[0], 1), {},
        ),
    }  # fmt: skip


def test_forms_of_arguments() -> None:
    """Results equal those of JAX, with its dtypes, in the global view of one device."""
    with jax.enable_x64(False):
        for name, (f, args, options) in forms_of_arguments().items():
            chosen: dict[str, Any] = {"mesh": "d = 2", **options}
            compiled = shardir.from_jax(f, *args, **chosen)
            inputs = [*compiled.states.values(), *compiled.inputs.values()]
            got = compiled.results(run(compiled.module, compiled.name, inputs))
            expected = f(*args, **options.get("keywords", {}))
            kinds = [[(x.shape, x.dtype) for x in arrays(tree)] for tree in (got, expected)]
            assert kinds[0] == kinds[1], name
            assert_equal(jax.tree.leaves(got), expected, 1e-3)


def test_takes_the_options_of_compile() -> None:
    def f(w: Any, x: Any) -> Any:
        return jax.numpy.tanh(x @ w)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((64, 64), (32, 64))]
    plan = {"w": "[{}, {tp}]"}
    planned = shardir.from_jax(f, *shapes, mesh={"tp": 4}, parameters=0, plan=plan)
    assert "w: f32 [64, 16] of [64, 64], [{}, {tp}]" in planned.program
    searched = shardir.from_jax(f, *shapes, mesh={"tp": 4}, mode="auto")
    assert "test_jax.py:" in searched.program  # ops have their lines


SHARDED = """
module {
  sdy.mesh @mesh = <["dp"=2, "tp"=4]>
  func.func @main(
      %x: tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"dp"}, {?}]>},
      %w: tensor<16x32xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>}
  ) -> (tensor<8x32xf32>, tensor<8x16xf32> {sdy.sharding = #sdy.sharding<@mesh, [{}, {"tp"}]>}) {
    %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
    %1 = sdy.sharding_constraint %0 <@mesh, [{"dp"}, {}]> : tensor<8x32xf32>
    return %1, %x : tensor<8x32xf32>, tensor<8x16xf32>
  }
}
"""


def test_shardings_of_shardy(tmp_path: Path) -> None:
    """Those of arguments, constraints and results become annotations; values stay."""
    compiled = shardir.from_stablehlo(SHARDED)
    assert compiled.text.startswith("#local0")
    x, w = (np.arange(n, dtype=np.float32).reshape(-1, k) / n for n, k in ((128, 16), (512, 32)))
    assert_equal(run(compiled.module, "main", [x, w]), [x @ w, x], 1e-6)
    text = str(compiled.input_module)
    for layout in ("{dp}, {?}", "{}, {tp}", "{dp}, {}"):
        assert f"@mesh, [{layout}]" in text
    path = tmp_path / "x.mlir"
    path.write_text(SHARDED)
    code, out, _ = run_tool(["shard-opt", str(path)], b"")
    assert code == 0 and "#dist.layout<@mesh, [{dp}, {}]>" in out


def test_two_meshes_of_the_same_devices() -> None:
    """A constraint on one of other axes, and arguments and results of a function within."""
    devices = np.array(jax.devices()[:8])
    pairs, row = Mesh(devices.reshape(2, 4), ("x", "y")), Mesh(devices, ("z",))
    on_row, on_y = NamedSharding(row, P(None, "z")), NamedSharding(pairs, P("y"))
    inner = jax.jit(lambda x: x * 2, in_shardings=on_row, out_shardings=on_y)

    def f(x: Any) -> Any:
        return inner(jax.lax.with_sharding_constraint(x @ x, on_row)) + 1

    x = np.arange(64, dtype=np.float32).reshape(8, 8) / 8
    compiled = shardir.from_jax(f, x)
    text = str(compiled.input_module)
    for op, layout in (("%einsum = ", "{}, {z}"), ("%mul = ", "{z:(2)4}, {}")):
        line = next(l for l in text.splitlines() if op in l)
        assert line.endswith(f"-> tensor<8x8xf32, #dist.layout<@mesh, [{layout}]>>"), line
    assert_equal(run(compiled.module, "f", [x]), [np.asarray(f(x))], 1e-6)


def test_another_mesh_is_refused() -> None:
    with pytest.raises(ShardirError, match=r"expected the mesh of the program's shardings"):
        shardir.from_stablehlo(SHARDED, mesh="dp = 4, tp = 2")


def test_refusals_have_lines_and_reasons() -> None:
    def f(x: Any) -> Any:
        y = jax.numpy.linalg.eigvalsh(x).sum()
        jax.debug.print("{}", y)
        return x + y

    with pytest.raises(ShardirError) as raised:
        shardir.from_jax(f, jax.numpy.ones((4, 4)), mesh="d = 2")
    message = str(raised.value)
    line = f.__code__.co_firstlineno
    assert "stablehlo.custom_call @lapack_dsyevd_ffi" in message
    assert f"test_jax.py:{line + 1}: a call of XLA's library for eigenvalues" in message
    assert f"test_jax.py:{line + 2}: a call of Python" in message


def counted() -> Any:
    """A step whose loss has the type of a donated state."""
    return jax.jit(lambda w, n: ((w * w).sum(), w * 0.9, n + 1), donate_argnums=(0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: shardir.from_jax(3, x, mesh="d = 2"), "expected a function of JAX"),
        (lambda x: shardir.from_jax(abs, x, parameters=1, mesh="d = 2"), "from 0 to 0, got 1"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(P("e"),), mesh="d = 2"), "axis"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(P("d"), P()), mesh="d = 2"), "of 1 arg"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(P("d", "d", "d"),), mesh="d = 2"), "x"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(P("d"),)), "expected a mesh"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(3,), mesh="d = 2"),
         "in_shardings of x: expected a PartitionSpec, .*, got 3"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=("[{d}, {",), mesh="d = 2"),
         "in_shardings of x: expected a sharding"),
        (lambda x: shardir.from_jax(abs, x, in_shardings=(P(unreduced={"d"}),), mesh="d = 2"),
         "in_shardings of x: expected axes of dimensions"),
        (lambda x: shardir.from_jax(abs, x, in_sharding=(P("d"),), mesh="d = 2"),
         r"argument of from_jax, got in_sharding; did you mean in_shardings\?"),
        (lambda x: shardir.from_jax(abs, x, stages="1f1b, ranks = 2", mesh="d = 2"),
         "expected an optimizer of the loss beside stages"),
        (lambda x: shardir.from_jax(abs, x, devices=0), "expected at least 1 device, got 0"),
        (lambda x: shardir.from_jax(jax.pmap(abs), x, mesh="d = 2"), "got jax.pmap; use jax.jit"),
        (lambda x: shardir.from_jax(lambda x: jax.debug.print("{}", x), x, mesh="d = 2"),
         r"custom_call @xla_ffi_python_cpu_callback at .*test_jax\.py:"),
        (lambda x: shardir.from_stablehlo("module {\nsdy.x"), "expected a module of StableHLO"),
        (lambda x: shardir.from_stablehlo(3), "expected text or a module of jaxlib"),
        (lambda x: shardir.from_jax(jax.jit(lambda x: x.sum(), donate_argnums=0), x, mesh="d = 2"),
         "expected a result with the structure of the donated argument 0"),
        (lambda x: shardir.from_jax(counted(), x, jax.numpy.ones(()), mesh="d = 2"),
         r"of the form of argument 1 \(1 in all\), got 2; return the others in a dict"),
        (lambda x: shardir.from_stablehlo(counted().lower(x, jax.numpy.ones(())).as_text()),
         "expected one result of type tensor<f[0-9]*> for the loss, got several"),
    ],
)  # fmt: skip
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ShardirError, match=message):
        make(jax.numpy.ones((4, 4)))


@pytest.mark.parametrize("name", extent(["embedding"], [*PROGRAMS]))
def test_no_more_bytes_than_in_the_program_of_xla(name: str) -> None:
    """The table in docs/guides/jax.md has these bytes; test/bench/jax_bytes.py counts both."""
    jax.config.update("jax_disable_most_optimizations", False)
    with jax.enable_x64(False):
        program = PROGRAMS[name]()
        (theirs, _), (ours, _) = jax_bytes.of_xla(*program), jax_bytes.of_shardir(*program)
    assert ours <= theirs
