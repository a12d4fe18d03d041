"""A perceptron of any depth, lowered with a plan."""

from itertools import pairwise

SIZES = [32, 64, 32, 64, 16]


def perceptron(batch: int, devices: int) -> str:
    """The weights and the batch have no layouts."""
    lines, last, width = [], "x", SIZES[0]
    for i, (n, m) in enumerate(pairwise(SIZES)):
        out = f"tensor<{batch}x{m}xf32>"
        lines.append(f"  %y{i} = nn.matmul %{last}, %w{i} : "
                     f"(tensor<{batch}x{n}xf32>, tensor<{n}x{m}xf32>) -> {out}")  # fmt: skip
        lines.append(f"  %t{i} = nn.tanh %y{i} : ({out}) -> {out}")
        last, width = f"t{i}", m
    lines.append(f"  %loss = nn.reduce <mean> %{last} dims <0, 1> : "
                 f"(tensor<{batch}x{width}xf32>) -> tensor<f32>")  # fmt: skip
    parameters = ", ".join(
        f'%w{i}: tensor<{n}x{m}xf32> {{train.parameter = "layers.{i}.weight"}}'
        for i, (n, m) in enumerate(pairwise(SIZES))
    )
    body = "\n".join(lines)
    return (
        f"dist.mesh @m <dp = {devices}>\n"
        f"func.func private @loss(%x: tensor<{batch}x{SIZES[0]}xf32>, {parameters}) -> tensor<f32> "
        f"{{\n{body}\n  func.return %loss : tensor<f32>\n}}\n"
        "train.step @step of @loss <adam, lr = 0.1>\n"
    )


BEFORE_RETAINING = (
    "inline-calls,propagate-strategies,insert-redistributions,distributed-autodiff,recompute,"
    "lower-to-spmd,simplify-communication,fuse-communication"
)
"""The passes up to retain-gathered."""
