"""The text of emitted programs, and programs that cannot be emitted."""
# ruff: noqa: E501 (texts of programs)

import random

import numpy as np
import pytest
import torch
from support.emitted import MESH, STEP, TYPES, body_of, functions_of, mesh_op, tensor
from xdsl.dialects.builtin import ModuleOp, f32
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region

import shardir
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis
from shardir.analysis.accumulation import matrix_product
from shardir.backend.torch.emit.einsum import addition_call, contraction
from shardir.backend.torch.emit.literals import number_text
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime import runtime as rt
from shardir.backend.torch.shardir_runtime.ops import tensors as tensor_ops
from shardir.dialects import dist, nn
from shardir.interpret.evaluator import run
from shardir.syntax.parser import parse

# ---- contractions ----


@pytest.mark.parametrize(("equation", "text"), [
    ("ik,kj->ij", "x @ y"),
    ("ij,kj->ik", "x @ y.mT"),
    ("ik,ij->kj", "x.mT @ y"),
    ("abik,kj->abij", "x @ y"),
    ("abij,kj->abik", "x @ y.mT"),
    ("abk,abj->kj", "x.flatten(0, 1).mT @ y.flatten(0, 1)"),
    ("abj,abk->kj", "y.flatten(0, 1).mT @ x.flatten(0, 1)"),
    ("bik,bkj->bij", "x @ y"),
    ("bij,bkj->bik", "x @ y.mT"),
    ("bik,bij->bkj", "x.mT @ y"),
    ("ik,k->i", "x @ y"),
    ("kab,kj->abj", "(x.flatten(1, 2).mT @ y).unflatten(0, (2, 3))"),
    ("bqhd,bkhd->bhqk", 'torch.einsum("bqhd,bkhd->bhqk", x, y)'),
    ("i,j->ij", 'torch.einsum("i,j->ij", x, y)'),
])  # fmt: skip
def test_contractions_as_people_write_them(equation, text):
    x, y, z = equation.replace("->", ",").split(",")
    sizes: dict[str, str] = dict(zip("abcdhijkq", "237243453", strict=True))
    assert contraction((x, y, z), ("x", "y"), sizes) == text


def test_contractions_equal_einsum():
    """Whatever the equation: operands of up to four letters, seeded."""
    choose, seen = random.Random(5), 0
    sizes: dict[str, int] = dict(zip("abcdef", (2, 3, 4, 5, 1, 2), strict=True))
    for _ in range(600):
        pool = choose.sample("abcdef", choose.randint(1, 5))
        kinds = {c: choose.choice(["xy", "xz", "yz", "xyz"]) for c in pool}
        x, y, z = ("".join(c for c in pool if side in kinds[c]) for side in "xyz")
        if choose.random() < 0.7:
            x, y, z = ("".join(choose.sample(p, len(p))) for p in (x, y, z))
        text = contraction((x, y, z), ("x", "y"), {c: str(n) for c, n in sizes.items()})
        a = torch.randn([sizes[c] for c in x], dtype=torch.float64)
        b = torch.randn([sizes[c] for c in y], dtype=torch.float64)
        got = eval(text, {"torch": torch, "x": a, "y": b})
        want = np.einsum(f"{x},{y}->{z}", a.numpy(), b.numpy())
        assert got.shape == want.shape, text
        np.testing.assert_allclose(got.numpy(), want, atol=1e-12)
        seen += "einsum" not in text
    assert seen > 40


def test_products_are_added_to_their_sums():
    """Of two matrices or of batches of them, with the dimensions of each in any order; the text has
    the sum and the product, for all contractions that are such products."""
    sizes: dict[str, int] = {"a": 2, "b": 3, "c": 4, "d": 2, "e": 3}
    draw, seen = random.Random(2), 0
    for _ in range(2000):
        x, y = ("".join(draw.sample("abcde", draw.randint(2, 4))) for _ in range(2))
        z = "".join(c for c in draw.sample("abcde", 5) if c in x + y)[: draw.randint(2, 3)]
        if not z or matrix_product(x, y, z) is None or not {*x, *y} <= {*z} | ({*x} & {*y}):
            continue
        a = torch.randn([sizes[c] for c in x], dtype=torch.float64)
        b = torch.randn([sizes[c] for c in y], dtype=torch.float64)
        total = torch.randn([sizes[c] for c in z], dtype=torch.float64)
        want = total + torch.einsum(f"{x},{y}->{z}", a, b)
        eval(f"total.{addition_call((x, y, z), ('x', 'y'))}", {"total": total, "x": a, "y": b})
        torch.testing.assert_close(total, want)
        seen += 1
    assert seen > 20


def test_the_gradient_of_a_microbatch_is_added_by_its_product():
    """Unless it is read besides."""
    source = """func.func private @loss(%x: tensor<2x3x4xf32> {train.input}, %w: tensor<4x5xf32> {train.parameter = "w"}) -> tensor<f32> {
  %h = nn.matmul %x, %w : (tensor<2x3x4xf32>, tensor<4x5xf32>) -> tensor<2x3x5xf32>
  %l = nn.reduce <sum> %h dims <0, 1, 2> : (tensor<2x3x5xf32>) -> tensor<f32>
  func.return %l : tensor<f32>
}
train.step @step of @loss <sgd, lr = 0.1> accumulate <mean, microbatches = 3>"""
    text = shardir.compile(source).program
    assert "d_w.addmm_(x_1.flatten(0, 1).mT, d_h.flatten(0, 1))" in text
    assert "d_w +=" not in text


def test_the_gradient_of_a_table_is_added_row_by_row():
    """The sum over microbatches is that of torch's embedding, also where ids are repeated."""
    source = """func.func private @loss(%ids: tensor<3xi64> {train.input}, %x: tensor<3x2xf64> {train.input}, %w: tensor<4x2xf64> {train.parameter = "w"}) -> tensor<f64> {
  %h = nn.gather %w, %ids axis 0 : (tensor<4x2xf64>, tensor<3xi64>) -> tensor<3x2xf64>
  %y = nn.mul %h, %x : (tensor<3x2xf64>, tensor<3x2xf64>) -> tensor<3x2xf64>
  %l = nn.reduce <sum> %y dims <0, 1> : (tensor<3x2xf64>) -> tensor<f64>
  func.return %l : tensor<f64>
}
train.step @step of @loss <sgd, lr = 1.0> accumulate <sum, microbatches = 3>"""
    text = shardir.compile(source).program
    assert "ops.take_grad(ids_1, d_h, (4, 2), 0, 0, 4, out=d_w)" in text
    assert "d_w +=" not in text
    total, of = torch.zeros(4, 2, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    of.requires_grad_()
    draw = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(4, (3,), generator=draw)
        dy = torch.randn(3, 2, generator=draw, dtype=torch.float64)
        (torch.nn.functional.embedding(ids, of) * dy).sum().backward()
        assert tensor_ops.take_grad(ids, dy, (4, 2), 0, 0, 4, out=total) is total
    torch.testing.assert_close(total, of.grad)


# ---- what a step looks like ----


def test_the_text_of_a_step():
    text = body_of(program_text(parse(STEP, "some/where/step.ir", verify=True)))
    assert (
        text
        == """mesh, x, w):
    # x: f32 [4, 3] of [8, 3], [{dp}, {}]
    # w: f32 [3, 3]
    h = x @ w  # step.ir:7
    r = h.relu()  # step.ir:8
    del h
    l = r.sum()  # step.ir:9
    # all-reduce sum over dp (2 ranks), 4 B: nn.reduce %l at step.ir:9 leaves partial sums
    loss = rt.all_reduce(mesh, l, "sum", ("dp",), donate=True)

    # ---- backward ----
    d_w = x.mT @ r  # step.ir:13
    del r
    # all-reduce sum over dp (2 ranks), 36 B: nn.einsum %d_w at step.ir:13 leaves partial sums
    d_w = rt.all_reduce(mesh, d_w, "sum", ("dp",), donate=True)

    # ---- update ----
    w.sub_(d_w, alpha=0.5)  # step.ir:16

    return loss, w"""
    )


@pytest.mark.parametrize(("old", "new", "lacks"), [
    # the parameter is read after its update, by itself or through a view: no update in place
    ("func.return %loss, %new", "%y = nn.neg %w : (T) -> T\n  %z = nn.add %y, %new : (T, T) -> T\n"
     "  func.return %loss, %z", " w.sub_"),
    ("func.return %loss, %new", "func.return %loss, %new", None),
    ("train.backward", "%t = nn.transpose %w perm <1, 0> : (T) -> T\n  train.backward", None),
    # what is reduced is a view of the parameter: not donated
    ('%d_w_1 = dist.all_reduce <sum> %d_w', "%p = dist.replicated_to_partial <sum> %w over <dp> : (T) -> P\n"
     "  %d_w_1 = dist.all_reduce <sum> %p", '"sum", ("dp",), donate=True)\n\n    # ---- update'),
    # what is reduced is read afterwards
    ("%new = train.sgd", "%z = nn.neg %d_w : (P) -> P\n  %zz = dist.all_reduce <sum> %z over <dp>"
     " : (P) -> T\n  %new = train.sgd", 'd_w, "sum", ("dp",), donate'),
])  # fmt: skip
def test_memory_is_reused_only_after_its_last_use(old, new, lacks):
    replicated = "tensor<3x3xf32, #dist.local<@m, [{}, {}]>>"
    partial = "tensor<3x3xf32, #dist.local<@m, [{}, {}], partial sum {dp}>>"
    new = new.replace("(T, T)", "(T, " + replicated + ")").replace("(T", f"({replicated}")
    new = new.replace("-> T", f"-> {replicated}")
    new = new.replace("(P)", f"({partial})").replace("-> P", f"-> {partial}")
    text = body_of(program_text(parse(STEP.replace(old, new), "s.ir", verify=True)))
    if lacks is None:
        assert "w.sub_(" in text
    else:
        assert lacks not in text


def test_a_use_after_the_update_is_seen_through_views():
    replicated = "tensor<3x3xf32, #dist.local<@m, [{}, {}]>>"
    view = f"%t = nn.transpose %w perm <1, 0> : ({replicated}) -> {replicated}\n  train.backward"
    text = STEP.replace("train.backward", view).replace("%loss, %new :", "%loss, %t :")
    text = body_of(program_text(parse(text, "s.ir", verify=True)))
    assert "sub_" not in text and "sub" not in text.replace("subset", "")  # no op uses the update


def test_scalars_are_literals_of_the_text():
    text = """func.func @f(%x: tensor<3xf32>, %h: tensor<3xbf16>, %n: tensor<3xi32>) -> (tensor<3xf32>, tensor<3xbf16>, tensor<3xf32>, tensor<3xf32>, tensor<3xi32>, tensor<3xi1>, tensor<f32>, tensor<3xf32>) {
      %c = nn.constant dense<0.1> : tensor<f32> -> tensor<f32>
      %d = nn.constant dense<0.1> : tensor<bf16> -> tensor<bf16>
      %i = nn.constant dense<-3> : tensor<i32> -> tensor<i32>
      %high = nn.constant dense<2.5> : tensor<f32> -> tensor<f32>
      %cc = nn.mul %c, %c : (tensor<f32>, tensor<f32>) -> tensor<f32>
      %0 = nn.mul %c, %x : (tensor<f32>, tensor<3xf32>) -> tensor<3xf32>
      %1 = nn.sub %d, %h : (tensor<bf16>, tensor<3xbf16>) -> tensor<3xbf16>
      %2 = nn.div %c, %x : (tensor<f32>, tensor<3xf32>) -> tensor<3xf32>
      %3 = nn.max %high, %x : (tensor<f32>, tensor<3xf32>) -> tensor<3xf32>
      %4 = nn.sub %n, %i : (tensor<3xi32>, tensor<i32>) -> tensor<3xi32>
      %5 = nn.compare <gt> %c, %x : (tensor<f32>, tensor<3xf32>) -> tensor<3xi1>
      %6 = nn.select %5, %cc, %x : (tensor<3xi1>, tensor<f32>, tensor<3xf32>) -> tensor<3xf32>
      func.return %0, %1, %2, %3, %4, %5, %cc, %6 : tensor<3xf32>, tensor<3xbf16>, tensor<3xf32>, tensor<3xf32>, tensor<3xi32>, tensor<3xi1>, tensor<f32>, tensor<3xf32>
    }"""  # fmt: skip
    module = parse(text, "n.ir", verify=True)
    program = program_text(module)
    lines = [line.partition("  #")[0].strip() for line in body_of(program, "f").splitlines()]
    assert "mul = x * 0.1" in lines
    assert "sub = 0.10009765625 - h" in lines
    assert "max_1 = x.clamp(min=2.5)" in lines  # `max` is Python's
    assert "sub_1 = n - (-3)" in lines
    assert "compare = 0.1 > x" in lines
    given = [np.array([1.0, -2.0, 0.05]), np.array([1.0, -2.0, 0.5]), np.array([1, 2, 3])]
    tensors = [tensor(x, e) for x, e in zip(given, ("f32", "bf16", "i32"), strict=True)]
    for got, want in zip(functions_of(program)["f"](rt.Mesh(()), *tensors),
                         run(module, "f", given), strict=True):  # fmt: skip
        np.testing.assert_allclose(got.float().numpy(), want.astype(np.float32), rtol=1e-6)


@pytest.mark.parametrize(("number", "element", "text"), [
    (0.1, "f32", "0.1"), (0.1, "f64", "0.1"), (0.1, "f16", "0.0999755859375"), (3, "i32", "3"),
    (0.1, "bf16", "0.10009765625"), (1.0, "bf16", "1.0"), (True, "i1", "True"),
    (1e300, "f32", 'float("inf")'), (-1e300, "f32", 'float("-inf")'), (1e5, "f16", 'float("inf")'),
    (float("nan"), "f64", 'float("nan")'), (1e-45, "f32", "1e-45"), (-0.0, "f32", "-0.0"),
])  # fmt: skip
def test_a_literal_is_what_a_tensor_holds(number, element, text):
    assert number_text(number, element) == text
    if element != "i1":
        held = torch.tensor(float(number), dtype=torch.float64).to(TYPES[element]).double().item()
        value = torch.tensor(eval(text), dtype=TYPES[element]).double().item()
        assert value == held or np.isnan(held)


def collective_of(rows, before, after):
    """An all-gather over tp of so many rows."""
    types = [dist.local(f32, (rows,), layout, MESH) for layout in (before, after)]
    block = Block(arg_types=types[:1])
    axes = {"axes": dist.AxesAttr((Axis("tp"),)), "dim": nn.int_attr(0)}
    op = dist.AllGatherOp.create(operands=block.args, result_types=types[1:], properties=axes)
    block.add_ops([op, ReturnOp(*op.results)])
    f = FuncOp("f", (types[:1], types[1:]), Region(block))
    return ModuleOp([mesh_op(MESH), f])


def test_programs_that_cannot_be_emitted_are_errors():
    a, b = Axis("dp"), Axis("tp")
    with pytest.raises(shardir.ShardirError, match="expected nested shards"):
        program_text(collective_of(10, Layout("m", ((a, b),)), Layout("m", ((a,),))))
    collective_of(12, Layout("m", ((a, b),)), Layout("m", ((a,),)))
    with pytest.raises(shardir.ShardirError, match="global view"):
        program_text(parse(STEP.replace("#dist.local", "#dist.layout")))
    with pytest.raises(shardir.ShardirError, match="expected a public function with a body"):
        program_text(parse("dist.mesh @m <a = 2>"))
