"""The ops and attributes of Shardy in a module: what each becomes, and that values stay."""

import numpy as np
import pytest

import shardir
from shardir import ShardirError
from shardir.dialects.nn.custom import forget_custom_op
from shardir.frontends.stablehlo.shardy import rule_from_sdy
from shardir.frontends.stablehlo.translation import Refused
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
    ],
)
def test_rules(rule: str, expected: str) -> None:
    assert rule_from_sdy(f"#sdy.op_sharding_rule<{rule}>") == expected


def test_a_rule_of_merged_dimensions_is_refused() -> None:
    with pytest.raises(Refused, match="dimension ij has several factors"):
        rule_from_sdy("#sdy.op_sharding_rule<([i, j])->([ij]) {i=2, j=4}>")


REFUSED = [
    ('sdy.all_reduce {"x"} %x out_sharding=<@m, [{}, {}]>', "no sum over devices"),
    ("sdy.sharding_constraint %x <@other, [{}, {}]>", "expected a sharding of mesh @m"),
    ('stablehlo.add %x, %x {mhlo.sharding = "{replicated}"}', "attribute mhlo.sharding"),
    (
        "stablehlo.add %x, %x {sdy.sharding_rule = "
        "#sdy.op_sharding_rule<([i, j], [i, j])->([i, j]) {i=8, j=8}>}",
        "sdy.sharding_rule on an op that has factors",
    ),
]


@pytest.mark.parametrize(("op", "message"), REFUSED)
def test_refusals(op: str, message: str) -> None:
    other = 'sdy.mesh @other = <["x"=2, "y"=2]>' if "@other" in op else ""
    with pytest.raises(ShardirError, match=message):
        shardir.from_stablehlo(program(f"%y = {op} : tensor<8x8xf32>") + other)
