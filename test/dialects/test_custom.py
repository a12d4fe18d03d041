"""Custom ops: what is registered, what the text can and cannot say, and ops of other dialects."""
# ruff: noqa: E402 (torch may not be installed)

import warnings

import numpy as np
import pytest
from support import kernels

torch = pytest.importorskip("torch")

from support.emitted import functions_of
from xdsl.context import Context
from xdsl.dialects.builtin import Builtin
from xdsl.dialects.func import Func
from xdsl.dialects.math import Math
from xdsl.parser import Parser

import shardir
from shardir.backend.torch.shardir_runtime import runtime
from shardir.dialects import DIALECTS
from shardir.dialects.nn import CustomOp
from shardir.dialects.nn.custom import forget_custom_op
from shardir.interpret import run
from shardir.tools.opt import main

SCALE = """
func.func @f(%x: tensor<4x3xf64>) -> tensor<4x3xf64> {
  %y = nn.custom "test.op"(%x) OPTIONS: (tensor<4x3xf64>) -> tensor<4x3xf64>
  func.return %y : tensor<4x3xf64>
}
"""
X = np.random.default_rng(0).standard_normal((4, 3))


@pytest.fixture
def register():
    """register_custom_op, for one test."""
    names = []

    def call(name, **options):
        names.append(name)
        shardir.register_custom_op(name, **options)

    yield call
    for name in names:
        forget_custom_op(name)


def called(program, monkeypatch, name="f"):
    """A function of the program of one device, in this process."""
    space = functions_of(program)
    mesh = runtime.Mesh([], 0)
    return lambda *given: space[name](mesh, *map(torch.tensor, given))


# ---- what is registered ----


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "a b"}, "expected a name of a custom op, got 'a b'"),
        ({"name": 'x"\n'}, "expected a name of a custom op"),
        ({"name": "test.op", "gradient": "é"}, "expected a name of a custom op"),
        ({"name": "test.op", "torch": "kernels"}, "expected torch=.*, got 'kernels'"),
        ({"name": "test.op", "torch": "os;x:f"}, "expected torch="),
        ({"name": "test.op", "torch": "kernels:f()"}, "expected torch="),
        ({"name": "test.op", "torch": "kernels:f\n"}, "expected torch="),
        ({"name": "test.op", "torch": "a.class:f"}, "expected torch="),
        ({"name": "test.op", "rule": "ij -> ij"}, "expected a rule of the form"),
        ({"name": "test.op", "rule": "(i) -> (i) reduce mean"}, "expected a rule of the form"),
        ({"name": "test.op", "rule": "(i, i) -> (i)"}, "expected distinct names"),
        ({"name": "test.op", "rule": "(i-k) -> (i)"}, "expected names for a dimension, or 1"),
        ({"name": "test.op", "rule": "(i) -> (i, j)"}, "in an operand, got j; add replicate j"),
        ({"name": "test.op", "rule": "(i) -> (i) replicate j"}, "after replicate, got j"),
        ({"name": "test.op", "rule": "(i) -> (i) sizes k = 2"}, "dimensions after sizes, got k"),
        ({"name": "test.op", "rule": "(..., ...) -> (...)"}, "expected distinct names"),
        ({"name": "test.op", "rule": "(i) -> (...)"}, "in an operand, got ...; add replicate"),
    ],
)  # fmt: skip
def test_what_cannot_be_registered(options, message):
    with pytest.raises(shardir.ShardirError, match=message.replace("(", r"\(")):
        shardir.register_custom_op(**options)


@pytest.mark.parametrize(
    ("rule", "factors"),
    [
        ("(i, j) -> (i, j)", "(i, j) -> (i, j) {i=4, j=3}"),
        ("(..., j) -> (..., j)", "(d0, j) -> (d0, j) {d0=4, j=3}"),
        ("(...) -> (...)", "(d0, d1) -> (d0, d1) {d0=4, d1=3}"),
        ("(d0, ..., k) -> (d0, ..., k)", "(d0, k) -> (d0, k) {d0=4, k=3}"),
        (lambda xs, ys: f"(i, 1) -> (i, {'j' if xs == ys else '1'}) replicate j",
         "(i, 1) -> (i, j) {i=4, j=3} replicate j"),
        (lambda xs, ys: None, "(d0, d1) -> (d2, d3) {d0=4, d1=3, d2=4, d3=3} reduce sum d0, d1 "
         "replicate d0, d1, d2, d3"),
        ("(i,1)->(i,j) replicate j", "(i, 1) -> (i, j) {i=4, j=3} replicate j"),
        (None, "(d0, d1) -> (d2, d3) {d0=4, d1=3, d2=4, d3=3} reduce sum d0, d1 "
         "replicate d0, d1, d2, d3"),
    ],
)  # fmt: skip
def test_factors(register, rule, factors):
    register("test.op", rule=rule)
    module = shardir.parse(SCALE.replace("OPTIONS", ""))
    (op,) = (op for op in module.walk() if isinstance(op, CustomOp))
    assert str(op.factors()) == factors


def test_a_rule_in_the_text_counts(register):
    """Before that of the registration, which a function may make from the options."""
    rules = []
    register("test.op", rule=lambda xs, ys, by: rules.append((xs, ys, by)) or "(i, 1) -> (i, 1)")
    for word, factors in [
        ('rule "(..., k) -> (..., k)" ', "(d0, k) -> (d0, k) {d0=4, k=3}"),
        ("", "(i, 1) -> (i, 1) {i=4}"),
    ]:
        module = shardir.parse(SCALE.replace("OPTIONS", word + "with {by = 2.0 : f64} "))
        (op,) = (op for op in module.walk() if isinstance(op, CustomOp))
        assert str(op.factors()) == factors
        assert str(module) == str(shardir.parse(str(module)))
    assert rules[0] == ([(4, 3)], [(4, 3)], 2.0)
    with pytest.raises(shardir.ShardirError, match=r"T11.*expected a rule of the form"):
        shardir.parse(SCALE.replace("OPTIONS", 'rule "ij" '))


def test_what_is_registered_again_counts(register):
    text = SCALE.replace("OPTIONS", "")
    for rule, message in [
        ("(i, j, k, ...) -> (i, ...)", "expected at least 3 dimensions in operand 0, got 2"),
        (lambda xs, ys: 3, "expected the text of a rule from its function, got 3"),
        ("(i) -> (i)", "expected 1 dimensions in operand 0, got 2"),
        ("(i, j), () -> (i, j)", "expected 2 operands, got 1"),
        ("(i, j) -> (j, i)", "expected one size of j, got 3 and 4"),
        ("(a b, j) -> (a b, j)", "expected the size of a, as in sizes a = 2, got none"),
        ("(a b, j) -> (a b, j) sizes a = 2, b = 3", "expected 6 elements of a b, got 4"),
        ("(i, j) -> (i, j)", ""),
    ]:
        register("test.op", rule=rule)
        if not message:
            shardir.parse(text)
            continue
        with pytest.raises(shardir.ShardirError, match=message):
            shardir.parse(text)


# ---- what is computed ----

MOMENTS = """
dist.mesh @m <a = 2, b = 2>
func.func @f(%x: tensor<5x3xf64, #dist.layout<@m, [{a}, {b}]>>, %w: tensor<5xf64>) -> tensor<f64> {
  %s, %p = nn.custom "test.moments"(%x, %w) : (tensor<5x3xf64, #dist.layout<@m, [{a}, {b}]>>, tensor<5xf64>) -> (tensor<3xf64>, tensor<5x5xf64>)
  %q = nn.mul %p, %p : (tensor<5x5xf64>, tensor<5x5xf64>) -> tensor<5x5xf64>
  %r = nn.reduce <sum> %q dims <0, 1> : (tensor<5x5xf64>) -> tensor<f64>
  %t = nn.reduce <max> %s dims <0> : (tensor<3xf64>) -> tensor<f64>
  %u = nn.mul %r, %t : (tensor<f64>, tensor<f64>) -> tensor<f64>
  func.return %u : tensor<f64>
}
train.gradient @g of @f wrt <0, 1>
"""  # noqa: E501 - the text of a program


def wanted_of_moments(x, w):
    """The value and the gradients, by torch's autograd."""
    x, w = (torch.tensor(v, requires_grad=True) for v in (x, w))
    u = (x @ x.T).square().sum() * (w[:, None] * x).sum(0).max()
    u.backward()
    return u.item(), x.grad, w.grad


@pytest.mark.parametrize("rule", [None, "(i, j), (i) -> (j), (i, k) replicate i, k"])
def test_several_results_and_their_gradients(register, monkeypatch, rule):
    register("test.moments", evaluate=kernels.moments, torch="support.kernels:moments", rule=rule,
             gradient="test.moments_grad")  # fmt: skip
    register(
        "test.moments_grad", evaluate=kernels.moments_grad, torch="support.kernels:moments_grad"
    )
    w = np.random.default_rng(1).standard_normal(5)
    x = X.repeat(2, 0)[:5]
    x[1] += 1
    want = wanted_of_moments(x, w)
    with pytest.warns(UserWarning, match="no rule is registered") as said:
        compiled = shardir.compile(MOMENTS)
    assert len(said) == (1 if rule else 2)
    single = shardir.compile(MOMENTS, "single-device")
    found = [run(compiled.module, "g", [x, w]), run(single.module, "g", [x, w]),
             called(single.program, monkeypatch, "g")(x, w)]  # fmt: skip
    for values in found:
        for value, right in zip(values, want, strict=True):
            np.testing.assert_allclose(value, right, rtol=1e-12)


def test_a_view_is_not_written_into(register, monkeypatch):
    """A function may give what it got: neither the argument nor the other value changes."""
    register("test.op", torch="support.kernels:same", evaluate=kernels.same)
    text = """
    func.func private @loss(%w: tensor<3xf32> {train.parameter = "w", train.init = #train.init<normal>}, %n: tensor<3xf32> {train.state = "n", train.init = #train.init<constant, value = 1.0>}) -> (tensor<f32>, tensor<3xf32> {train.updates = "n"}) {
      %s = nn.stop_gradient %w : (tensor<3xf32>) -> tensor<3xf32>
      %v = nn.custom "test.op"(%s) : (tensor<3xf32>) -> tensor<3xf32>
      %p = nn.mul %w, %w : (tensor<3xf32>, tensor<3xf32>) -> tensor<3xf32>
      %t = nn.reduce <sum> %p dims <0> : (tensor<3xf32>) -> tensor<f32>
      func.return %t, %v : tensor<f32>, tensor<3xf32>
    }
    train.step @step of @loss <sgd, lr = 0.25>
    """  # noqa: E501 - the text of a program
    compiled = shardir.compile(text)
    w, n = (np.array(x, np.float32) for x in ([1, 2, 3], [0, 0, 0]))
    want = run(compiled.module, "step", [w, n])
    found = called(compiled.program, monkeypatch, "step")(w, n)
    for value, right in zip(found, want, strict=True):
        np.testing.assert_allclose(value, right)


def test_a_wrong_shape_is_an_error(register):
    register("test.op", evaluate=lambda x: x.T)
    module = shardir.parse(SCALE.replace("OPTIONS", ""))
    with pytest.raises(shardir.ShardirError, match=r"\[T11\] .*\[\[4, 3\]\] .*got \[\[3, 4\]\]"):
        run(module, "f", [X])


def test_mixed_precision_leaves_it_in_f32(register):
    register("test.op", evaluate=lambda x: x, rule="(i, j) -> (i, j)")
    text = """
    func.func @f(%x: tensor<4x4xf32>) -> tensor<4x4xf32> {
      %y = nn.matmul %x, %x : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
      %z = nn.custom "test.op"(%y) : (tensor<4x4xf32>) -> tensor<4x4xf32>
      func.return %z : tensor<4x4xf32>
    }"""
    compiled = shardir.compile(text, "mixed-precision")
    assert ") : (tensor<4x4xf32>) -> tensor<4x4xf32>" in compiled.text


# ---- what the text can say ----

EVIL = ['"); import os; os.abort()  #', "\n", "\\", "{x}", '\'"""', "\u2028", "é\x00"]


def test_options_are_literals(register, monkeypatch):
    seen = []
    monkeypatch.setattr(kernels, "told", lambda x, **options: seen.append(options) or x)
    register("test.op", torch="support.kernels:told", evaluate=kernels.told)
    strings = ", ".join('"' + "".join(f"\\{b:02X}" for b in word.encode()) + '"' for word in EVIL)
    options = (
        "with {a = -3 : i32, b = true, c = 0x7FF0000000000000 : f64, d = -1.5 : f32, "
        f'e = [{strings}, 2 : i64], f = array<i64: 1, 2>, g, h = #train.init<normal>, i = []}} '
    )  # fmt: skip
    compiled = shardir.compile(SCALE.replace("OPTIONS", options), "")
    called(compiled.program, monkeypatch)(X)
    run(compiled.module, "f", [X])
    assert seen[0] == seen[1] == {
        "a": -3, "b": True, "c": np.inf, "d": -1.5, "e": (*EVIL, 2), "f": (1, 2), "g": True,
        "h": "#train.init<normal, mean = 0.0, std = 1.0>", "i": (),
    }  # fmt: skip
    assert type(seen[0]["b"]) is bool and "(1,)" not in compiled.program


@pytest.mark.parametrize(
    ("torch", "message"),
    [(None, r"\[T11\] expected the function in torch of the custom op \"test.op\", got none"),
     ("shardir_runtime:f", r"\[T11\] expected .* a module whose name programs do not use, got"),
     ("F:f", "got F; rename the module"), ("os.path:join", None)],
)  # fmt: skip
def test_modules_of_programs(register, torch, message):
    register("test.op", torch=torch)
    compiled = shardir.compile(SCALE.replace("OPTIONS", ""), "")
    if message is None:
        assert "import os.path\n" in compiled.program
        return
    with pytest.raises(shardir.ShardirError, match=message):
        compiled.program  # noqa: B018 - the property raises


def test_names_of_values_do_not_hide_modules(register, monkeypatch):
    register("test.op", torch="support.kernels:same")
    text = SCALE.replace("OPTIONS", "").replace("%x", "%support").replace("@f", "@support")
    compiled = shardir.compile(text, "")
    found = called(compiled.program, monkeypatch, "support_1")(X)
    np.testing.assert_array_equal(found, X)


# ---- ops of other dialects ----


def test_an_op_of_another_dialect(register, monkeypatch):
    register("math.sqrt", evaluate=lambda x, fastmath: np.sqrt(x), torch="support.kernels:root")
    monkeypatch.setattr(kernels, "root", lambda x, fastmath: x.sqrt(), raising=False)
    ctx = Context()
    for dialect in (Builtin, Func, Math, *(make() for make in DIALECTS.values())):
        ctx.load_dialect(dialect)
    kind = "tensor<4x3xf64, #dist.layout<@m, [{a}, {}]>>"
    module = Parser(
        ctx,
        f"""
    dist.mesh @m <a = 2>
    func.func @f(%x: {kind}) -> {kind} {{
      %y = math.sqrt %x : {kind}
      func.return %y : {kind}
    }}""",
    ).parse_module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = shardir.compile(module)
    assert "math.sqrt" in str(module) and 'nn.custom "math.sqrt"' in compiled.text
    for m in (module, compiled.module):
        np.testing.assert_allclose(run(m, "f", [X * X])[0], abs(X))
    assert "y = support.kernels.root(" in compiled.program


def test_import_of_registrations(tmp_path, monkeypatch, capsys):
    """shard-opt takes what is registered from a module of the command line alone."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "acme_registered.py").write_text(
        "import shardir\nshardir.register_custom_op('test.imported', torch='acme.kernels:f')\n"
    )
    source = tmp_path / "x.ir"
    source.write_text(SCALE.replace("OPTIONS", "").replace("test.op", "test.imported"))
    try:
        assert main([str(source), "-t", "torch", "--import", "acme_registered"]) == 0
        assert "y = acme.kernels.f(x)" in capsys.readouterr().out
    finally:
        forget_custom_op("test.imported")
    assert main([str(source), "--import", "acme_missing"]) == 2
    assert "--import acme_missing: ModuleNotFoundError" in capsys.readouterr().err


def test_a_search_after_another_registration_has_its_rule(register):
    text = """
dist.mesh @m <d = 2>
#rows = #dist.layout<@m, [{d}, {}]>
func.func @f(%x: tensor<8192x4096xf32, #rows>) -> tensor<8192x4096xf32> {
  %y = nn.custom "test.op"(%x) : (tensor<8192x4096xf32, #rows>) -> tensor<8192x4096xf32>
  func.return %y : tensor<8192x4096xf32>
}
"""
    register("test.op", rule="(i, j) -> (i, j) replicate i")
    assert "({}, {d})" in shardir.compile(text, "search-strategies").text
    register("test.op", rule="(i, j) -> (i, j)")
    assert "({d}, {})" in shardir.compile(text, "search-strategies").text
