"""Emitted programs in this process: no collectives, a rank after the other."""
# ruff: noqa: E501 (texts of programs)

from functools import cache
from types import CodeType
from typing import Any

import numpy as np
import torch
from xdsl.dialects.builtin import StringAttr

from shardir.algebra.mesh import Mesh
from shardir.backend.torch.shardir_runtime.run.program_module import with_this_runtime
from shardir.dialects import dist

TYPES = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "f16": torch.float16,
         "i32": torch.int32, "i64": torch.int64, "i1": torch.bool}  # fmt: skip
MESH = Mesh("m", (("dp", 2), ("tp", 2)))

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


@cache
def code_of(text: str) -> CodeType:
    """The compiled program. Programs of ranks are often equal."""
    return compile(with_this_runtime(text.encode()), "<program>", "exec")


def functions_of(text: str) -> dict[str, Any]:
    """The functions of a program, without running its main."""
    space: dict[str, Any] = {"__name__": "program"}
    exec(code_of(text), space)
    return space


def tensor(array: Any, element: str) -> torch.Tensor:
    return torch.tensor(np.array(array)).to(TYPES[element])


def mesh_op(mesh: Mesh) -> dist.MeshOp:
    """The declaration of a mesh."""
    return dist.MeshOp.create(
        properties={"sym_name": StringAttr(mesh.name), "axes": dist.MeshAttr(mesh.axes)}
    )


def body_of(text: str, name: str = "step") -> str:
    """A function of a program, after its name."""
    return text.split(f"def {name}(")[1].split("\n\n\n", maxsplit=1)[0]
