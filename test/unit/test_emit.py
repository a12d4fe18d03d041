"""The torch emitter: every op, in every layout that its factors allow, against numpy."""
# ruff: noqa: E501

import itertools

import numpy as np
import op_cases.custom  # noqa: F401 - what its custom ops are
import pytest
import torch
from emitted import MESH, TYPES, functions_of, mesh_op, tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region
from xdsl.utils.exceptions import VerifyException

from shardir.algebra.factors import placed
from shardir.algebra.mesh import Axis
from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.ops import FAMILIES
from shardir.backend.torch.ops.dist import TORCH_DIST
from shardir.backend.torch.runtime import runtime as rt
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import Composite, plain
from shardir.interpret.evaluator import run
from shardir.interpret.values import assemble, rounded
from shardir.syntax.parser import parse

torch.set_num_threads(1)

TOLERANCE = {"f32": 2e-5, "f64": 1e-10, "bf16": 4e-2, "f16": 4e-3}


def array_of(x, element):
    return x.float().numpy() if element in ("bf16", "f16") else x.numpy()


def close(got, want, element):
    if element in TOLERANCE:
        scale = max(1.0, float(np.max(np.abs(want), initial=0, where=np.isfinite(want))))
        np.testing.assert_allclose(
            got, want, rtol=TOLERANCE[element], atol=TOLERANCE[element] * scale
        )
    else:
        np.testing.assert_array_equal(got, want)


def numbers(rng, shape, element, high):
    if element == "i1":
        return rng.integers(0, 2, shape).astype(bool)
    if element.startswith("i"):
        return rng.integers(0, high, shape)
    x = rng.standard_normal(shape)
    return np.round(x * 8) / 8  # the same in every type


CASES = """
nn.add %0, %1 : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xf32>
nn.add %0, %1 : (tensor<4x1xbf16>, tensor<3x4x6xbf16>) -> tensor<3x4x6xbf16>
nn.sub %0, %1 : (tensor<5x6xf16>, tensor<5x6xf16>) -> tensor<5x6xf16>
nn.mul %0, %1 : (tensor<5x3xi32>, tensor<5x3xi32>) -> tensor<5x3xi32>
nn.mul %0, %1 : (tensor<4x6xf64>, tensor<6xf64>) -> tensor<4x6xf64>
nn.div %0, %1 : (tensor<4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
nn.max %0, %1 : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
nn.max %0, %1 : (tensor<4x6xi64>, tensor<6xi64>) -> tensor<4x6xi64>
nn.neg %0 : (tensor<7xi64>) -> tensor<7xi64>
nn.exp %0 : (tensor<4x6xf64>) -> tensor<4x6xf64>
nn.log %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.sqrt %0 : (tensor<4x6xbf16>) -> tensor<4x6xbf16>
nn.relu %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.relu_grad %0, %1 : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
nn.tanh %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.tanh_grad %0, %1 : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
nn.sigmoid %0 : (tensor<4x6xf16>) -> tensor<4x6xf16>
nn.sigmoid_grad %0, %1 : (tensor<4x6xf64>, tensor<4x6xf64>) -> tensor<4x6xf64>
nn.gelu %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.gelu %0 : (tensor<4x6xbf16>) -> tensor<4x6xbf16>
nn.gelu_grad %0, %1 : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
nn.remainder %0, %1 : (tensor<4x6xf32>, tensor<f32>) -> tensor<4x6xf32>
nn.remainder %0, %1 : (tensor<5x3xi32>, tensor<3xi32>) -> tensor<5x3xi32>
nn.pow %0, %1 : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xf32>
nn.pow %0, %1 : (tensor<4x6xbf16>, tensor<bf16>) -> tensor<4x6xbf16>
nn.lerp %0, %1, %2 : (tensor<4x6xf32>, tensor<6xf32>, tensor<4x1xf32>) -> tensor<4x6xf32>
nn.min %0, %1 : (tensor<4x6xf16>, tensor<6xf16>) -> tensor<4x6xf16>
nn.abs %0 : (tensor<5x3xi32>) -> tensor<5x3xi32>
nn.sign %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.reciprocal %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.square %0 : (tensor<5x3xi64>) -> tensor<5x3xi64>
nn.rsqrt %0 : (tensor<5x3xbf16>) -> tensor<5x3xbf16>
nn.exp2 %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.expm1 %0 : (tensor<5x3xf64>) -> tensor<5x3xf64>
nn.log2 %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.log1p %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.sin %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.cos %0 : (tensor<5x3xf16>) -> tensor<5x3xf16>
nn.tan %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.atan %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.erf %0 : (tensor<5x3xf64>) -> tensor<5x3xf64>
nn.floor %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.ceil %0 : (tensor<5x3xbf16>) -> tensor<5x3xbf16>
nn.round %0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.trunc %0 : (tensor<5x3xf16>) -> tensor<5x3xf16>
nn.clamp %0 min -5.0e-01 max 1.0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.clamp %0 max 1.0e-01 : (tensor<5x3xbf16>) -> tensor<5x3xbf16>
nn.nan_to_num %0 nan 0.0 posinf 1.0 neginf -1.0 : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.tril %0 diagonal 0 : (tensor<5x4xf32>) -> tensor<5x4xf32>
nn.triu %0 diagonal -1 : (tensor<2x5x3xi32>) -> tensor<2x5x3xi32>
nn.and %0, %1 : (tensor<4x6xi1>, tensor<6xi1>) -> tensor<4x6xi1>
nn.or %0, %1 : (tensor<4x6xi64>, tensor<6xi64>) -> tensor<4x6xi64>
nn.xor %0, %1 : (tensor<4x6xi1>, tensor<6xi1>) -> tensor<4x6xi1>
nn.not %0 : (tensor<4x6xi1>) -> tensor<4x6xi1>
nn.not %0 : (tensor<4x6xi32>) -> tensor<4x6xi32>
nn.isnan %0 : (tensor<4x6xf32>) -> tensor<4x6xi1>
nn.isinf %0 : (tensor<4x6xf32>) -> tensor<4x6xi1>
nn.isfinite %0 : (tensor<4x6xbf16>) -> tensor<4x6xi1>
nn.silu %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.silu_grad %0, %1 : (tensor<4x6xf32>, tensor<4x6xf32>) -> tensor<4x6xf32>
nn.gelu %0 exact : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.gelu_grad %0, %1 exact : (tensor<4x6xf64>, tensor<4x6xf64>) -> tensor<4x6xf64>
nn.softplus %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.leaky_relu %0 slope 1.0e-01 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.elu %0 alpha 5.0e-01 : (tensor<4x6xbf16>) -> tensor<4x6xbf16>
nn.hardtanh %0 min -1.0 max 5.0e-01 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.compare <lt> %0, %1 : (tensor<4x6xf32>, tensor<6xf32>) -> tensor<4x6xi1>
nn.compare <eq> %0, %1 : (tensor<4x6xi32>, tensor<6xi32>) -> tensor<4x6xi1>
nn.select %0, %1, %2 : (tensor<4x6xi1>, tensor<6xf32>, tensor<4x1xf32>) -> tensor<4x6xf32>
nn.convert %0 : (tensor<4x6xf32>) -> tensor<4x6xbf16>
nn.convert %0 : (tensor<4x6xf32>) -> tensor<4x6xi32>
nn.convert %0 : (tensor<4x6xi1>) -> tensor<4x6xf32>
nn.convert %0 : (tensor<4x6xi64>) -> tensor<4x6xi64>
nn.stop_gradient %0 : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.matmul %0, %1 : (tensor<4x6xf32>, tensor<6x8xf32>) -> tensor<4x8xf32>
nn.matmul %0, %1 : (tensor<2x5x3xf64>, tensor<3x7xf64>) -> tensor<2x5x7xf64>
nn.matmul %0, %1 : (tensor<2x4x3xbf16>, tensor<2x3x4xbf16>) -> tensor<2x4x4xbf16>
nn.matmul %0, %1 : (tensor<4x6xi32>, tensor<6x8xi32>) -> tensor<4x8xi32>
nn.einsum "abk,abj->kj" %0, %1 : (tensor<2x4x3xf32>, tensor<2x4x5xf32>) -> tensor<3x5xf32>
nn.einsum "bhqd,bhkd->bhqk" %0, %1 : (tensor<2x2x3x4xf32>, tensor<2x2x5x4xf32>) -> tensor<2x2x3x5xf32>
nn.einsum "bqhd,bkhd->bhqk" %0, %1 : (tensor<2x3x2x4xf32>, tensor<2x5x2x4xf32>) -> tensor<2x2x3x5xf32>
nn.einsum "i,j->ij" %0, %1 : (tensor<5xf32>, tensor<4xf32>) -> tensor<5x4xf32>
nn.einsum "ij,ij->" %0, %1 : (tensor<5x4xf32>, tensor<5x4xf32>) -> tensor<f32>
nn.reduce <sum> %0 dims <1> : (tensor<5x6xf32>) -> tensor<5xf32>
nn.reduce <sum> %0 dims <0, 1> : (tensor<4x6xi32>) -> tensor<i32>
nn.reduce <sum> %0 dims <> : (tensor<4x6xf32>) -> tensor<4x6xf32>
nn.reduce <mean> %0 dims <0, 1> : (tensor<4x6xf32>) -> tensor<f32>
nn.reduce <mean> %0 dims <0> keep : (tensor<5x3xf32>) -> tensor<1x3xf32>
nn.reduce <mean> %0 dims <0> : (tensor<5x3xbf16>) -> tensor<3xbf16>
nn.reduce <mean> %0 dims <1, 2> : (tensor<2x1x3xf64>) -> tensor<2xf64>
nn.reduce <prod> %0 dims <1> : (tensor<5x6xf32>) -> tensor<5xf32>
nn.reduce <prod> %0 dims <0, 2> : (tensor<2x4x3xi32>) -> tensor<4xi32>
nn.reduce <prod> %0 dims <0, 1> keep : (tensor<5x4xf64>) -> tensor<1x1xf64>
nn.reduce <prod> %0 dims <0, 1> : (tensor<5x4xf64>) -> tensor<f64>
nn.reduce <any> %0 dims <1> : (tensor<5x3xi1>) -> tensor<5xi1>
nn.reduce <all> %0 dims <0, 1> : (tensor<3x2xi1>) -> tensor<i1>
nn.logsumexp %0 dims <1> : (tensor<5x6xf32>) -> tensor<5xf32>
nn.logsumexp %0 dims <0, 1> keep : (tensor<5x6xf16>) -> tensor<1x1xf16>
nn.var %0 dims <1> correction 1 : (tensor<5x6xf32>) -> tensor<5xf32>
nn.std %0 dims <0, 2> correction 0 keep : (tensor<5x6x2xf32>) -> tensor<1x6x1xf32>
nn.argmax %0 axis 1 : (tensor<5x6xf32>) -> tensor<5xi64>
nn.argmin %0 axis 0 keep : (tensor<5x6xi32>) -> tensor<1x6xi64>
nn.reduce <max> %0 dims <1> : (tensor<5x6xf32>) -> tensor<5xf32>
nn.reduce <max> %0 dims <0> keep : (tensor<3x2xf32>) -> tensor<1x2xf32>
nn.reduce <min> %0 dims <0, 1> : (tensor<5x1xi32>) -> tensor<i32>
nn.reduce <max> %0 dims <0> : (tensor<5x4xi1>) -> tensor<4xi1>
nn.reshape %0 : (tensor<4x6xf32>) -> tensor<2x2x6xf32>
nn.reshape %0 : (tensor<4x2x3xf32>) -> tensor<8x3xf32>
nn.reshape %0 : (tensor<5x4xf32>) -> tensor<5x2x2xf32>
nn.reshape %0 : (tensor<1x5x3xf32>) -> tensor<5x1x3xf32>
nn.reshape %0 : (tensor<1x1xf32>) -> tensor<f32>
nn.transpose %0 perm <1, 0> : (tensor<4x5xf32>) -> tensor<5x4xf32>
nn.transpose %0 perm <0, 2, 1> : (tensor<2x4x3xf32>) -> tensor<2x3x4xf32>
nn.transpose %0 perm <2, 0, 1> : (tensor<2x4x3xf32>) -> tensor<3x2x4xf32>
nn.transpose %0 perm <2, 1, 0> : (tensor<2x4x3xf32>) -> tensor<3x4x2xf32>
nn.transpose %0 perm <0, 1> : (tensor<2x4xf32>) -> tensor<2x4xf32>
nn.broadcast %0 dims <> : (tensor<f32>) -> tensor<5x4xf32>
nn.broadcast %0 dims <1> : (tensor<5xf32>) -> tensor<4x5xf32>
nn.broadcast %0 dims <0> : (tensor<5xf32>) -> tensor<5x4xf32>
nn.broadcast %0 dims <2, 0> : (tensor<3x1xf32>) -> tensor<4x2x3xf32>
nn.broadcast %0 dims <0, 2> : (tensor<5x3xf32>) -> tensor<5x4x3xf32>
nn.slice %0 starts <0, 1> limits <4, 6> strides <1, 2> : (tensor<4x6xf32>) -> tensor<4x3xf32>
nn.slice %0 starts <1, 0> limits <4, 3> strides <1, 1> : (tensor<7x3xf32>) -> tensor<3x3xf32>
nn.slice %0 starts <1, 4> limits <9, 5> strides <4, 1> : (tensor<11x5xi32>) -> tensor<2x1xi32>
nn.slice %0 starts <0> limits <4> strides <1> : (tensor<4xf32>) -> tensor<4xf32>
nn.pad %0 low <0, 2> high <1, 0> : (tensor<5x4xbf16>) -> tensor<6x6xbf16>
nn.pad %0 low <-2, 1> high <1, -1> value 2.5 : (tensor<5x4xf32>) -> tensor<4x4xf32>
nn.pad %0 low <-3, 1> high <-1, 0> : (tensor<5x4xf32>) -> tensor<1x5xf32>
nn.pad %0 low <1> high <1> value 1.0 : (tensor<3xi1>) -> tensor<5xi1>
nn.flip %0 dims <0, -1> : (tensor<5x3x4xf32>) -> tensor<5x3x4xf32>
nn.roll %0 shifts <2, 0, -1> : (tensor<5x3x4xf32>) -> tensor<5x3x4xf32>
nn.roll %0 shifts <5, 0> : (tensor<5x3xf32>) -> tensor<5x3xf32>
nn.tile %0 repeats <3, 1> : (tensor<3x4xf32>) -> tensor<9x4xf32>
nn.repeat_interleave %0 repeats 4 axis 0 : (tensor<2x3xf32>) -> tensor<8x3xf32>
nn.repeat_interleave %0 repeats 3 axis -1 : (tensor<4x5xf32>) -> tensor<4x15xf32>
nn.concat %0, %1 axis 0 : (tensor<4x3xf32>, tensor<1x3xf32>) -> tensor<5x3xf32>
nn.concat %0 axis 1 : (tensor<4x3xi1>) -> tensor<4x3xi1>
nn.stack %0, %1, %2 axis 1 : (tensor<4x3xf32>, tensor<4x3xf32>, tensor<4x3xf32>) -> tensor<4x3x3xf32>
nn.split %0 sizes <2, 3> axis 0 : (tensor<5x4xf32>) -> (tensor<2x4xf32>, tensor<3x4xf32>)
nn.split %0 sizes <4> axis -1 : (tensor<5x4xf32>) -> tensor<5x4xf32>
nn.gather %0, %1 axis 0 : (tensor<7x4xf32>, tensor<2x3xi32>) -> tensor<2x3x4xf32>
nn.gather %0, %1 axis 1 : (tensor<4x7xf32>, tensor<6xi64>) -> tensor<4x6xf32>
nn.gather %0, %1 axis 1 : (tensor<4x7x2xi32>, tensor<2x2xi64>) -> tensor<4x2x2x2xi32>
nn.gather %0, %1 axis 0 : (tensor<7x4xf32>, tensor<i64>) -> tensor<4xf32>
nn.gather_grad %0, %1 axis 0 : (tensor<2x3xi32>, tensor<2x3x4xf32>) -> tensor<7x4xf32>
nn.gather_grad %0, %1 axis 1 : (tensor<6xi64>, tensor<4x6xf32>) -> tensor<4x7xf32>
nn.gather_grad %0, %1 axis 1 : (tensor<2x2xi64>, tensor<3x2x2x2xf32>) -> tensor<3x7x2xf32>
nn.pick %0, %1 : (tensor<5x7xf32>, tensor<5xi32>) -> tensor<5xf32>
nn.pick %0, %1 : (tensor<7xi32>, tensor<i64>) -> tensor<i32>
nn.pick_grad %0, %1 : (tensor<2x3xi32>, tensor<2x3xf32>) -> tensor<2x3x7xf32>
nn.take_along_axis %0, %1 axis 0 : (tensor<7x4xf32>, tensor<5x4xi32>) -> tensor<5x4xf32>
nn.take_along_axis %0, %1 axis -1 : (tensor<3x8xi1>, tensor<3x5xi64>) -> tensor<3x5xi1>
nn.scatter_add %0, %1 axis 1 : (tensor<3x5xi64>, tensor<3x5xf32>) -> tensor<3x7xf32>
nn.scatter_add %0, %1 axis 0 : (tensor<6x4xi32>, tensor<6x4xi32>) -> tensor<8x4xi32>
nn.one_hot %0 : (tensor<5xi32>) -> tensor<5x7xf32>
nn.one_hot %0 : (tensor<2x3xi64>) -> tensor<2x3x8xi1>
nn.cumsum %0 axis 1 : (tensor<5x6xf32>) -> tensor<5x6xf32>
nn.cumsum %0 axis 0 reverse : (tensor<5x6xi32>) -> tensor<5x6xi32>
nn.sort %0 axis 1 : (tensor<5x6xf32>) -> (tensor<5x6xf32>, tensor<5x6xi64>)
nn.sort %0 axis 0 descending : (tensor<5x6xi32>) -> (tensor<5x6xi32>, tensor<5x6xi64>)
nn.argsort %0 axis 1 descending : (tensor<5x6xbf16>) -> tensor<5x6xi64>
nn.topk %0 k 2 axis 1 : (tensor<5x6xf32>) -> (tensor<5x2xf32>, tensor<5x2xi64>)
nn.topk %0 k 3 axis 0 smallest : (tensor<5x6x2xi64>) -> (tensor<3x6x2xi64>, tensor<3x6x2xi64>)
nn.softmax %0 axis -1 : (tensor<5x6xf32>) -> tensor<5x6xf32>
nn.softmax %0 axis 1 : (tensor<3x6x2xbf16>) -> tensor<3x6x2xbf16>
nn.softmax_grad %0, %1 axis 1 : (tensor<5x6xf32>, tensor<5x6xf32>) -> tensor<5x6xf32>
nn.log_softmax %0 axis 0 : (tensor<5x6xf32>) -> tensor<5x6xf32>
nn.log_softmax_grad %0, %1 axis 1 : (tensor<5x6xf64>, tensor<5x6xf64>) -> tensor<5x6xf64>
nn.cross_entropy %0, %1 : (tensor<5x7xf32>, tensor<5xi32>) -> tensor<5xf32>
nn.cross_entropy %0, %1 : (tensor<2x3x7xbf16>, tensor<2x3xi64>) -> tensor<2x3xbf16>
nn.cross_entropy %0, %1 : (tensor<7xf32>, tensor<i64>) -> tensor<f32>
nn.cross_entropy_grad %0, %1, %2 : (tensor<2x3x7xf32>, tensor<2x3xi32>, tensor<2x3xf32>) -> tensor<2x3x7xf32>
nn.cross_entropy %0, %1 ignore 3 smoothing 0.25 : (tensor<2x5x7xf32>, tensor<2x5xi64>) -> tensor<2x5xf32>
nn.cross_entropy %0, %1 ignore -100 : (tensor<5x7xf32>, tensor<5xi32>) -> tensor<5xf32>
nn.cross_entropy_grad %0, %1, %2 ignore 3 smoothing 0.25 : (tensor<2x5x7xf32>, tensor<2x5xi64>, tensor<2x5xf32>) -> tensor<2x5x7xf32>
nn.binary_cross_entropy %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
nn.binary_cross_entropy %0, %1 : (tensor<4x5xf64>, tensor<5xf64>) -> tensor<4x5xf64>
nn.binary_cross_entropy_with_logits %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
nn.binary_cross_entropy_with_logits %0, %1 : (tensor<4x5xf32>, tensor<4x1xf32>) -> tensor<4x5xf32>
nn.cross_entropy_loss <mean> %0, %1 ignore 3 : (tensor<2x5x7xbf16>, tensor<2x5xi64>) -> tensor<bf16>
nn.nll_loss <sum> %0, %1 ignore 3 : (tensor<5x7xf32>, tensor<5xi32>) -> tensor<f32>
nn.mse_loss <mean> %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.l1_loss <none> %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
nn.huber_loss <sum> %0, %1 delta 0.5 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.smooth_l1_loss <mean> %0, %1 beta 0.5 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.bce_loss <mean> %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.bce_with_logits_loss <mean> %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.soft_margin_loss <none> %0, %1 : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<4x5xf32>
nn.kl_div_loss <mean> %0, %1 log_target : (tensor<4x5xf32>, tensor<4x5xf32>) -> tensor<f32>
nn.attention %0, %1, %2 : (tensor<2x3x5x4xf32>, tensor<2x3x6x4xf32>, tensor<2x3x6x5xf32>) -> tensor<2x3x5x5xf32>
nn.attention %0, %1, %2 causal scale 0.5 : (tensor<3x5x4xf32>, tensor<3x5x4xf32>, tensor<3x5x2xf32>) -> tensor<3x5x2xf32>
nn.attention %0, %1, %2 mask %3 : (tensor<3x5x4xf32>, tensor<3x6x4xf32>, tensor<3x6x4xf32>, tensor<5x6xi1>) -> tensor<3x5x4xf32>
nn.attention %0, %1, %2 mask %3 causal : (tensor<2x4x5x4xf32>, tensor<2x2x5x4xf32>, tensor<2x2x5x4xf32>, tensor<4x1x5xf32>) -> tensor<2x4x5x4xf32>
nn.attention %0, %1, %2 causal : (tensor<2x3x5x4xbf16>, tensor<2x3x5x4xbf16>, tensor<2x3x5x4xbf16>) -> tensor<2x3x5x4xbf16>
nn.attention_grad %0, %1, %2, %3 causal : (tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>) -> (tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>, tensor<2x3x5x4xf32>)
nn.attention_grad %0, %1, %2, %3 mask %4 scale 0.5 : (tensor<4x5x4xf32>, tensor<2x6x4xf32>, tensor<2x6x2xf32>, tensor<4x5x2xf32>, tensor<5x6xi1>) -> (tensor<4x5x4xf32>, tensor<2x6x4xf32>, tensor<2x6x2xf32>)
nn.rotary <halves> %0, %1 base 1.0e+04 : (tensor<2x5x6xf32>, tensor<5xi32>) -> tensor<2x5x6xf32>
nn.rotary <interleaved> %0, %1 base 1.0e+04 reverse : (tensor<2x5x6xbf16>, tensor<2x1xi64>) -> tensor<2x5x6xbf16>
nn.sinusoid <halves> %0 base 1.0e+02 : (tensor<5xi32>) -> tensor<5x6xf32>
nn.sinusoid <interleaved> %0 base 1.0e+02 : (tensor<2x3xi64>) -> tensor<2x3x10xf16>
nn.random <uniform, low = -1.0, high = 1.0> %0 stream 2 : (tensor<i64>) -> tensor<5x6xf32>
nn.random <normal, mean = 0.0, std = 2.0> %0 stream 2 : (tensor<i64>) -> tensor<4x3x2xbf16>
nn.random <integers, low = 0, high = 9> %0 stream 2 : (tensor<i64>) -> tensor<5x6xi32>
nn.random <bernoulli, p = 0.25> %0 stream 2 : (tensor<i64>) -> tensor<5x6xi1>
nn.dropout %0, %1 p 0.25 stream 7 : (tensor<5x6xf32>, tensor<i64>) -> tensor<5x6xf32>
nn.dropout %0, %1 p 0.25 stream 7 : (tensor<4x3x2xbf16>, tensor<i64>) -> tensor<4x3x2xbf16>
nn.dropout %0, %1 p 0.0 stream 7 : (tensor<5x6xf32>, tensor<i64>) -> tensor<5x6xf32>
nn.dropout %0, %1 p 1.0 stream 7 : (tensor<5x6xf32>, tensor<i64>) -> tensor<5x6xf32>
nn.layer_norm %0, %1, %2 eps 1.0e-05 : (tensor<5x8xf32>, tensor<8xf32>, tensor<8xf32>) -> tensor<5x8xf32>
nn.layer_norm %0, %1, %2 eps 1.0e-05 : (tensor<3x2x4xf32>, tensor<2x4xf32>, tensor<2x4xf32>) -> tensor<3x2x4xf32>
nn.layer_norm %0, %1, %2 eps 1.0e-05 : (tensor<5x8xbf16>, tensor<8xbf16>, tensor<8xbf16>) -> tensor<5x8xbf16>
nn.layer_norm_grad %0, %1, %2 eps 1.0e-05 : (tensor<2x3x8xf32>, tensor<8xf32>, tensor<2x3x8xf32>) -> (tensor<2x3x8xf32>, tensor<8xf32>, tensor<8xf32>)
nn.layer_norm_grad %0, %1, %2 eps 1.0e-05 : (tensor<3x2x4xf64>, tensor<2x4xf64>, tensor<3x2x4xf64>) -> (tensor<3x2x4xf64>, tensor<2x4xf64>, tensor<2x4xf64>)
nn.batch_norm %0, %1, %2, %3, %4 momentum 0.1 eps 1.0e-02 : (tensor<5x4x3xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> (tensor<5x4x3xf32>, tensor<4xf32>, tensor<4xf32>)
nn.batch_norm_inference %0, %1, %2, %3, %4 eps 1.0e+01 : (tensor<5x4x3xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) -> tensor<5x4x3xf32>
nn.group_norm %0, %1, %2 groups 2 eps 1.0e-02 : (tensor<3x4x3xbf16>, tensor<4xbf16>, tensor<4xbf16>) -> tensor<3x4x3xbf16>
nn.rms_norm %0, %1 eps 1.0e-02 : (tensor<5x8xf32>, tensor<8xf32>) -> tensor<5x8xf32>
nn.max_pool %0 window <3, 2> stride <2, 1> padding <1, 1, 0, 0> : (tensor<3x2x5x4xf32>) -> tensor<3x2x3x3xf32>
nn.max_pool_grad %0, %1 window <3, 2> stride <2, 1> padding <1, 1, 0, 0> : (tensor<3x2x5x4xf32>, tensor<3x2x3x3xf32>) -> tensor<3x2x5x4xf32>
nn.max_pool_grad %0, %1 window <3> stride <2> padding <1, 0> : (tensor<3x2x5xf64>, tensor<3x2x2xf64>) -> tensor<3x2x5xf64>
nn.avg_pool %0 window <3> stride <2> padding <1, 1> exclude : (tensor<3x4x5xf64>) -> tensor<3x4x3xf64>
nn.adaptive_avg_pool %0 size <3> : (tensor<3x4x5xf32>) -> tensor<3x4x3xf32>
nn.unfold %0 dim 1 step 2 offset -1 : (tensor<4x7x3xf32>) -> tensor<4x3x5x3xf32>
nn.unfold %0 dim 0 step 3 offset -2 least : (tensor<5x4xi32>) -> tensor<2x6x4xi32>
nn.unfold %0 dim 0 step 4 offset 1 least : (tensor<6xbf16>) -> tensor<1x3xbf16>
nn.fold %0 dim 1 step 2 offset -1 : (tensor<4x3x5x3xf32>) -> tensor<4x7x3xf32>
nn.fold %0 dim 0 step 3 offset 1 : (tensor<4x2x5xi64>) -> tensor<12x5xi64>
nn.fold %0 dim 0 step 2 offset 0 : (tensor<3x2x5xf16>) -> tensor<5x5xf16>
nn.conv %0, %1 padding <1, 1> : (tensor<2x4x8xf32>, tensor<6x4x3xf32>) -> tensor<2x6x8xf32>
nn.conv %0, %1 stride <2, 1> padding <1, 0, 1, 1> dilation <1, 2> : (tensor<3x4x5x6xf64>, tensor<6x2x2x3xf64>) -> tensor<3x6x3x4xf64>
nn.conv %0, %1 : (tensor<2x5x6xbf16>, tensor<5x1x3xbf16>) -> tensor<2x5x4xbf16>
nn.conv %0, %1 padding <0, 0, 1, 1> : (tensor<2x4x1x6xf32>, tensor<2x4x1x3xf32>) -> tensor<2x2x1x6xf32>
nn.conv %0, %1 : (tensor<2x2x2x3x4x3xf32>, tensor<2x2x1x2x2x2xf32>) -> tensor<2x2x2x2x3x2xf32>
nn.conv_transpose %0, %1 stride <2> padding <1, 1> : (tensor<2x6x4xf32>, tensor<6x4x3xf32>) -> tensor<2x4x8xf32>
nn.conv_transpose %0, %1 stride <2, 1> padding <1, 0, 1, 1> dilation <1, 2> : (tensor<3x6x3x4xf64>, tensor<6x2x2x3xf64>) -> tensor<3x4x5x6xf64>
nn.conv_transpose %0, %1 : (tensor<2x2x2x2x3x2xf32>, tensor<2x2x1x2x2x2xf32>) -> tensor<2x2x2x3x4x3xf32>
nn.conv_weight %0, %1 padding <1, 1> : (tensor<2x4x8xf32>, tensor<2x6x8xf32>) -> tensor<6x4x3xf32>
nn.conv_weight %0, %1 stride <2, 1> padding <1, 0, 1, 1> dilation <1, 2> : (tensor<3x4x5x6xf64>, tensor<3x6x3x4xf64>) -> tensor<6x2x2x3xf64>
nn.conv_weight %0, %1 : (tensor<2x2x2x3x4x3xf32>, tensor<2x2x2x2x3x2xf32>) -> tensor<2x2x1x2x2x2xf32>
nn.constant dense<[[1.0, 2.5], [-3.0, 0.1], [5.0, 6.0]]> : tensor<3x2xf32> -> tensor<3x2xf32>
nn.constant dense<0.1> : tensor<4x3xf16> -> tensor<4x3xf16>
nn.constant dense<[true, false, true]> : tensor<3xi1> -> tensor<3xi1>
nn.constant dense<7> : tensor<i64> -> tensor<i64>
nn.iota dim 1 -> tensor<4x5xi32>
nn.iota dim 0 -> tensor<5xf32>
train.sgd %0, %1, %2 weight_decay 0.0 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>) -> tensor<5x4xf32>
train.sgd %0, %1, %2 weight_decay 0.5 : (tensor<5x4xbf16>, tensor<5x4xbf16>, tensor<f64>) -> tensor<5x4xbf16>
train.momentum %0, %1, %2, %3 momentum 0.9 weight_decay 0.0 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>)
train.momentum %0, %1, %2, %3 momentum 0.9 weight_decay 0.1 : (tensor<5x4xf64>, tensor<5x4xf64>, tensor<5x4xf64>, tensor<f64>) -> (tensor<5x4xf64>, tensor<5x4xf64>)
train.nesterov %0, %1, %2, %3 momentum 0.9 weight_decay 0.1 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>)
train.lars %0, %1, %2, %3 momentum 0.9 weight_decay 0.1 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>)
train.adam %0, %1, %2, %3, %4, %5, %6 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>, tensor<f64>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>)
train.adam %0, %1, %2, %3, %4, %5, %6 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<5x4xbf16>, tensor<5x4xbf16>, tensor<5x4xbf16>, tensor<5x4xbf16>, tensor<f64>, tensor<f64>, tensor<f64>) -> (tensor<5x4xbf16>, tensor<5x4xbf16>, tensor<5x4xbf16>)
train.adamw %0, %1, %2, %3, %4, %5, %6 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>, tensor<f64>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>)
train.adamw %0, %1, %2, %3, %4, %5, %6 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<f32>, tensor<f32>, tensor<f32>, tensor<f32>, tensor<f64>, tensor<f64>, tensor<f64>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
train.lamb_direction %0, %1, %2, %3, %4, %5 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>, tensor<f64>, tensor<f64>) -> (tensor<5x4xf32>, tensor<5x4xf32>, tensor<5x4xf32>)
train.lamb_direction %0, %1, %2, %3, %4, %5 beta1 0.8 beta2 0.9 eps 0.1 weight_decay 0.1 : (tensor<f32>, tensor<f32>, tensor<f32>, tensor<f32>, tensor<f64>, tensor<f64>) -> (tensor<f32>, tensor<f32>, tensor<f32>)
train.learning_rate %0 <constant, rate = 0.5, warmup = 9> : (tensor<i64>) -> tensor<f64>
train.learning_rate %0 <cosine, rate = 0.5, steps = 11, warmup = 2> : (tensor<i64>) -> tensor<f64>
train.learning_rate %0 <polynomial, rate = 0.5, steps = 9, power = 2.0, end = 0.1> : (tensor<i64>) -> tensor<f64>
train.learning_rate %0 <step, rate = 0.5, every = 2> : (tensor<i64>) -> tensor<f64>
train.learning_rate %0 <inverse_sqrt, rate = 0.5> : (tensor<i64>) -> tensor<f64>
train.bias_correction %0 beta 0.9 : (tensor<i64>) -> tensor<f64>
train.trust_ratio %0, %1 coefficient 0.1 weight_decay 0.2 : (tensor<f64>, tensor<f64>) -> tensor<f64>
train.next_loss_scale %0, %1, %2 growth 2.0 backoff 0.5 interval 1 : (tensor<f32>, tensor<i64>, tensor<i1>) -> (tensor<f32>, tensor<i64>)
train.next_loss_scale %0, %1, %2 growth 2.0 backoff 0.5 interval 5 : (tensor<f32>, tensor<i64>, tensor<i1>) -> (tensor<f32>, tensor<i64>)
nn.custom "test.mirror"(%0) with {by = 3 : i64} : (tensor<5x6xf32>) -> tensor<5x6xf32>
nn.custom "test.square"(%0) : (tensor<5x6xf64>) -> tensor<5x6xf64>
""".strip().splitlines()  # fmt: skip

POSITIVE = ("nn.log", "nn.log1p", "nn.log2", "nn.sqrt", "nn.rsqrt", "nn.reciprocal", "nn.div",
            "nn.remainder", "nn.pow", "nn.tan", "train.adam", "train.adamw", "train.lamb_direction",
            "train.learning_rate", "train.bias_correction", "train.trust_ratio")  # fmt: skip
SHARES = ("nn.binary_cross_entropy", "nn.bce_loss")  # of numbers from 0 to 1, both among them


def module_of(line):
    """A function that is this op: `@f(%0, %1) -> its results`."""
    _, _, types = line.rpartition(" : ")
    if "nn.constant" in line or "nn.iota" in line:
        ins, outs, n = "", line.rpartition("-> ")[2], 1
    else:
        ins, outs = types.split(" -> ")
        n = outs.count("tensor<")
    given = [t.strip() for t in ins.strip("()").split(",")] if ins else []
    # argument names are %0 and %1 in the lines: as names they have letters
    for i in range(len(given)):
        line = line.replace(f"%{i}", f"%a{i}")
    args = ", ".join(f"%a{i}: {t}" for i, t in enumerate(given))
    results = ", ".join(f"%r{i}" for i in range(n))
    text = f"""func.func @f({args}) -> ({outs.strip("()")}) {{
      {results} = {line}
      func.return {results} : {outs.strip("()")}
    }}"""
    return parse(text, "case.ir", verify=True), len(given)


def arguments(rng, op):
    """Random operands; indices are 0 to 6, as the lines above have seven rows."""
    out = []
    for v in op.operands:
        t = plain(v)
        x = numbers(rng, t.get_shape(), str(t.element_type), 7)
        if op.name in SHARES:
            x = np.abs(x) / 4 % 1
        out.append(np.abs(x) + 0.25 if op.name in POSITIVE else x)
    return out


def the_op(module):
    (f,) = [f for f in module.body.ops if isinstance(f, FuncOp)]
    op = f.body.block.first_op
    assert op is not None
    return op


@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:90])
def test_op_equals_numpy(line):
    module, _ = module_of(line)
    op = the_op(module)
    given = arguments(np.random.default_rng(len(line)), op)
    want = run(module, "f", given)
    program = functions_of(program_text(module))
    tensors = [
        tensor(x, str(plain(v).element_type)) for x, v in zip(given, op.operands, strict=True)
    ]
    before = [t.clone() for t in tensors]
    got = program["f"](rt.Mesh(()), *tensors)
    got = [got] if isinstance(got, torch.Tensor) else got
    for t, b in zip(tensors, before, strict=True):
        assert torch.equal(t, b)  # a plain function leaves its arguments alone
    for g, w, r in zip(got, want, op.results, strict=True):
        element = str(plain(r).element_type)
        assert g.dtype == TYPES[element] and tuple(g.shape) == w.shape
        close(array_of(g, element), w, element)


def placements(op):
    """Every way to split the op's factors over two axes of the mesh."""
    factors = op.factors()
    names = [f for f, _ in factors.sizes if f not in factors.replicate | factors.sliding]
    seen = set()
    for dp, tp in itertools.product([None, *names], repeat=2):
        for order in ((0, 1), (1, 0)) if dp == tp and dp else ((0, 1),):
            chosen = {}
            for k in order:
                if (factor := (dp, tp)[k]) is not None:
                    chosen[factor] = (*chosen.get(factor, ()), Axis(("dp", "tp")[k]))
            found = placed(factors, chosen, MESH)
            if found is not None and (found.operands, found.results) not in seen:
                seen.add((found.operands, found.results))
                yield found


def local_module(op, placement):
    """The op alone, in the local view."""
    t_in = [plain(v) for v in op.operands]
    t_out = [plain(v) for v in op.results]
    ins = [dist.local(t.element_type, t.get_shape(), l, MESH)
           for t, l in zip(t_in, placement.operands, strict=True)]  # fmt: skip
    outs = [dist.local(t.element_type, t.get_shape(), l, MESH)
            for t, l in zip(t_out, placement.results, strict=True)]  # fmt: skip
    block = Block(arg_types=ins)
    new = type(op).create(operands=block.args, result_types=outs, properties=dict(op.properties))
    block.add_ops([new, ReturnOp(*new.results)])
    f = FuncOp("f", (ins, outs), Region(block))
    module = ModuleOp([mesh_op(MESH), f])
    module.verify()
    return module, new


@pytest.mark.filterwarnings("error")  # nor does an empty shard make torch say anything
@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:90])
def test_op_in_every_layout(line):
    module, _ = module_of(line)
    op = the_op(module)
    if isinstance(op, Composite):
        with pytest.raises(VerifyException, match="is not of the local view"):
            local_module(op, next(placements(op)))
        return
    given = arguments(np.random.default_rng(1 + len(line)), op)
    given = [rounded(x, plain(v).element_type) for x, v in zip(given, op.operands, strict=True)]
    want = run(module, "f", given)
    for placement in placements(op):
        local, _ = local_module(op, placement)
        shared = functions_of(program_text(local))
        parts = [[] for _ in op.results]
        for rank in range(MESH.size):
            mine = [
                tensor(x[l.slices(MESH, x.shape, rank)], str(plain(v).element_type))
                for x, l, v in zip(given, placement.operands, op.operands, strict=True)
            ]
            mesh = rt.Mesh(MESH.axes, rank)
            got = shared["f"](mesh, *[t.clone() for t in mine])
            folded = functions_of(program_text(local, rank=rank))["f"](mesh, *mine)
            got = [got] if isinstance(got, torch.Tensor) else got
            folded = [folded] if isinstance(folded, torch.Tensor) else folded
            for i, (g, same, r) in enumerate(zip(got, folded, op.results, strict=True)):
                element = str(plain(r).element_type)
                assert (
                    torch.equal(g.nan_to_num(), same.nan_to_num())
                    if g.is_floating_point()
                    else torch.equal(g, same)
                )
                parts[i].append(array_of(g, element))
        for p, w, r, layout in zip(parts, want, op.results, placement.results, strict=True):
            whole = assemble(p, layout, MESH, w.shape)
            close(whole, w, str(plain(r).element_type))


def test_every_op_has_its_text():
    """In the file of its family's name; a composite has none, for its parts have theirs."""
    for family, ops in nn.FAMILIES.items():
        plain_ops = {op for op in ops if not issubclass(op, Composite)}
        assert plain_ops == set(FAMILIES.get(family, {})), family
    updates = [*train.UPDATES, *train.SCALARS]
    assert {*updates, *train.MARKS} == set(FAMILIES["train"])
    assert set(FAMILIES) <= {*nn.FAMILIES, "train"}
    sends = dist.SendOp, dist.RecvOp, dist.WaitOp
    assert {*dist.OPS.values(), *sends} == set(TORCH_DIST)
    tried = {module_op.name for line in CASES for module_op in [the_op(module_of(line)[0])]}
    assert {op.name for op in (*nn.Nn.operations, *updates)} == tried


def test_an_index_out_of_range_is_an_error():
    lines = [
        "nn.gather %0, %1 axis 0 : (tensor<7x4xf32>, tensor<3xi32>) -> tensor<3x4xf32>",
        "nn.gather %0, %1 axis 1 : (tensor<4x7xf32>, tensor<3xi32>) -> tensor<4x3xf32>",
        "nn.pick %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
        "nn.cross_entropy %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
    ]
    for line, bad in itertools.product(lines, (-1, 7, -100)):
        module, _ = module_of(line)
        op = the_op(module)
        for placement in placements(op):
            local, _ = local_module(op, placement)
            program = functions_of(program_text(local))
            x = np.zeros(plain(op.operands[0]).get_shape(), np.float32)
            ids = np.full(3, bad)
            raised = 0
            for rank in range(4):
                mine = [
                    tensor(v[l.slices(MESH, v.shape, rank)], e)
                    for v, l, e in zip((x, ids), placement.operands, ("f32", "i32"), strict=True)
                ]
                try:
                    program["f"](rt.Mesh(MESH.axes, rank), *mine)
                except (IndexError, RuntimeError) as error:
                    raised += "out of" in str(error)
            holders = sum(
                len(ids[placement.operands[1].slices(MESH, (3,), r)]) > 0 for r in range(4)
            )
            assert raised == holders
