"""The ops and attributes of Shardy in a module: what each becomes, and that values stay."""

import re
from collections.abc import Callable
from itertools import permutations, product

import numpy as np
import pytest

import shardir
from shardir import ShardirError
from shardir.algebra.mesh import Mesh
from shardir.dialects import dist
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.custom import forget_custom_op
from shardir.frontends.stablehlo.complexes import as_parts
from shardir.frontends.stablehlo.meshes import ProgramMeshes
from shardir.frontends.stablehlo.reductions import kind_from_sdy
from shardir.frontends.stablehlo.shardy import rule_from_sdy
from shardir.interpret.evaluator import run

X = np.arange(64, dtype=np.float32).reshape(8, 8)


def program(body: str, mesh: str = '<["x"=2, "y"=2]>') -> str:
    return f"""
sdy.mesh @m = {mesh}
func.func @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {{
  {body}
  return %y : tensor<8x8xf32>
}}
"""


ADD = "%a = stablehlo.add %x, %x : tensor<8x8xf32>\n"
OPS = [
    (
        'stablehlo.add %x, %x {sdy.sharding = #sdy.sharding_per_value<[<@m, [{"x"}, {"y"}]>]>}',
        "-> tensor<8x8xf32, #dist.layout<@m, [{x}, {y}]>>", 2,
    ),
    ('sdy.reshard %a <@m, [{"y"}, {}]>', "-> tensor<8x8xf32, #dist.layout<@m, [{y}, {}]>>", 2),
    ('sdy.all_slice [{"x"}, {}] %a out_sharding=<@m, [{"x"}, {}]>', "<@m, [{x}, {}]>", 2),
    ("sdy.propagation_barrier %a allowed_direction=FORWARD", "_barrier <forward> %add", 2),
    ("sdy.propagation_barrier %a allowed_direction=BACKWARD", "_barrier <backward> %add", 2),
    ('sdy.data_flow_edge %a sharding=<@m, [{}, {"x", ?}]>', "#dist.sharding<@m, [{}, {x, ?}]>", 2),
    (
        'sdy.named_computation<"f">(%a) in_shardings=[<@m, [{"x"}, {?}]>] '
        'out_shardings=[<@m, [{}, {"y"}]>] (%b: tensor<8x8xf32>) {\n'
        "%c = stablehlo.add %b, %b : tensor<8x8xf32>\n sdy.return %c : tensor<8x8xf32>\n}",
        "#dist.layout<@m, [{}, {y}]>", 4,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "text", "factor"), OPS, ids=[o.split()[0] for o, _, _ in OPS])
def test_keeps_values_and_layouts(op: str, text: str, factor: int) -> None:
    types = ": (tensor<8x8xf32>) -> tensor<8x8xf32>" if "(%a)" in op else ": tensor<8x8xf32>"
    compiled = shardir.from_stablehlo(program(f"{ADD}%y = {op} {types}"))
    assert text in str(compiled.input_module)
    for module in (compiled.original, compiled.module):
        np.testing.assert_array_equal(run(module, "main", [X])[0], factor * X)


def test_a_sharding_group_has_one_layout() -> None:
    body = """%0 = sdy.sharding_constraint %x <@m, [{"y"}, {}]> : tensor<8x8xf32>
      %y = stablehlo.transpose %0, dims = [1, 0] : (tensor<8x8xf32>) -> tensor<8x8xf32>
      sdy.sharding_group %0 group_id=7 : tensor<8x8xf32>
      sdy.sharding_group %y group_id=7 : tensor<8x8xf32>"""
    compiled = shardir.from_stablehlo(program(body))
    assert str(compiled.input_module).count("group 7") == 2
    assert compiled.text.count("#local0") > 2  # rows over y before and after the transpose
    np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], X.T)


def test_device_ids_number_the_devices_of_collectives() -> None:
    """Of devices 3, 2, 1, 0 in this order, rank 0 is device 3: it sends to device 2, which is rank
    1; and each has its own number."""
    body = """%y = sdy.manual_computation(%x) in_shardings=[<@m, [{"x", "y"}, {}]>]
      out_shardings=[<@m, [{"x", "y"}, {}]>] manual_axes={"x", "y"} (%a: tensor<2x8xf32>) {
      %i = stablehlo.partition_id : tensor<ui32>
      %f = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
      %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> tensor<2x8xf32>
      %p = "stablehlo.collective_permute"(%a) <{
        channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>,
        source_target_pairs = dense<[[3, 2]]> : tensor<1x2xi64>
      }> : (tensor<2x8xf32>) -> tensor<2x8xf32>
      %s = stablehlo.add %p, %b : tensor<2x8xf32>
      sdy.return %s : tensor<2x8xf32>
    } : (tensor<8x8xf32>) -> tensor<8x8xf32>"""
    compiled = shardir.from_stablehlo(program(body, '<["x"=2, "y"=2], device_ids=[3, 2, 1, 0]>'))
    expected = np.repeat([3.0, 2.0, 1.0, 0.0], 2)[:, None] + np.zeros((8, 8))
    expected[2:4] += X[:2]
    np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], expected)


OTHER_MESHES = [
    ('<["z"=8]>', '[{"z"}, {}]', "z"),
    ('<["a"=2, "b"=4]>', '[{"b"}, {"a"}]', "a, b"),
    ('<["a"=4, "b"=2]>', '[{}, {"a", "b"}]', "a, b"),
    ('<["b"=4, "a"=2], device_ids=[0, 4, 1, 5, 2, 6, 3, 7]>', '[{"a"}, {"b"}]', "a, b"),
    ('<["b"=4, "a"=2], device_ids=[0, 4, 1, 5, 2, 6, 3, 7]>', '[{}, {"b"}]', "b"),
]
"""Meshes of the devices of <x = 2, y = 4>, shardings on them, and their manual axes."""


@pytest.mark.parametrize(("mesh", "dims", "manual"), OTHER_MESHES)
def test_a_manual_computation_on_another_mesh(mesh: str, dims: str, manual: str) -> None:
    """Each shard of another mesh gets the number of its device; along free axes all get 0."""
    names, sizes = re.findall(r'"(\w)"', mesh), [int(n) for n in re.findall(r"=(\d)", mesh)]
    ids = re.search(r"device_ids=\[(.*)\]", mesh)
    devices = np.array(ids[1].split(", ") if ids else range(8), np.float32).reshape(sizes)
    split = [re.findall(r'"(\w)"', d) for d in dims.split("}, {")]
    shards = [int(np.prod([sizes[names.index(a)] for a in d])) for d in split]
    shape = tuple(8 // n for n in shards)
    for a in {*names} - {*manual.split(", ")}:
        devices = 0 * devices.take([0], axis=names.index(a))
    order = [names.index(a) for d in split for a in d]
    order += [d for d in range(len(names)) if d not in order]
    numbers = devices.transpose(order).reshape(shards)
    number = "stablehlo.convert %p : (tensor<ui32>) -> tensor<f32>"
    if manual == "b":
        number = "stablehlo.constant dense<0.0> : tensor<f32>"
    t = f"tensor<{shape[0]}x{shape[1]}xf32>"
    axes = ", ".join(f'"{a}"' for a in manual.split(", "))
    text = program(f"""
      %y = sdy.manual_computation(%x) in_shardings=[<@o, {dims}>] out_shardings=[<@o, {dims}>]
          manual_axes={{{axes}}} (%a: {t}) {{
        %p = stablehlo.partition_id : tensor<ui32>
        %f = {number}
        %b = stablehlo.broadcast_in_dim %f, dims = [] : (tensor<f32>) -> {t}
        %s = stablehlo.add %a, %b : {t}
        sdy.return %s : {t}
      }} : (tensor<8x8xf32>) -> tensor<8x8xf32>""", '<["x"=2, "y"=4]>')  # fmt: skip
    module = shardir.from_stablehlo(f"{text}sdy.mesh @o = {mesh}").module
    expected = X + np.kron(numbers, np.ones(shape))
    np.testing.assert_array_equal(run(module, "main", [X])[0], expected)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ('<["a"=4, "b"=2]>', "parts of axes of mesh @m <x = 2, y = 4> in .@m, ..x, y:.1.2., "),
        ('<["a"=2, "b"=4], device_ids=[1, 0, 2, 3, 4, 5, 6, 7]>', "got one over {a, b} of @o"),
        ('<["a"=2, "b"=2]>', "got one of @o <a = 2, b = 2>, which has other devices"),
        ('<["a"=4, "b"=4]>', "got one of @o <a = 4, b = 4>, which has other devices"),
    ],
)
def test_a_manual_computation_on_a_mesh_of_other_axes(mesh: str, message: str) -> None:
    rows, columns = (8 // int(n) for n in re.findall(r"=(\d)", mesh))
    t, u, of = f"tensor<{rows}x{columns}xf32>", "tensor<8x8xf32>", '<@o, [{"a"}, {"b"}]>'
    text = f"""
      sdy.mesh @m = <["x"=2, "y"=4]>
      sdy.mesh @o = {mesh}
      func.func @main(%x: {u} {{sdy.sharding = #sdy.sharding<@m, [{{"x"}}, {{}}]>}}) -> {u} {{
        %y = sdy.manual_computation(%x) in_shardings=[{of}] out_shardings=[{of}]
          manual_axes={{"a", "b"}} (%a: {t}) {{ sdy.return %a : {t} }} : ({u}) -> {u}
        return %y : {u}
      }}"""
    with pytest.raises(ShardirError, match=message):
        shardir.from_stablehlo(text)


CALL = """%y = stablehlo.custom_call @test.scaled(%x) {
  api_version = 4 : i32, backend_config = {by = 3 : i64},
  sdy.sharding_rule =
    #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=8} need_replication={j}, custom>
} : (tensor<8x8xf32>) -> tensor<8x8xf32>"""


def test_a_registered_call_has_its_rule() -> None:
    with pytest.raises(ShardirError, match=r"@test.scaled .*: a call of XLA"):
        shardir.from_stablehlo(program(CALL))
    shardir.register_custom_op("test.scaled", evaluate=lambda x, by: x * by, torch="m:f")
    try:
        compiled = shardir.from_stablehlo(program(CALL))
        assert 'rule "(i, j) -> (i, j) replicate j"' in compiled.text
        assert ", by=3)" in compiled.program
        np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], 3 * X)
    finally:
        forget_custom_op("test.scaled")


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("([i, k], [k, j])->([i, j]) {i=8, j=4, k=2} reduction={k}", "(i, k), (k, j) -> (i, j)"),
        ("([i, k])->([i]) {i=8, k=2}", "(i, k) -> (i) replicate k"),
        ("([i])->([i, j]) {i=8, j=2}, custom", "(i) -> (i, j) replicate j"),
        ("([i, j], [])->([j, i]) {i=8, j=2} permutation={i}", "(i, j), () -> (j, i) replicate i"),
        (
            "([z_8z_9, zz_1])->([z_8, zz_1]) {z=2, z_1=3, z_8=4, z_9=5}",
            "(z_8 z_9, z z_1) -> (z_8, z z_1) replicate z_9 sizes z = 2, z_1 = 3, z_9 = 5",
        ),
    ],
)
def test_rules(rule: str, expected: str) -> None:
    assert rule_from_sdy(f"#sdy.op_sharding_rule<{rule}>") == expected


@pytest.mark.parametrize("dims", ["[{}, {}, {}]", '[{"x"}, {}, {}]', '[{}, {"x"}, {"y"}]'])
def test_a_rule_of_merged_dimensions(dims: str) -> None:
    """The rows of the operand are the first two dimensions of the result, whatever is split."""
    t, u = "tensor<8x8xf32>", "tensor<2x4x8xf32>"
    rule = "#sdy.op_sharding_rule<([ij, k])->([i, j, k]) {i=2, j=4, k=8}>"
    shardir.register_custom_op("test.rows", evaluate=lambda x: x.reshape(-1, 4, x.shape[1]))
    try:
        compiled = shardir.from_stablehlo(f"""
          sdy.mesh @m = <["x"=2, "y"=2]>
          func.func @main(%x: {t}) -> ({u} {{sdy.sharding = #sdy.sharding<@m, {dims}>}}) {{
            %y = stablehlo.custom_call @test.rows(%x) {{
              api_version = 4 : i32, sdy.sharding_rule = {rule}}} : ({t}) -> {u}
            return %y : {u}
          }}""")
        assert 'rule "(i j, k) -> (i, j, k)"' in compiled.text
        np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], X.reshape(2, 4, 8))
    finally:
        forget_custom_op("test.rows")


EXP, TRANSPOSE = "stablehlo.exponential %x", "stablehlo.transpose %x, dims = [1, 0]"
DOT = "stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]"
OWN_RULES = [
    (EXP, "([i, j])->([i, j])", "", ["[{x}, {y}]"]),
    (EXP, "([i, j])->([i, j])", "need_replication={j}", ["[{x}, {}]"]),
    (EXP, "([i, j])->([i, k])", "", ["[{x}, {}]"]),
    (DOT, "([i, k], [k, j])->([i, j])", "need_replication={k}", ["[{x}, {}]", "[{}, {y}]"]),
    (DOT, "([i, k], [k, j])->([i, j])", "reduction={k} blocked_propagation={i, j}",
     ["[{}, {}]", "[{}, {}]"]),
    (TRANSPOSE, "([i, j])->([j, i])", "permutation={i}",
     ["[{}, {y}]"]),
]  # fmt: skip
"""Ops of rows over x and columns over y, their rules, and the layouts of their operands."""


@pytest.mark.parametrize(("op", "rule", "sets", "layouts"), OWN_RULES)
def test_a_rule_leaves_factors_of_an_op_unsharded(
    op: str, rule: str, sets: str, layouts: list[str]
) -> None:
    """Layouts of the operands are those that the rule allows; the result has all of its own."""
    t = "tensor<8x8xf32>"
    types = f"({t}, {t}) -> {t}" if op is DOT else f"({t}) -> {t}"
    sizes = ", ".join(f"{f}=8" for f in "ijk" if f in rule)
    sharding = '{sdy.sharding = #sdy.sharding<@m, [{"x"}, {"y"}]>}'
    text = f"""
      sdy.mesh @m = <["x"=2, "y"=2]>
      func.func @main(%x: {t} {sharding}) -> ({t} {sharding}) {{
        %y = {op} {{sdy.sharding_rule = #sdy.op_sharding_rule<{rule} {{{sizes}}} {sets}>}} : {types}
        return %y : {t}
      }}"""
    module = shardir.from_stablehlo(text).module
    expected = {EXP: np.exp, DOT: lambda x: x @ x, TRANSPOSE: np.transpose}[op](X)
    np.testing.assert_allclose(run(module, "main", [X])[0], expected, rtol=1e-6)
    ops = (op for op in module.walk() if isinstance(op, TensorOp))
    assert [f"[{str(dist.layout_of(v)).partition('[')[2]}" for v in next(ops).operands] == layouts
    searched = shardir.from_stablehlo(text, mode="auto").module
    np.testing.assert_allclose(run(searched, "main", [X])[0], expected, rtol=1e-6)


REDUCTIONS = [
    # ops whose result is %y, what devices hold along the axes, and the value
    ('%y = sdy.all_reduce {"x", "y"} %x out_sharding=<@m, [{}, {}]> : T', lambda x: 4 * x),
    (
        '%a = sdy.sharding_constraint %x <@m, [{"y"}, {}]> : T\n'
        '%y = sdy.all_reduce {"x"} %a out_sharding=<@m, [{"y"}, {}]> : T', lambda x: 2 * x,
    ),
    (
        '%y = sdy.reduce_scatter [{"x"}, {"y"}] %x out_sharding=<@m, [{"x"}, {"y"}]> : T',
        lambda x: 4 * x,
    ),
    (  # the parts of a sum, also of what is computed of them
        '%l = sdy.sharding_constraint %x <@m, [{}, {"x"}]> : T\n'
        "%d = stablehlo.dot_general %l, %l, contracting_dims = [1] x [1] : (T, T) -> T\n"
        "%n = stablehlo.negate %d : T\n"
        '%y = sdy.all_reduce {"x"} %n out_sharding=<@m, [{}, {}]> : T', lambda x: -(x @ x.T),
    ),
    (  # whole sums, of which each device along y has the same
        '%l = sdy.sharding_constraint %x <@m, [{}, {"x"}]> : T\n'
        "%d = stablehlo.dot_general %l, %l, contracting_dims = [1] x [1] : (T, T) -> T\n"
        '%s = sdy.reduce_scatter [{"x"}, {}] %d out_sharding=<@m, [{"x"}, {}]> : T\n'
        '%g = sdy.all_gather [{"x"}, {}] %s out_sharding=<@m, [{}, {}]> : T\n'
        '%y = sdy.all_reduce {"x"} %g out_sharding=<@m, [{}, {}]> : T', lambda x: 2 * (x @ x.T),
    ),
    (  # the parts of a sum over what a manual computation has split
        '%l = sdy.manual_computation(%x) in_shardings=[<@m, [{}, {"x"}]>] '
        'out_shardings=[<@m, [{}, {"x"}]>] manual_axes={"x", "y"} (%a: tensor<8x4xf32>) {\n'
        "sdy.return %a : tensor<8x4xf32>\n} : (T) -> T\n"
        "%d = stablehlo.dot_general %l, %l, contracting_dims = [1] x [1] : (T, T) -> T\n"
        '%y = sdy.all_reduce {"x"} %d out_sharding=<@m, [{}, {}]> : T', lambda x: x @ x.T,
    ),
    (  # a gather along y leaves the sum along x to be done
        '%l = sdy.sharding_constraint %x <@m, [{"y"}, {"x"}]> : T\n'
        "%d = stablehlo.dot_general %l, %x, contracting_dims = [1] x [1] {sdy.sharding = "
        '#sdy.sharding_per_value<[<@m, [{"y"}, {}]>]>} : (T, T) -> T\n'
        '%g = sdy.all_gather [{"y"}, {}] %d out_sharding=<@m, [{}, {}]> : T\n'
        '%y = sdy.all_reduce {"x"} %g out_sharding=<@m, [{}, {}]> : T', lambda x: x @ x.T,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "expected"), REDUCTIONS)
def test_reductions_add_what_devices_have(
    body: str, expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    compiled = shardir.from_stablehlo(program(body.replace("T", "tensor<8x8xf32>")))
    for module in (compiled.original, compiled.module):
        np.testing.assert_array_equal(run(module, "main", [X])[0], expected(X))


SIZES = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3, 4), (4, 6), (24,), (6, 4), (3, 8)]
"""The sizes of the axes of meshes."""


def devices_of(sizes: tuple[int, ...], rng: np.random.Generator) -> list[int]:
    """Return the devices of a mesh, numbered in another order of its axes."""
    order = rng.permutation(len(sizes))
    grid = np.arange(np.prod(sizes)).reshape([sizes[d] for d in order])
    return grid.transpose(np.argsort(order)).ravel().tolist()


def test_shardings_of_several_meshes_are_those_of_one() -> None:
    """Of all pairs of meshes with their devices in the order of some axes: each device has the
    shard that its own mesh gives it. Meshes whose axes cross are refused."""
    refused = translated = 0
    rng = np.random.default_rng(5)
    for ours, theirs in product(SIZES, SIZES):
        if np.prod(ours) != np.prod(theirs):
            continue
        ids, devices = devices_of(ours, rng), devices_of(theirs, rng)
        own, other = (
            ", ".join(f'"{letter}{d}"={n}' for d, n in enumerate(sizes))
            for letter, sizes in (("a", ours), ("b", theirs))
        )
        mesh = Mesh("m", tuple((f"a{d}", n) for d, n in enumerate(ours)))
        texts = {"m": f"<[{own}], device_ids={ids}>", "other": f"<[{other}], device_ids={devices}>"}
        meshes = ProgramMeshes(texts, mesh)
        if meshes.is_reordered("other"):
            refused += 1
            continue
        places = np.array(np.unravel_index(np.argsort(devices), theirs)).T  # of each device
        for axes in permutations(range(len(theirs))):
            dims = ", ".join(f'{{"b{d}"}}' for d in axes)
            try:
                sharding = meshes.sharding(f"#sdy.sharding<@other, [{dims}, {{}}]>")
            except ShardirError as error:
                assert "is no axis of it" in str(error)
                refused += 1
                continue
            assert sharding is not None
            for rank, device in enumerate(ids):
                found = [mesh.index(rank, a) for a in sharding.layout.dims]
                assert found == [*(places[device][d] for d in axes), 0], (texts, dims)
            translated += 1
    assert refused > 10
    assert translated > 40


def test_parts_of_axes_of_another_mesh() -> None:
    meshes = ProgramMeshes({"o": '<["z"=24]>'}, Mesh("m", (("x", 4), ("y", 6))))
    for text, expected in (
        ('[{"z":(4)6}, {?}], replicated={"z":(1)2}', "@m, [{y}, {?}], replicated {x:(1)2}"),
        ('[{"z":(2)4}p1]', "@m, [{x:(2)2, y:(1)2}p1]"),
    ):
        assert str(meshes.sharding(f"#sdy.sharding<@o, {text}>")) == expected
    sharding = meshes.sharding('#sdy.sharding<@o, [{}], unreduced=max{"z":(1)8}>')
    assert str(sharding and sharding.layout) == "@m, [{}], partial max {x, y:(1)2}"
    with pytest.raises(ShardirError, match=r"of @o <z = 24> whose axis z:\(1\)3 is no axis"):
        meshes.sharding('#sdy.sharding<@o, [{"z":(1)3}]>')


def test_devices_in_another_order_are_at_the_same_places() -> None:
    body = """%a = sdy.sharding_constraint %x <@m, [{"x", "y"}, {}]> : tensor<8x8xf32>
      %y = sdy.collective_permute %a out_sharding=<@o, [{"x", "y"}, {}]> : tensor<8x8xf32>"""
    other = 'sdy.mesh @o = <["x"=2, "y"=2], device_ids=[1, 2, 3, 0]>'
    with pytest.warns(UserWarning, match="in its order, got another one in @o"):
        compiled = shardir.from_stablehlo(program(body) + other)
    assert "-> tensor<8x8xf32, #dist.layout<@m, [{x, y}, {}]>>" in str(compiled.input_module)
    np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], X)


NUMBER = """%i = stablehlo.partition_id : tensor<ui32>
  %n = stablehlo.convert %i : (tensor<ui32>) -> tensor<f32>
  %b = stablehlo.broadcast_in_dim %n, dims = [] : (tensor<f32>) -> tensor<8x8xf32>
  """


def test_values_of_single_devices() -> None:
    """Device 3 adds its own number, and device 1 multiplies by its own and by one of device 3."""
    body = (
        NUMBER
        + """%s = stablehlo.sine %b : tensor<8x8xf32>
      %a = stablehlo.add %x, %b {sdy.sharding = #sdy.sharding_per_value<[<@d3, []>]>} :
        tensor<8x8xf32>
      %y = stablehlo.multiply %a, %s {sdy.sharding = #sdy.sharding_per_value<[<@d1, []>]>} :
        tensor<8x8xf32>"""
    )
    others = "\n".join(f"sdy.mesh @d{d} = <[], device_ids=[{d}]>" for d in (1, 3))
    with pytest.warns(UserWarning) as warnings:
        compiled = shardir.from_stablehlo(program(body) + others)
    messages = [str(w.message) for w in warnings]
    assert all(any(f"of device {d} alone (@d{d})" in m for m in messages) for d in (1, 3))
    for module in (compiled.original, compiled.module):
        got = run(module, "main", [X])[0]
        np.testing.assert_allclose(got, (X + 3) * np.sin(np.float32(1)), rtol=1e-6)


def test_complex_numbers_have_shardings() -> None:
    """Of arguments, results and ops; so has a function that is called."""
    t = "tensor<4x8xcomplex<f64>>"
    rows = 'sdy.sharding = #sdy.sharding<@m, [{"x"}, {}]>'
    per_value = rows.replace("<@", "_per_value<[<@").replace("{}]>", "{}]>]>")
    compiled = shardir.from_stablehlo(f"""
      sdy.mesh @m = <["x"=2, "y"=2]>
      func.func @main(%x: {t} {{{rows}}}) -> ({t} {{{rows}}}) {{
        %0 = "stablehlo.fft"(%x) {{fft_length = array<i64: 8>, fft_type = #stablehlo<fft_type FFT>,
          {per_value}}} : ({t}) -> {t}
        %1 = func.call @f(%0) : ({t}) -> {t}
        %2 = sdy.reshard %1 <@m, [{{"y"}}, {{}}]> : {t}
        return %2 : {t}
      }}
      func.func private @f(%x: {t}) -> ({t} {{{rows.replace("{}", '{"y"}')}}}) {{
        %0 = stablehlo.multiply %x, %x : {t}
        return %0 : {t}
      }}""")
    text = str(compiled.input_module)
    for dims, shape, count in (("{x}, {}, {}", "4x8x2", 2), ("{x}, {}", "4x8", 2),
                               ("{x}, {y}", "4x8", 2), ("{y}, {}", "4x8", 2)):  # fmt: skip
        assert text.count(f"tensor<{shape}xf64, #dist.layout<@m, [{dims}]>>\n") >= count, dims
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8)) + 1j * rng.normal(size=(4, 8))
    (got,) = run(compiled.module, "main", [as_parts(x)])
    np.testing.assert_allclose(got, as_parts(np.fft.fft(x) ** 2), rtol=1e-12)


@pytest.mark.parametrize(
    ("text", "kind"), [(None, "sum"), ("#sdy<reduction_op MAX>", "max"), ("min", "min")]
)
def test_kinds_of_reductions(text: str | None, kind: str) -> None:
    assert kind_from_sdy(text) == kind


SUM = "%d = stablehlo.dot_general %l, %l, contracting_dims = [1] x [1] : (T, T) -> T\n"
SPLIT = '%l = sdy.sharding_constraint %x <@m, [{}, {"x"}]> : T\n'
REFUSED = [
    (
        SPLIT + SUM + '%y = sdy.all_reduce {"x", "y"} %d out_sharding=<@m, [{}, {}]> : T',
        "along y of equal numbers",
    ),
    (
        SPLIT + "%e = stablehlo.exponential %l : T\n"
        '%y = sdy.all_reduce {"x"} %e out_sharding=<@m, [{}, {}]> : T',
        "parts are those of no reduction",
    ),
    (
        NUMBER + "%y = stablehlo.add %x, %b : T",
        "a value that follows from the number of the device, outside",
    ),
    (
        "%y = sdy.sharding_constraint %x <@other, [{}, {}]> : T",
        "expected a sharding of mesh @m <x = 2, y = 2>, got one of @other <x = 2, y = 3>",
    ),
    ('%y = stablehlo.add %x, %x {mhlo.sharding = "{replicated}"} : T', "attribute mhlo.sharding"),
    (
        "%y = stablehlo.add %x, %x {sdy.sharding_rule = "
        "#sdy.op_sharding_rule<([i, j], [i, k])->([i, j]) {i=8, j=8, k=8}>} : T",
        "splits its factor j, as the op's own factors, .* do not",
    ),
    (
        "%y = stablehlo.reverse %x, dims = [1] {sdy.sharding_rule = "
        "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=8}>} : T",
        "splits its factor j, as the op's own factors, .* do not",
    ),
    (
        "%y = stablehlo.round_nearest_afz %x {sdy.sharding_rule = "
        "#sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=8}>} : T",
        "sdy.sharding_rule on an op that is not one op here",
    ),
]


@pytest.mark.parametrize(("body", "message"), REFUSED)
def test_refusals(body: str, message: str) -> None:
    other = 'sdy.mesh @other = <["x"=2, "y"=3]>' if "@other" in body else ""
    with pytest.raises(ShardirError, match=message):
        shardir.from_stablehlo(program(body.replace("T", "tensor<8x8xf32>")) + other)


def test_a_rule_in_a_loop() -> None:
    """Each device computes the whole loop: no rule leaves anything unsharded there."""
    rule = "#sdy.op_sharding_rule<([i, j], [i, j])->([i, j]) {i=8, j=8} need_replication={i}>"
    body = f"""
      %y = stablehlo.while(%a = %x) : tensor<8x8xf32> cond {{
        %f = stablehlo.reshape %a : (tensor<8x8xf32>) -> tensor<64xf32>
        %l = stablehlo.slice %f [63:64] : (tensor<64xf32>) -> tensor<1xf32>
        %s = stablehlo.reshape %l : (tensor<1xf32>) -> tensor<f32>
        %c = stablehlo.constant dense<200.0> : tensor<f32>
        %p = stablehlo.compare LT, %s, %c : (tensor<f32>, tensor<f32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      }} do {{
        %b = stablehlo.add %a, %a {{sdy.sharding_rule = {rule}}} : tensor<8x8xf32>
        stablehlo.return %b : tensor<8x8xf32>
      }}"""
    with pytest.warns(UserWarning, match="every device gathers the operands of nn.while"):
        compiled = shardir.from_stablehlo(program(body))
    np.testing.assert_array_equal(run(compiled.module, "main", [X])[0], 4 * X)
