"""The tests of acme. They need shardir and acme installed, and torch for what runs on ranks."""

import numpy as np
from acme.samples import SWISH

import shardir
from shardir.testing import check_extension, check_pass, interpret, on_ranks

GATED = """
func.func @f(%x: tensor<4x6xf64>, %w: tensor<6x8xf64>) -> tensor<4x8xf64> {
  %h = nn.matmul %x, %w : (tensor<4x6xf64>, tensor<6x8xf64>) -> tensor<4x8xf64>
  %g = nn.sigmoid %h : (tensor<4x8xf64>) -> tensor<4x8xf64>
  %y = nn.mul %h, %g : (tensor<4x8xf64>, tensor<4x8xf64>) -> tensor<4x8xf64>
  func.return %y : tensor<4x8xf64>
}
train.gradient @g of @f wrt <0, 1>
"""


def test_ops() -> None:
    check_extension("acme")


def test_fuse_swish() -> None:
    check_pass("fuse-swish", [GATED], cases=SWISH, seeds=range(2))


def test_ranks_have_the_values_of_one_device() -> None:
    compiled = shardir.compile("dist.mesh @m <dp = 2, tp = 2>" + GATED, mode="fused", plan="acme2d")
    one_device = interpret(GATED)
    for ranks in (interpret(compiled, function="f"), on_ranks(compiled, function="f")):
        np.testing.assert_allclose(ranks, one_device, rtol=1e-12)
