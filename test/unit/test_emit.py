"""The torch emitter: every op, in every layout that its factors allow, against numpy; what the
text looks like; and that nothing of the input becomes code."""
# ruff: noqa: E402, E501
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportCallIssue=false

import ast
import itertools
import random
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import op_cases.custom  # noqa: F401 - what its custom ops are
from xdsl.dialects.builtin import ModuleOp
from xdsl.dialects.func import FuncOp, ReturnOp
from xdsl.ir import Block, Region
from xdsl.utils.exceptions import VerifyException

import shardir
from shardir.algebra.factors import placed
from shardir.algebra.layout import Layout
from shardir.algebra.mesh import Axis, Mesh
from shardir.backend import RUNTIME_FILES
from shardir.backend import runtime as rt
from shardir.backend.einsum import contraction
from shardir.backend.emit import program_text
from shardir.backend.literals import number_text
from shardir.backend.names import Names, comment, docstring, literal
from shardir.backend.target import TorchTarget
from shardir.backend.torch_dist import TORCH_DIST
from shardir.backend.torch_ops import TORCH
from shardir.dialects import dist, nn, train
from shardir.dialects.nn.base import Composite, plain
from shardir.interpret.evaluator import run
from shardir.interpret.values import assemble, rounded
from shardir.syntax.parser import default_parser, parse

torch.set_num_threads(1)

TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
         "i32": torch.int32, "i64": torch.int64, "i1": torch.bool}  # fmt: skip
TOLERANCE = {"f32": 2e-5, "f64": 1e-10, "bf16": 4e-2, "f16": 4e-3}


# ---- running a program in this process: no collectives, a rank after the other ----


def functions_of(text):
    """The functions of a program, without running its main."""
    space = {"__name__": "program"}
    exec(compile(text, "<program>", "exec"), space)
    return space


def tensor(array, element):
    return torch.tensor(np.array(array)).to(TYPES[element])


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


# ---- every op ----

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

MESH = Mesh("m", (("dp", 2), ("tp", 2)))
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
    return f, f.body.block.first_op


@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:90])
def test_op_equals_numpy(line):
    module, _ = module_of(line)
    _, op = the_op(module)
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
    mesh = dist.MeshOp.create(
        properties={"sym_name": shardir_string("m"), "axes": dist.MeshAttr(MESH.axes)}
    )
    module = ModuleOp([mesh, f])
    module.verify()
    return module, new


def shardir_string(text):
    from xdsl.dialects.builtin import StringAttr

    return StringAttr(text)


@pytest.mark.filterwarnings("error")  # nor does an empty shard make torch say anything
@pytest.mark.parametrize("line", CASES, ids=lambda line: line[:90])
def test_op_in_every_layout(line):
    module, _ = module_of(line)
    _, op = the_op(module)
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
    ops = [op for family in nn.FAMILIES for op in family.OPS]
    updates = [*train.UPDATES, *train.SCALARS]
    plain_ops = {op for op in ops if not issubclass(op, Composite)}
    assert {*plain_ops, *updates, *train.MARKS} == set(TORCH)
    assert {*dist.COLLECTIVES, *dist.windows.OPS, dist.SendOp, dist.RecvOp} == set(TORCH_DIST)
    tried = {module_op.name for line in CASES for module_op in [the_op(module_of(line)[0])[1]]}
    assert {op.name for op in (*ops, *updates)} == tried


def test_an_index_out_of_range_is_an_error():
    lines = [
        "nn.gather %0, %1 axis 0 : (tensor<7x4xf32>, tensor<3xi32>) -> tensor<3x4xf32>",
        "nn.gather %0, %1 axis 1 : (tensor<4x7xf32>, tensor<3xi32>) -> tensor<4x3xf32>",
        "nn.pick %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
        "nn.cross_entropy %0, %1 : (tensor<3x7xf32>, tensor<3xi32>) -> tensor<3xf32>",
    ]
    for line, bad in itertools.product(lines, (-1, 7, -100)):
        module, _ = module_of(line)
        _, op = the_op(module)
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
    sizes = dict(zip("abcdhijkq", "237243453", strict=True))
    assert contraction((x, y, z), ("x", "y"), sizes) == text


def test_contractions_equal_einsum():
    """Whatever the equation: operands of up to four letters, seeded."""
    choose, seen = random.Random(5), 0
    sizes = dict(zip("abcdef", (2, 3, 4, 5, 1, 2), strict=True))
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


# ---- what a step looks like ----

STEP = """
dist.mesh @m <dp = 2>
func.func @step(
    %x: tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>,
    %w: tensor<3x3xf32, #dist.local<@m, [{}, {}]>> {train.parameter = "w", train.init = #train.init<normal>}
) -> (tensor<f32, #dist.local<@m, []>>, tensor<3x3xf32, #dist.local<@m, [{}, {}]>> {train.updates = "w"}) attributes {train.step} {
  %h = nn.matmul %x, %w : (tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>, tensor<3x3xf32, #dist.local<@m, [{}, {}]>>) -> tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>
  %r = nn.relu %h : (tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>) -> tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>
  %l = nn.reduce <sum> %r dims <0, 1> : (tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>) -> tensor<f32, #dist.local<@m, [], partial sum {dp}>>
  %loss = dist.all_reduce <sum> %l over <dp> : (tensor<f32, #dist.local<@m, [], partial sum {dp}>>) -> tensor<f32, #dist.local<@m, []>>
  %lr = nn.constant dense<0.5> : tensor<f64> -> tensor<f64, #dist.local<@m, []>>
  train.backward
  %d_w = nn.einsum "ik,ij->kj" %x, %r : (tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>, tensor<4x3xf32, #dist.local<@m, [{dp}, {}]>>) -> tensor<3x3xf32, #dist.local<@m, [{}, {}], partial sum {dp}>>
  %d_w_1 = dist.all_reduce <sum> %d_w over <dp> : (tensor<3x3xf32, #dist.local<@m, [{}, {}], partial sum {dp}>>) -> tensor<3x3xf32, #dist.local<@m, [{}, {}]>>
  train.update
  %new = train.sgd %w, %d_w_1, %lr weight_decay 0.0 : (tensor<3x3xf32, #dist.local<@m, [{}, {}]>>, tensor<3x3xf32, #dist.local<@m, [{}, {}]>>, tensor<f64, #dist.local<@m, []>>) -> tensor<3x3xf32, #dist.local<@m, [{}, {}]>>
  func.return %loss, %new : tensor<f32, #dist.local<@m, []>>, tensor<3x3xf32, #dist.local<@m, [{}, {}]>>
}
"""  # fmt: skip


def body_of(text, name="step"):
    return text.split(f"def {name}(")[1].split("\n\n\n")[0]


def test_a_step_reads_well():
    text = body_of(program_text(parse(STEP, "some/where/step.ir", verify=True)))
    assert (
        text
        == """mesh, x, w):
    # x: f32 [4, 3] of [8, 3], [{dp}, {}]
    # w: f32 [3, 3]
    # step.ir:7
    h = x @ w
    # step.ir:8
    r = h.relu()
    del h
    # step.ir:9
    l = r.sum()
    # all-reduce sum over dp (2 ranks), 4 B: nn.reduce %l at step.ir:9 leaves partial sums
    loss = rt.all_reduce(mesh, l, "sum", ("dp",), donate=True)

    # ---- backward ----
    # step.ir:13, backward
    d_w = x.mT @ r
    del r
    # all-reduce sum over dp (2 ranks), 36 B: nn.einsum %d_w at step.ir:13 leaves partial sums
    d_w = rt.all_reduce(mesh, d_w, "sum", ("dp",), donate=True)

    # ---- update ----
    # step.ir:16
    w.sub_(d_w, alpha=0.5)

    return loss, w"""
    )


@pytest.mark.parametrize(("old", "new", "lacks"), [
    # the parameter is read after its update, by itself or through a view: no update in place
    ("func.return %loss, %new", "%y = nn.neg %w : (T) -> T\n  %z = nn.add %y, %new : (T, T) -> T\n"
     "  func.return %loss, %z", " w.sub_"),
    ("func.return %loss, %new", "func.return %loss, %new", None),
    ("train.backward", "%t = nn.transpose %w perm <1, 0> : (T) -> T\n  train.backward", None),
    # what is reduced is a view of the parameter: not donated
    ('%d_w_1 = dist.all_reduce <sum> %d_w', "%p = dist.contribute <sum> %w over <dp> : (T) -> P\n"
     "  %d_w_1 = dist.all_reduce <sum> %p", '"sum", ("dp",), donate=True)\n\n    # ---- update'),
    # what is reduced is read afterwards
    ("%new = train.sgd", "%z = nn.neg %d_w : (P) -> P\n  %zz = dist.all_reduce <sum> %z over <dp>"
     " : (P) -> T\n  %new = train.sgd", 'd_w, "sum", ("dp",), donate'),
])  # fmt: skip
def test_memory_is_reused_only_where_nobody_reads_it(old, new, lacks):
    whole = "tensor<3x3xf32, #dist.local<@m, [{}, {}]>>"
    partial = "tensor<3x3xf32, #dist.local<@m, [{}, {}], partial sum {dp}>>"
    new = new.replace("(T, T)", "(T, " + whole + ")").replace("(T", f"({whole}")
    new = new.replace("-> T", f"-> {whole}")
    new = new.replace("(P)", f"({partial})").replace("-> P", f"-> {partial}")
    text = body_of(program_text(parse(STEP.replace(old, new), "s.ir", verify=True)))
    if lacks is None:
        assert "w.sub_(" in text
    else:
        assert lacks not in text


def test_a_use_after_the_update_is_seen_through_views():
    whole = "tensor<3x3xf32, #dist.local<@m, [{}, {}]>>"
    view = f"%t = nn.transpose %w perm <1, 0> : ({whole}) -> {whole}\n  train.backward"
    text = STEP.replace("train.backward", view).replace("%loss, %new :", "%loss, %t :")
    text = body_of(program_text(parse(text, "s.ir", verify=True)))
    assert "sub_" not in text and "sub" not in text.replace("subset", "")  # nobody needs the update


def test_numbers_stand_in_the_text():
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
    lines = [line.strip() for line in body_of(program, "f").splitlines()]
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


# ---- nothing of the input becomes code ----

EVIL = [
    "\"); import os; os.system('x')  #",
    "a\nimport os\nos.abort()",
    "'''\"\"\"\\",
    "x\u2028import os\u2029import sys\x0c\x85\r\nimport os",
    "{x}{0}%s",
    "lambda",
    "ünïcode_名前",
    "__import__",
    "",
    " ",
    "1",
]


def quoted(text):
    """As MLIR writes a string."""
    out = "".join(c if (c.isalnum() and c.isascii()) or c in " _;()#.'{}%" else
                  "".join(f"\\{b:02X}" for b in c.encode()) for c in text)  # fmt: skip
    return f'"{out}"'


def evil_module(word, other):
    """Names from the input wherever they can stand: file, function, mesh, axis, parameter,
    state, strings of attributes."""
    module = parse(STEP, word or "<none>", verify=True)
    (f,) = [f for f in module.body.ops if isinstance(f, FuncOp)]
    text = shardir_string(word)
    f.properties["sym_name"] = text
    attrs = train.arg_attrs(f)
    attrs[1]["train.parameter"] = shardir_string(other)
    train.set_arg_attrs(f, attrs)
    from xdsl.dialects.builtin import ArrayAttr, DictionaryAttr

    f.properties["res_attrs"] = ArrayAttr(
        [DictionaryAttr({}), DictionaryAttr({"train.updates": shardir_string(other)})]
    )
    (mesh,) = [m for m in module.body.ops if isinstance(m, dist.MeshOp)]
    mesh.properties["sym_name"] = text
    mesh.properties["axes"] = dist.MeshAttr(((other or "empty", 2),))

    def renamed(layout):
        def axes(given):
            return tuple(Axis(other or "empty", a.pre, a.size) for a in given)

        return Layout(word, tuple(map(axes, layout.dims)), axes(layout.partial), layout.reduction)

    from xdsl.dialects.builtin import TensorType

    from shardir.algebra.layout import LocalLayout
    from shardir.passes.functions import set_type, update_signature, values

    for v in values(f.body.block):
        layout = dist.LocalAttr(LocalLayout(renamed(dist.layout_of(v))))
        set_type(v, TensorType(v.type.element_type, v.type.get_shape(), layout))
    for op in f.body.block.ops:
        if isinstance(op, dist.Collective):
            op.properties["axes"] = dist.AxesAttr((Axis(other or "empty"),))
    update_signature(f)
    return module


@pytest.mark.parametrize("word", EVIL)
def test_names_do_not_break_out(word, tmp_path):
    for other in EVIL:
        module = evil_module(word, other)
        text = program_text(module)
        assert_tame(text)
        program_text(module, rank=1)
        program = functions_of(text)
        name = next(n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef))
        mesh = rt.Mesh([(other or "empty", 1)])  # one rank: no process group
        loss, w = program[name](mesh, torch.ones(4, 3), torch.ones(3, 3))
        assert loss.item() == 36.0 and w.shape == (3, 3)
    TorchTarget().emit_directory(default_parser().ctx, module, None, tmp_path / "d")
    from shardir.backend.runtime_plan import load_plan

    plan = load_plan(tmp_path / "d")
    assert plan.mesh_name == word and [f.name for f in plan.functions] == [word]
    assert plan.functions[0].args[1].key == EVIL[-1]


def assert_tame(text):
    """Only what the emitter writes: a docstring, imports, functions of plain statements, main."""
    tree = ast.parse(text)
    assert isinstance(tree.body[0], ast.Expr) and isinstance(tree.body[0].value, ast.Constant)
    for node in tree.body[1:]:
        match node:
            case ast.Import(names=[ast.alias(name=name)]):
                known = {Path(f).stem for f in RUNTIME_FILES}
                assert name in {"torch", "torch.nn.functional", *known}
            case ast.FunctionDef(body=body):
                for line in body:
                    assert isinstance(line, ast.Assign | ast.Expr | ast.Delete | ast.Return)
            case ast.Assign(targets=[ast.Name(id=name)]):
                assert name == "aten" or name.startswith("NUMBERS_")
            case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))):
                assert len(node.body) == 1
            case _:
                raise AssertionError(ast.unparse(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id not in ("os", "sys", "exec", "eval", "open", "__import__")


@pytest.mark.parametrize("word", EVIL)
def test_text_of_strings(word):
    assert ast.literal_eval(literal(word)) == word
    for line in comment(word + " end", 4):
        assert len(line.splitlines()) == 1 and line.startswith("    #")
    tree = ast.parse(docstring(word, word))
    assert len(tree.body) == 1
    names = Names()
    made = [names.new(word) for _ in range(3)]
    assert len(set(made)) == 3 and all(n.isidentifier() and n.isascii() for n in made)


def test_names_from_quoted_text():
    """The same by way of the parser, where it takes such names."""
    word = quoted('"); import os  #\n')
    text = f"""func.func @{word}(%x: tensor<2xf32> {{train.parameter = {word}, train.init = #train.init<normal>}}) -> tensor<2xf32> {{
      %torch = nn.neg %x : (tensor<2xf32>) -> tensor<2xf32>
      %class = nn.neg %torch : (tensor<2xf32>) -> tensor<2xf32>
      %rt = nn.neg %class : (tensor<2xf32>) -> tensor<2xf32>
      func.return %rt : tensor<2xf32>
    }}"""  # fmt: skip
    program = program_text(parse(text, "e.ir", verify=True))
    assert_tame(program)
    out = functions_of(program)["import_os"](rt.Mesh(()), torch.ones(2))
    assert out.tolist() == [-1.0, -1.0]


# ---- the plan and its data ----

DATA = """
func.func @step(
    %x: tensor<4x3xf32> {train.input = #train.init<file, path = "d.npz", array = "x">},
    %n: tensor<4xi32> {train.input = #train.init<file, path = "d.npz", array = "n">},
    %w: tensor<3x2xf32> {train.parameter = "w", train.init = #train.init<normal>}
) -> (tensor<f32>, tensor<3x2xf32> {train.updates = "w"}) attributes {train.step} {
  %y = nn.matmul %x, %w : (tensor<4x3xf32>, tensor<3x2xf32>) -> tensor<4x2xf32>
  %l = nn.cross_entropy %y, %n : (tensor<4x2xf32>, tensor<4xi32>) -> tensor<4xf32>
  %loss = nn.reduce <mean> %l dims <0> : (tensor<4xf32>) -> tensor<f32>
  func.return %loss, %w : tensor<f32>, tensor<3x2xf32>
}
"""


def save_data(folder, **arrays):
    good = {"x": np.arange(30.0).reshape(10, 3), "n": np.zeros(10, np.uint16)}
    np.savez(folder / "d.npz", **{**good, **arrays})
    (folder / "p.ir").write_text(DATA)
    return folder / "p.ir"


def test_data_lie_beside_the_program(tmp_path):
    out = shardir.compile_file(save_data(tmp_path), "strip-layouts").save(tmp_path / "out")
    assert sorted(p.name for p in (out / "data").iterdir()) == ["d_n.npy", "d_x.npy"]
    assert np.load(out / "data/d_n.npy").dtype == np.int64
    assert np.load(out / "data/d_x.npy").shape == (10, 3)


@pytest.mark.parametrize(("arrays", "words"), [
    ({"x": np.zeros((10, 4))}, ["%x", "[10, 4]", "at least 1 rows of [3]"]),
    ({"x": np.zeros(3)}, ["%x", "[3]"]),
    ({"x": np.zeros((0, 3))}, ["[0, 3]"]),
    ({"n": np.zeros(10)}, ["%n", "i32", "float64"]),
    ({"x": np.array([["a", "b", "c"]])}, ["%x", "numbers"]),
    ({"x": np.array([{}, {}], dtype=object)}, ["%x", "cannot be read"]),
])  # fmt: skip
def test_bad_data_are_told(tmp_path, arrays, words):
    with pytest.raises(shardir.ShardirError) as error:
        shardir.compile_file(save_data(tmp_path, **arrays), "strip-layouts").save(tmp_path / "out")
    assert all(w in str(error.value) for w in [*words, "p.ir:2"])
    assert not (tmp_path / "out").exists()


def test_missing_data_are_told(tmp_path):
    path = save_data(tmp_path)
    for name, other, word in (("d.npz", "e.npz", "no file"), ('"x"', '"z"', "it has x, n")):
        path.write_text(DATA.replace(name, other))
        with pytest.raises(shardir.ShardirError, match=word):
            shardir.compile_file(path, "strip-layouts").save(tmp_path / "out")
    path.write_text(DATA)
    (tmp_path / "d.npz").write_bytes(b"PK nothing")
    with pytest.raises(shardir.ShardirError, match="cannot be read"):
        shardir.compile_file(path, "strip-layouts").save(tmp_path / "out")


def test_a_directory_is_replaced_as_a_whole(tmp_path):
    compiled, out = shardir.compile_file(save_data(tmp_path), "strip-layouts"), tmp_path / "out"
    compiled.save(out)
    (out / "checkpoint").mkdir()
    (out / "program_rank7.py").write_text("old")
    (out / "data/old.npy").write_text("old")
    compiled.save(out)
    assert (out / "checkpoint").is_dir()
    assert not (out / "program_rank7.py").exists() and not (out / "data/old.npy").exists()
    assert not list(tmp_path.glob(".out*"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    for place in (other, other / "thesis.tex"):
        with pytest.raises(shardir.ShardirError):
            compiled.save(place)
    assert [p.name for p in other.iterdir()] == ["thesis.tex"]


def collective_of(rows, before, after):
    """An all-gather over tp of so many rows."""
    f32 = plain(parse(CONSTANT).body.block.first_op.body.block.first_op.results[0]).element_type
    types = [dist.local(f32, (rows,), layout, MESH) for layout in (before, after)]
    block = Block(arg_types=types[:1])
    axes = {"axes": dist.AxesAttr((Axis("tp"),)), "dim": nn.base.int_attr(0)}
    op = dist.AllGatherOp.create(operands=block.args, result_types=types[1:], properties=axes)
    block.add_ops([op, ReturnOp(*op.results)])
    f = FuncOp("f", (types[:1], types[1:]), Region(block))
    mesh = dist.MeshOp.create(
        properties={"sym_name": shardir_string("m"), "axes": dist.MeshAttr(MESH.axes)}
    )
    return ModuleOp([mesh, f])


CONSTANT = """func.func @f() -> tensor<f32> {
  %x = nn.constant dense<1.0> : tensor<f32> -> tensor<f32>
  func.return %x : tensor<f32>
}"""


def test_what_cannot_be_emitted_is_told():
    a, b = Axis("dp"), Axis("tp")
    with pytest.raises(shardir.ShardirError, match="do not lie within"):
        program_text(collective_of(10, Layout("m", ((a, b),)), Layout("m", ((a,),))))
    collective_of(12, Layout("m", ((a, b),)), Layout("m", ((a,),)))
    with pytest.raises(shardir.ShardirError, match="global view"):
        program_text(parse(STEP.replace("#dist.local", "#dist.layout")))
    with pytest.raises(shardir.ShardirError, match="no function"):
        program_text(parse("dist.mesh @m <a = 2>"))


def test_shardir_is_light():
    import subprocess

    code = "import sys, shardir; assert not {'torch', 'xdsl', 'lark', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_python_interface():
    compiled = shardir.compile(STEP, "", "step.ir")
    again = parse(compiled.text, "again.ir", verify=True)
    assert "return loss, w" in program_text(again)
    assert body_of(compiled.program).splitlines()[-1] == "    return loss, w"
    module = shardir.parse(STEP, "step.ir")
    assert shardir.compile(module, "").program == compiled.program
    for text, pipeline, words in (
        ("func.func @f(", "train", ["step.ir:1"]),
        (STEP, "trian", ["trian", "train"]),
        (STEP.replace("(tensor<4x3", "(tensor<5x3"), "train", ["step.ir"]),
        (STEP.replace("dims <0, 1>", "dims <0, 7>"), "train", ["step.ir:9", "no dimension 7"]),
        ("dist.mesh @m <a = 2>", "", ["no function"]),
    ):
        with pytest.raises(shardir.ShardirError) as error:
            _ = shardir.compile(text, pipeline, "step.ir").program
        assert all(w in str(error.value) for w in words), str(error.value)
    with pytest.raises(shardir.ShardirError, match="cannot be read"):
        shardir.compile_file("nowhere.ir")
