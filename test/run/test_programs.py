"""Emitted programs on real Gloo ranks, against numpy and against torch's own autograd."""
# ruff: noqa: E402, E501 (torch may not be installed; texts of programs)

import json
from pathlib import Path

import numpy as np
import pytest
from support import kernels
from support.extent import extent

torch = pytest.importorskip("torch")

import shardir
from shardir.backend.runs import Options
from shardir.backend.torch.launch.start import run
from shardir.dialects.random import fill

NORMAL = {"mean": 0.0, "std": 1.0}


def initial(key, shape, seed=0):
    """Return the initial value of an input or parameter."""
    return fill("normal", NORMAL, shape, None, f"{seed}/{key}", np.float32)


def ran(directory, tmp_path, program="program.py", **options):
    """Run a program; return its report and the dumped values."""
    dump = tmp_path / f"{program}.npz"
    report = run(directory, Options(timeout=60, dump=dump, **options), program=program)
    return report, dict(np.load(dump))


# ---- each collective keeps the global value ----


def local(shape, dims, extra="", of=None):
    of = f", of {of}" if of else ""
    return f"tensor<{'x'.join(map(str, shape))}xf32, #dist.local<@m, [{dims}]{extra}{of}>>"


def function(name, lines, ins, outs):
    """Return the text of a function of one argument %x that returns %y."""
    body = "\n".join(f"  {line}" for line in lines)
    return f"func.func @{name}(%x: {ins}) -> {outs} {{\n{body}\n  func.return %y : {outs}\n}}\n"


def moves():
    """Return the functions: name -> (text, global shape)."""
    found = {}

    def add(name, shape, *steps):
        """steps: (op, type) from x on; the first is the argument's type."""
        lines, before = [], "%x"
        for i, (op, kind) in enumerate(steps[1:]):
            after = "%y" if i == len(steps) - 2 else f"%v{i}"
            lines.append(f"{after} = {op.format(before)} : ({steps[i][1]}) -> {kind}")
            before = after
        found[name] = function(name, lines, steps[0][1], steps[-1][1]), shape

    rows, columns = local((4, 6), "{dp}, {}"), local((8, 3), "{}, {dp}")
    replicated = local((8, 6), "{}, {}")
    both = local((2, 6), "{dp, tp}, {}")
    swapped = local((2, 6), "{tp, dp}, {}")
    partial = local((8, 6), "{}, {}", ", partial sum {dp, tp}")
    x = ("", replicated)
    add("all_gather", (8, 6), ("", rows), ("dist.all_gather {} dim 0 over <dp>", replicated))
    add(
        "all_gather_columns",
        (8, 6),
        ("", columns),
        ("dist.all_gather {} dim 1 over <dp>", replicated),
    )
    add(
        "all_gather_both",
        (8, 6),
        ("", swapped),
        ("dist.all_gather {} dim 0 over <tp, dp>", replicated),
    )
    add("slice", (8, 6), x, ("dist.all_slice {} dim 0 over <dp, tp>", both))
    add(
        "all_to_all", (8, 6), ("", rows), ("dist.all_to_all {} split 1 concat 0 over <dp>", columns)
    )
    add("all_reduce", (8, 6), x, ("dist.replicated_to_partial <sum> {} over <dp, tp>", partial),
        ("dist.all_reduce <sum> {} over <dp, tp>", replicated))  # fmt: skip
    add("in_two", (8, 6), x, ("dist.replicated_to_partial <sum> {} over <dp, tp>", partial),
        ("dist.all_reduce <sum> {} over <tp>", local((8, 6), "{}, {}", ", partial sum {dp}")),
        ("dist.reduce_scatter <sum> {} dim 0 over <dp>", rows))  # fmt: skip
    add("reduce_scatter", (8, 6), x, ("dist.replicated_to_partial <sum> {} over <dp, tp>", partial),
        ("dist.reduce_scatter <sum> {} dim 0 over <tp, dp>", swapped))  # fmt: skip
    for kind in ("max", "min", "mean"):
        held = local((8, 6), "{}, {}", f", partial {kind} {{tp}}")
        add(f"all_reduce_{kind}", (8, 6), x, (f"dist.replicated_to_partial <{kind}> {{}} over <tp>", held),
            (f"dist.all_reduce <{kind}> {{}} over <tp>", replicated))  # fmt: skip
    add("broadcast", (8, 6), x, ("dist.replicated_to_partial <sum> {} over <tp>",
        local((8, 6), "{}, {}", ", partial sum {tp}")), ("dist.broadcast {} from 0 over <tp>", replicated))  # fmt: skip
    held = local((8, 6), "{}, {}", ", partial sum {dp}")
    add("gather", (8, 6), ("", rows), ("dist.gather {} dim 0 to 1 over <dp>", held),
        ("dist.all_reduce <sum> {} over <dp>", replicated))  # fmt: skip
    add("pad", (8, 6), ("", columns), ("dist.sharded_to_partial {} dim 1 over <dp>", held))
    add("scatter", (8, 6), x, ("dist.scatter {} dim 0 from 1 over <dp>", rows))
    add("partial_result", (8, 6), x, ("dist.replicated_to_partial <sum> {} over <dp>", held))
    # uneven and empty shards
    for n in (10, 5, 3):
        c = -(-n // 4)
        uneven = local((c, 6), "{dp, tp}, {}", of=[n, 6])
        full = local((n, 6), "{}, {}")
        held = local((n, 6), "{}, {}", ", partial sum {dp, tp}")
        across = local((n, 2), "{}, {dp, tp}", of=[n, 6])
        add(
            f"all_gather_{n}",
            (n, 6),
            ("", uneven),
            ("dist.all_gather {} dim 0 over <dp, tp>", full),
        )
        add(
            f"pad_{n}",
            (n, 6),
            ("", uneven),
            ("dist.sharded_to_partial {} dim 0 over <dp, tp>", held),
        )
        add(f"slice_{n}", (n, 6), ("", full), ("dist.all_slice {} dim 0 over <dp, tp>", uneven))
        add(f"all_to_all_{n}", (n, 6), ("", uneven),
            ("dist.all_to_all {} split 1 concat 0 over <dp, tp>", across))  # fmt: skip
        add(f"reduce_scatter_{n}", (n, 6), ("", full), ("dist.replicated_to_partial <sum> {} over <dp, tp>", held),
            ("dist.reduce_scatter <sum> {} dim 0 over <dp, tp>", uneven))  # fmt: skip
    return found


SHIFT = """
func.func @shift(%x: A) -> A {
  %y = dist.permute %x pairs <0, 1, 1, 2, 2, 3> over <dp, tp> : (A) -> A
  func.return %y : A
}
func.func @sent(%x: A) -> B {
  %y = nn.neg %x : (A) -> A
  dist.send %y from 0 to 1 over <tp> : A
  %z = dist.recv from 0 to 1 over <tp> : B
  func.return %z : B
}
func.func @fused(%x: A, %w: A) -> (C, C) {
  %a, %b = dist.all_gather %x, %w dim 0 over <dp, tp> : (A, A) -> (C, C)
  func.return %a, %b : C, C
}
func.func @custom(%x: A) -> A {
  %y = nn.custom "test.ranks"(%x) with {by = -2 : i64} : (A) -> A
  func.return %y : A
}
func.func private @hidden(%x: A) -> A {
  func.return %x : A
}
"""


def test_every_collective_on_real_ranks(tmp_path, monkeypatch):
    """And a custom op, whose module the ranks import as any other."""
    monkeypatch.setenv("PYTHONPATH", str(Path(kernels.__file__).parents[1]))
    shardir.register_custom_op("test.ranks", torch="support.kernels:mirror",
                               rule="(i, j) -> (i, j) replicate j")  # fmt: skip
    cases = moves()
    letters = {"A": local((2, 6), "{dp, tp}, {}"), "C": local((8, 6), "{}, {}"),
               "B": local((2, 6), "{dp}, {}", ", partial sum {tp}")}  # fmt: skip
    shift = SHIFT
    for letter, kind in letters.items():
        for end in (")", ",", " ", "\n"):
            shift = shift.replace(f" {letter}{end}", f" {kind}{end}")
            shift = shift.replace(f"({letter}{end}", f"({kind}{end}")
    text = "dist.mesh @m <dp = 2, tp = 2>\n" + "".join(t for t, _ in cases.values()) + shift
    compiled = shardir.compile(text, "", "moves.ir")
    directory = compiled.save(tmp_path / "out", per_rank=True)
    assert json.loads((directory / "plan.json").read_text())["single"] is None
    assert "hidden" not in (directory / "program.py").read_text()
    _, dumped = ran(directory, tmp_path)
    for name, (_, shape) in cases.items():
        np.testing.assert_array_equal(
            dumped[f"results/{name}/0"], initial("x", shape), err_msg=name
        )
    x = initial("x", (8, 6))
    np.testing.assert_array_equal(dumped["results/shift/0"], np.vstack([np.zeros((2, 6)), x[:6]]))
    np.testing.assert_array_equal(dumped["results/sent/0"], -np.vstack([x[:2], x[4:6]]))
    np.testing.assert_array_equal(dumped["results/custom/0"], -2 * x[:, ::-1])
    np.testing.assert_array_equal(dumped["results/fused/0"], x)
    np.testing.assert_array_equal(dumped["results/fused/1"], initial("w", (8, 6)))


# ---- a transformer block, through all passes ----

BLOCK = """
dist.mesh @m <dp = 2, tp = 2>
func.func private @loss(
    %ids: tensor<BxSxi32, #dist.layout<@m, [{dp}, {}]>> {train.input = #train.init<integers, low = 0, high = V>},
    %next: tensor<BxSxi32, #dist.layout<@m, [{dp}, {}]>> {train.input = #train.init<integers, low = 0, high = V>},
    %table: tensor<Vx8xf32, #dist.layout<@m, [{tp}, {}]>> {train.parameter = "table", train.init = #train.init<normal>},
    %gain: tensor<8xf32> {train.parameter = "gain", train.init = #train.init<uniform, low = 0.5, high = 1.5>},
    %shift: tensor<8xf32> {train.parameter = "shift", train.init = #train.init<constant, value = 0.1>},
    %qkv: tensor<3x2x8x4xf32, #dist.layout<@m, [{}, {tp}, {}, {}]>> {train.parameter = "qkv", train.init = #train.init<normal, std = 0.5>},
    %o: tensor<2x4x8xf32, #dist.layout<@m, [{tp}, {}, {}]>> {train.parameter = "o", train.init = #train.init<normal, std = 0.5>},
    %up: tensor<8x16xf32, #dist.layout<@m, [{}, {tp}]>> {train.parameter = "up", train.init = #train.init<normal, std = 0.5>},
    %down: tensor<16x8xf32, #dist.layout<@m, [{tp}, {}]>> {train.parameter = "down", train.init = #train.init<normal, std = 0.5>}
) -> tensor<f32> {
  %e = nn.gather %table, %ids axis 0 : (tensor<Vx8xf32, #dist.layout<@m, [{tp}, {}]>>, tensor<BxSxi32, #dist.layout<@m, [{dp}, {}]>>) -> tensor<BxSx8xf32>
  %n = nn.layer_norm %e, %gain, %shift eps 1.0e-05 : (tensor<BxSx8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<BxSx8xf32>
  %p = nn.einsum "bsd,chde->cbhse" %n, %qkv : (tensor<BxSx8xf32>, tensor<3x2x8x4xf32, #dist.layout<@m, [{}, {tp}, {}, {}]>>) -> tensor<3xBx2xSx4xf32>
  %i0 = nn.constant dense<[0]> : tensor<1xi32> -> tensor<1xi32>
  %i1 = nn.constant dense<[1]> : tensor<1xi32> -> tensor<1xi32>
  %i2 = nn.constant dense<[2]> : tensor<1xi32> -> tensor<1xi32>
  %q1 = nn.gather %p, %i0 axis 0 : (tensor<3xBx2xSx4xf32>, tensor<1xi32>) -> tensor<1xBx2xSx4xf32>
  %k1 = nn.gather %p, %i1 axis 0 : (tensor<3xBx2xSx4xf32>, tensor<1xi32>) -> tensor<1xBx2xSx4xf32>
  %v1 = nn.gather %p, %i2 axis 0 : (tensor<3xBx2xSx4xf32>, tensor<1xi32>) -> tensor<1xBx2xSx4xf32>
  %q = nn.reshape %q1 : (tensor<1xBx2xSx4xf32>) -> tensor<Bx2xSx4xf32>
  %k = nn.reshape %k1 : (tensor<1xBx2xSx4xf32>) -> tensor<Bx2xSx4xf32>
  %v = nn.reshape %v1 : (tensor<1xBx2xSx4xf32>) -> tensor<Bx2xSx4xf32>
  %s = nn.einsum "bhqe,bhke->bhqk" %q, %k : (tensor<Bx2xSx4xf32>, tensor<Bx2xSx4xf32>) -> tensor<Bx2xSxSxf32>
  %half = nn.constant dense<5.0e-01> : tensor<f32> -> tensor<f32>
  %s2 = nn.mul %s, %half : (tensor<Bx2xSxSxf32>, tensor<f32>) -> tensor<Bx2xSxSxf32>
  %a = nn.softmax %s2 axis 3 : (tensor<Bx2xSxSxf32>) -> tensor<Bx2xSxSxf32>
  %c = nn.einsum "bhqk,bhke->bhqe" %a, %v : (tensor<Bx2xSxSxf32>, tensor<Bx2xSx4xf32>) -> tensor<Bx2xSx4xf32>
  %y = nn.einsum "bhse,hed->bsd" %c, %o : (tensor<Bx2xSx4xf32>, tensor<2x4x8xf32, #dist.layout<@m, [{tp}, {}, {}]>>) -> tensor<BxSx8xf32>
  %r = nn.add %e, %y : (tensor<BxSx8xf32>, tensor<BxSx8xf32>) -> tensor<BxSx8xf32>
  %u = nn.matmul %r, %up : (tensor<BxSx8xf32>, tensor<8x16xf32, #dist.layout<@m, [{}, {tp}]>>) -> tensor<BxSx16xf32>
  %g = nn.gelu %u : (tensor<BxSx16xf32>) -> tensor<BxSx16xf32>
  %d = nn.matmul %g, %down : (tensor<BxSx16xf32>, tensor<16x8xf32, #dist.layout<@m, [{tp}, {}]>>) -> tensor<BxSx8xf32>
  %f = nn.add %r, %d : (tensor<BxSx8xf32>, tensor<BxSx8xf32>) -> tensor<BxSx8xf32>
  %logits = nn.einsum "bsd,vd->bsv" %f, %table : (tensor<BxSx8xf32>, tensor<Vx8xf32, #dist.layout<@m, [{tp}, {}]>>) -> tensor<BxSxVxf32>
  %losses = nn.cross_entropy %logits, %next : (tensor<BxSxVxf32>, tensor<BxSxi32, #dist.layout<@m, [{dp}, {}]>>) -> tensor<BxSxf32>
  %loss = nn.reduce <mean> %losses dims <0, 1> : (tensor<BxSxf32>) -> tensor<f32>
  func.return %loss : tensor<f32>
}
train.step @step of @loss <momentum, lr = 0.05, momentum = 0.9, weight_decay = 0.01>
"""


def by_torch(batch, length, vocabulary, steps):
    """Return losses and parameters of the same training by torch's autograd, in f64."""
    shapes = {"table": (vocabulary, 8), "qkv": (3, 2, 8, 4), "o": (2, 4, 8), "up": (8, 16),
              "down": (16, 8)}  # fmt: skip
    w = {}
    for key, shape in shapes.items():
        options = NORMAL if key == "table" else {"mean": 0.0, "std": 0.5}
        w[key] = fill("normal", options, shape, None, f"0/{key}", np.float32)
    w["gain"] = fill("uniform", {"low": 0.5, "high": 1.5}, (8,), None, "0/gain", np.float32)
    w["shift"] = np.full(8, np.float32(0.1))
    w = {k: torch.tensor(v, dtype=torch.float64, requires_grad=True) for k, v in w.items()}
    indices = {"low": 0, "high": vocabulary}
    ids, target = (
        torch.tensor(fill("integers", indices, (batch, length), None, f"0/{k}", np.int64))
        for k in ("ids", "next")
    )
    functional, losses = torch.nn.functional, []
    optimizer = torch.optim.SGD(list(w.values()), lr=0.05, momentum=0.9, weight_decay=0.01)
    for _ in range(steps):
        e = functional.embedding(ids, w["table"])
        n = functional.layer_norm(e, (8,), w["gain"], w["shift"], 1e-5)
        q, k, v = (torch.einsum("bsd,hde->bhse", n, m) for m in w["qkv"])
        c = functional.scaled_dot_product_attention(q, k, v, scale=0.5)
        r = e + torch.einsum("bhse,hed->bsd", c, w["o"])
        f = r + functional.gelu(r @ w["up"], approximate="tanh") @ w["down"]
        loss = functional.cross_entropy((f @ w["table"].T).flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {k: v.detach().numpy() for k, v in w.items()}


@pytest.mark.parametrize(
    ("batch", "length", "vocabulary"), extent([(3, 5, 11)], [(4, 6, 12), (3, 5, 11)])
)
def test_a_transformer_trains_as_in_torch(tmp_path, batch, length, vocabulary):
    text = BLOCK
    for letter, n in (("B", batch), ("S", length), ("V", vocabulary)):
        for before, after in (("<", "x"), ("x", "x"), ("x", "x"), ("= ", ">")):
            text = text.replace(f"{before}{letter}{after}", f"{before}{n}{after}")
    directory = shardir.compile(text, name="block.ir").save(tmp_path / "out")
    want, states = by_torch(batch, length, vocabulary, steps=4)
    for program in ("program.py", "single.py"):
        report, dumped = ran(directory, tmp_path, program, steps=4)
        np.testing.assert_allclose(report.losses["step"], want, rtol=2e-5)
        for key, value in states.items():
            np.testing.assert_allclose(
                dumped[f"states/{key}"], value, rtol=1e-3, atol=2e-5, err_msg=f"{program} {key}"
            )


def test_names_are_data_on_real_ranks(tmp_path):
    """A function and a parameter whose names are Python code: they run, and the code does not."""
    canary = tmp_path / "canary"
    name = f"'); open({str(canary)!r}, 'w'); import os; os.abort()  #"
    escaped = "".join(c if c.isalnum() else f"\\{ord(c):02X}" for c in name + '"\n\\')
    kind = "tensor<4x3xf32, #dist.local<@m, [{dp$.x}, {}]>>"
    weights = "tensor<3x3xf32, #dist.local<@m, [{}, {}]>>"
    part = "tensor<f32, #dist.local<@m, [], partial sum {dp$.x}>>"
    scalar = "tensor<f32, #dist.local<@m, []>>"
    text = f"""dist.mesh @m <dp$.x = 2>
    func.func @"{escaped}"(%x: {kind}, %w: {weights} {{train.parameter = "{escaped}", train.init = #train.init<normal>}}) -> ({scalar}, {weights} {{train.updates = "{escaped}"}}) attributes {{train.step}} {{
      %import = nn.matmul %x, %w : ({kind}, {weights}) -> {kind}
      %s = nn.reduce <sum> %import dims <0, 1> : ({kind}) -> {part}
      %loss = dist.all_reduce <sum> %s over <dp$.x> : ({part}) -> {scalar}
      %lr = nn.constant dense<0.5> : tensor<f64> -> tensor<f64, #dist.local<@m, []>>
      %w_1 = train.sgd %w, %w, %lr weight_decay 0.0 : ({weights}, {weights}, tensor<f64, #dist.local<@m, []>>) -> {weights}
      func.return %loss, %w_1 : {scalar}, {weights}
    }}"""
    key = name + '"\n\\'
    directory = shardir.compile(text, "", "e.ir").save(tmp_path / "out")
    report, _ = ran(directory, tmp_path, steps=2)
    x, w = initial("x", (8, 3)), initial(key, (3, 3))
    want = [(x @ w).sum(), (x @ w).sum() / 2]
    # The values are those of the name, which differs from run to run, so that the sum may cancel.
    np.testing.assert_allclose(report.losses[key], want, rtol=0, atol=1e-6 * np.abs(x @ w).sum())
    assert not canary.exists()
