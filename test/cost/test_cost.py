"""The time model against cases by hand, and torch's own counts of flops."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import flop_counter
from xdsl.dialects.builtin import TensorType, f32

import shardir
from shardir.algebra.cluster import DEFAULT, Cluster, Level
from shardir.algebra.collectives import PRICED
from shardir.algebra.forms import (
    all_reduce,
    fastest,
)
from shardir.algebra.mesh import Axis, Mesh
from shardir.cost import clusters, op_seconds, report
from shardir.cost.seconds import OpCost, computation_seconds
from shardir.diagnostics import ShardirError
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import rule_of

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
BOX, SHELF = Level("box", 4, 1e9, 1e-6), Level("shelf", 2, 1e8, 1e-5)
CLUSTER = Cluster((BOX, SHELF), 10**9, (("f32", 1e9), ("f64", 1e8)), 1e10, 1e-6)
MESH = Mesh("m", (("dp", 2), ("tp", 4)), CLUSTER)
DP, TP = (Axis("dp"),), (Axis("tp"),)


def tensor(*shape: int) -> TensorType:
    return dist.tensor(f32, shape)


def costs_of(text: str) -> list[OpCost]:
    return list(report(shardir.compile(text, "").module, CLUSTER)[0].ops)


# ---- one op ----


def test_one_op_without_ir() -> None:
    """x [64, 32] @ w [32, 16] with rows over dp and columns over tp: 32 x 32 by 32 x 4."""
    types = tensor(64, 32), tensor(32, 16), tensor(64, 16)
    factors = rule_of(nn.MatmulOp, types[:2], types[2:], {})
    seconds = op_seconds(nn.MatmulOp, factors, {"i": DP, "j": TP}, types, MESH)
    assert seconds == pytest.approx(2 * 32 * 32 * 4 / 1e9 + 1e-6)
    # no part of it is computed by two devices
    full = op_seconds(nn.MatmulOp, factors, {}, types, MESH) - 1e-6
    assert full == pytest.approx(8 * (seconds - 1e-6))
    with pytest.raises(ShardirError, match=r"nn.matmul .* got i over {dp}, j over {dp}"):
        op_seconds(nn.MatmulOp, factors, {"i": DP, "j": DP}, types, MESH)


def test_an_elementwise_op_costs_the_time_of_its_bytes() -> None:
    """1,000 + 1,000 -> 1,000 of f32: 12,000 B, each device with a quarter of them."""
    types = (tensor(1000),) * 3
    factors = rule_of(nn.AddOp, types[:2], types[2:], {})
    slow = Mesh("m", MESH.axes, Cluster((BOX, SHELF), 1, (("f32", 1e9),), 1e6, 0.0))
    (factor, _), *_ = factors.sizes
    assert op_seconds(nn.AddOp, factors, {factor: TP}, types, slow) == pytest.approx(3e-3)


def test_a_type_without_a_rate_is_as_slow_as_the_slowest() -> None:
    assert computation_seconds(CLUSTER, nn.AddOp, "f32", 10**6, 0) == pytest.approx(1e-3 + 1e-6)
    assert computation_seconds(CLUSTER, nn.AddOp, "bf16", 10**6, 0) == pytest.approx(1e-2 + 1e-6)
    links = Cluster((BOX,))  # their devices have the default's rates, and nothing else costs time
    expected = 10**6 / dict(DEFAULT.flops)["f32"]
    assert computation_seconds(links, nn.AddOp, "f32", 10**6, 10**6) == pytest.approx(expected)


FLOPS = [
    ("nn.matmul %0, %1", (3, 4, 5), (5, 6), (3, 4, 6), 2 * 3 * 4 * 5 * 6),
    ('nn.einsum "bik,bjk->bij" %0, %1', (3, 4, 5), (3, 6, 5), (3, 4, 6), 2 * 3 * 4 * 5 * 6),
    ("nn.add %0, %1", (7, 3), (7, 3), (7, 3), 21),
]


@pytest.mark.parametrize(("op", "x", "w", "y", "flops"), FLOPS, ids=[f[0] for f in FLOPS])
def test_flops(op: str, x: Any, w: Any, y: Any, flops: int) -> None:
    a, b, c = (f"tensor<{'x'.join(map(str, s))}xf32>" for s in (x, w, y))
    cost = costs_of(
        f"func.func @f(%0: {a}, %1: {b}) -> {c} {{\n"
        f"  %2 = {op} : ({a}, {b}) -> {c}\n  func.return %2 : {c}\n}}"
    )[0]
    assert cost.flops == flops
    assert cost.bytes == 4 * (prod(x) + prod(w) + prod(y))


def test_convolutions_have_as_many_flops_as_in_torch() -> None:
    """Forward, and both gradients."""
    x = torch.randn(2, 6, 9, 8, requires_grad=True)
    w = torch.randn(4, 3, 3, 2, requires_grad=True)
    with flop_counter.FlopCounterMode(display=False) as counter:
        y = torch.nn.functional.conv2d(x, w, stride=2, groups=2)
    flops = counter.get_total_flops()
    shapes = {"x": x.shape, "w": w.shape, "y": y.shape}
    for kind, ends in ((nn.ConvOp, "xwy"), (nn.ConvTransposeOp, "ywx"), (nn.ConvWeightOp, "xyw")):
        assert kind.flops({}, [tuple(shapes[e]) for e in ends]) == flops


@pytest.mark.parametrize("heads", [2, 6])
def test_attention_has_as_many_flops_as_in_torch(heads: int) -> None:
    q, k, v, out = (3, 6, 5, 8), (3, heads, 7, 8), (3, heads, 7, 4), (3, 6, 5, 4)
    types = [tensor(*s) for s in (q, k, v, out)]
    factors = rule_of(nn.AttentionOp, tuple(types[:3]), tuple(types[3:]), {})
    found = nn.AttentionOp.flops(dict(factors.sizes), [q, k, v, out])
    assert found == flop_counter.sdpa_flop_count(q, k, v)
    found = nn.AttentionGradOp.flops(dict(factors.sizes), [q, k, v, out, out, q[:-1], q, k, v])
    assert found == flop_counter.sdpa_backward_flop_count(out, q, k, v)


def test_what_moves_nothing_costs_nothing_and_a_gather_reads_its_rows_alone() -> None:
    cost, free, number = costs_of(
        "func.func @f(%t: tensor<1000x8xf32>, %i: tensor<5xi64>) -> (tensor<8x5xf32>, tensor<f32>)"
        " {\n  %y = nn.gather %t, %i axis 0 : (tensor<1000x8xf32>, tensor<5xi64>) -> "
        "tensor<5x8xf32>\n"
        "  %z = nn.transpose %y perm <1, 0> : (tensor<5x8xf32>) -> tensor<8x5xf32>\n"
        "  %c = nn.constant dense<1.0> : tensor<f32> -> tensor<f32>\n"
        "  func.return %z, %c : tensor<8x5xf32>, tensor<f32>\n}"
    )
    assert (cost.flops, cost.bytes) == (0, 2 * 5 * 8 * 4 + 5 * 8)
    assert (free.bytes, free.seconds) == (number.bytes, number.seconds) == (0, 0.0)


# ---- collectives ----


LOCAL = """dist.mesh @m <dp = 2, tp = 4>
func.func @f(%x: tensor<8x4xf32, #dist.local<@m, [{{}}, {{tp}}]>>) -> {out} {{
  %y = {op} : (tensor<8x4xf32, #dist.local<@m, [{{}}, {{tp}}]>>) -> {out}
  func.return %y : {out}
}}
"""
# The all-gather along columns copies its 4 blocks of 128 B into place, the all-to-all what it
# concatenates along columns; an exchange packs and takes apart what it sends, and what it receives.
CALLS = [
    ("dist.all_gather %x dim 1 over <tp>", "tensor<8x16xf32, #dist.local<@m, [{}, {}]>>", 384,
     2e-6 + 384 / 1e9 + 2 * 512 / 1e10),
    ("dist.all_to_all %x split 0 concat 1 over <tp>",
     "tensor<2x16xf32, #dist.local<@m, [{tp}, {}]>>", 96,
     2e-6 + 96 / 1e9 + 2 * 128 / 1e10),
    ("dist.exchange %x over <tp>", "tensor<2x16xf32, #dist.local<@m, [{tp}, {}]>>", 96,
     2e-6 + 96 / 1e9 + 2 * (2 * 96 + 96) / 1e10),
    ("dist.permute %x pairs <0, 1, 1, 0> over <dp>",
     "tensor<8x4xf32, #dist.local<@m, [{}, {tp}]>>", 128, 1e-5 + 128 / 1e8),
    ("dist.broadcast %x from 0 over <tp>", "tensor<8x4xf32, #dist.local<@m, [{}, {tp}]>>", 128,
     2e-6 + 128 / 1e9),
    ("dist.halo_unfold %x dim 1 step 1 offset -1 over <tp>",
     "tensor<8x4x3xf32, #dist.local<@m, [{}, {tp}, {}]>>", 64, 1e-6 + 64 / 1e9),
    ("dist.all_slice %x dim 0 over <dp>", "tensor<4x4xf32, #dist.local<@m, [{dp}, {tp}]>>", 0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "out", "received", "seconds"), CALLS, ids=[c[0].split()[0] for c in CALLS]
)
def test_a_collective(op: str, out: str, received: int, seconds: float) -> None:
    cost = costs_of(LOCAL.format(op=op, out=out))[0]
    assert (cost.flops, cost.bytes) == (0, received)
    assert cost.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("op", "out", "received", "seconds"), CALLS[:-1],
    ids=[c[0].split()[0] for c in CALLS[:-1]],
)  # fmt: skip
def test_a_library_may_be_slower(op: str, out: str, received: int, seconds: float) -> None:
    """Each message takes three times as long as the formula says; what is copied, as long. So the
    latencies and bytes of links of a third of the speed."""
    kind = op.split(maxsplit=1)[0].removeprefix("dist.")
    program = shardir.compile(LOCAL.format(op=op, out=out), "").module
    links = tuple(
        l._replace(bandwidth=l.bandwidth / 3, latency=3 * l.latency) for l in CLUSTER.levels
    )
    slow, slower, other = (
        report(program, c)[0].ops[0]
        for c in (
            replace(CLUSTER, levels=links), replace(CLUSTER, collectives=((kind, 3.0),)),
            replace(CLUSTER, collectives=(("gather", 3.0),)),
        )
    )  # fmt: skip
    assert slower.seconds == pytest.approx(slow.seconds)
    assert slower.latency == pytest.approx(slow.latency)
    assert (slower.bytes, slower.form) == (received, slow.form)
    assert other.seconds == pytest.approx(seconds)


def test_an_op_may_be_slower() -> None:
    """A GELU takes three times the time of its bytes; its fixed time, and other ops, as long."""
    t = "tensor<64x64xf32>"
    program = shardir.compile(
        f"func.func @f(%x: {t}) -> {t} {{\n  %y = nn.gelu %x : ({t}) -> {t}\n"
        f"  %z = nn.relu %y : ({t}) -> {t}\n  func.return %z : {t}\n}}", "",
    ).module  # fmt: skip
    (usual, relu), (slower, other) = (
        report(program, c)[0].ops for c in (CLUSTER, replace(CLUSTER, ops=(("nn.gelu", 3.0),)))
    )
    fixed = CLUSTER.overhead
    assert usual.seconds > 2 * fixed > 0
    assert slower.seconds - fixed == pytest.approx(3 * (usual.seconds - fixed))
    assert other.seconds == relu.seconds


def test_the_operands_of_a_product_may_have_a_rate_of_their_own() -> None:
    """Beside the time of its flops; the bytes of other ops, and types without one, as before."""
    t, other = "tensor<64x64xf32>", "tensor<64x64xf64>"
    program = shardir.compile(
        f"func.func @f(%x: {t}, %z: {other}) -> {t} {{\n"
        f"  %y = nn.matmul %x, %x : ({t}, {t}) -> {t}\n  %a = nn.add %y, %x : ({t}, {t}) -> {t}\n"
        f"  %b = nn.matmul %z, %z : ({other}, {other}) -> {other}\n  func.return %a : {t}\n}}", "",
    ).module  # fmt: skip
    usual, apart = (
        [c.seconds for c in report(program, c)[0].ops]
        for c in (CLUSTER, replace(CLUSTER, operands=(("f32", 1e6),)))
    )
    flops, touched = 2 * 64**3, 3 * 64**2 * 4
    assert usual[0] == pytest.approx(flops / 1e9 + CLUSTER.overhead)
    assert apart[0] == pytest.approx(usual[0] + touched / 1e6)
    assert apart[1:] == usual[1:]


def test_all_that_communicates_may_be_slower() -> None:
    assert set(PRICED) == {
        op.name.removeprefix("dist.") for op in (*dist.OPS.values(), dist.RecvOp)
        if op not in dist.LOCAL
    }  # fmt: skip


def test_several_values_are_put_into_one_buffer() -> None:
    """Two values of 128 B: written there, and read from there."""
    one = "tensor<8x4xf32, #dist.local<@m, [{}, {}], partial sum {tp}>>"
    out = "tensor<8x4xf32, #dist.local<@m, [{}, {}]>>"
    found = []
    for n in (1, 2):
        names = ", ".join("%x" for _ in range(n))
        ins, outs = (", ".join([t] * n) for t in (one, out))
        ys = ", ".join(f"%y{i}" for i in range(n))
        found += costs_of(
            f"dist.mesh @m <dp = 2, tp = 4>\n"
            f"func.func @f(%x: {one}) -> ({outs}) {{\n"
            f"  {ys} = dist.all_reduce <sum> {names} over <tp> : ({ins}) -> ({outs})\n"
            f"  func.return {ys} : {outs}\n}}"
        )
    forms = all_reduce(((4, BOX),))
    assert found[0].seconds == pytest.approx(fastest(forms, 128).seconds(128))
    assert found[1].seconds == pytest.approx(fastest(forms, 256).seconds(256) + 2 * 256 / 1e10)


def test_a_function_is_the_sum_of_its_ops() -> None:
    module = shardir.compile_file(EXAMPLES / "digits.ir", "train").module
    step = next(f for f in report(module, clusters.load("pod2048")) if f.name == "step")
    assert step.mesh.cluster_or_default.units == (4,)
    parts = step.computation + sum(s for _, s in step.communication.values())
    assert step.seconds == pytest.approx(parts) == pytest.approx(sum(c.seconds for c in step.ops))
    assert set(step.communication) == {DP, TP}
    # a rank's 8,970 gradients and the loss, by a ring of two
    assert step.communication[DP][0] == 4 * (64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10 + 1)
