"""Emitted programs in this process: no collectives, a rank after the other."""
# ruff: noqa: E501 (texts of programs)

from shardir.testing.emission import MESH, TYPES, code_of, functions_of, mesh_op, tensor

__all__ = ["MESH", "STEP", "TYPES", "body_of", "code_of", "functions_of", "mesh_op", "tensor"]

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


def body_of(text: str, name: str = "step") -> str:
    """A function of a program, after its name."""
    return text.split(f"def {name}(")[1].split("\n\n\n", maxsplit=1)[0]
