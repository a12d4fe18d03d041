"""Parameters split over the batch's axis (ZeRO-3): weights move, not batches."""

from itertools import pairwise

import pytest
from support.harness import (
    PIPELINE,
    apply,
)

from shardir.syntax.parser import parse
from shardir.tools import bench

communication = bench.load("bytes")


LATE = (PIPELINE[2], *PIPELINE[:2], *PIPELINE[3:])
"""The passes, with differentiation before everything."""
ORDERS = pytest.mark.parametrize(
    "order", [PIPELINE, LATE], ids=["laid out first", "differentiated first"]
)


def step(inputs: str, weights: list[tuple[int, ...]], layouts: list[str], body: str) -> str:
    """A step whose weights w0, w1, ... have these shapes and layouts."""
    parameters = ", ".join(
        f"%w{i}: {laid(shape, where)} "
        f'{{train.parameter = "w{i}", train.init = #train.init<normal>}}'
        for i, (shape, where) in enumerate(zip(weights, layouts, strict=True))
    )
    return (
        f"func.func private @loss({inputs}, {parameters}) -> tensor<f32> {{\n{body}\n"
        "  func.return %loss : tensor<f32>\n}\ntrain.step @step of @loss <sgd, lr = 0.1>\n"
    )


def laid(shape: tuple[int, ...], where: str) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32, #dist.layout<@m, {where}>>"


def plain_text(shape: tuple[int, ...]) -> str:
    return f"tensor<{'x'.join(map(str, shape))}xf32>"


def perceptron(batch: int, sizes: list[int], rows: str, columns: str) -> str:
    """tanh(x w) for each weight; x and the target have their rows over dp. Weights have the layouts
    `rows` and `columns` by turns."""
    weights: list[tuple[int, ...]] = [*pairwise(sizes)]
    layouts = [rows if i % 2 == 0 else columns for i in range(len(weights))]
    x, target = laid((batch, sizes[0]), "[{dp}, {}]"), laid((batch, sizes[-1]), "[{dp}, {}]")
    lines, last, have = [], "x", x
    for i, (shape, where) in enumerate(zip(weights, layouts, strict=True)):
        out = plain_text((batch, shape[1]))
        lines.append(
            f"  %y{i} = nn.matmul %{last}, %w{i} : ({have}, {laid(shape, where)}) -> {out}"
        )
        lines.append(f"  %t{i} = nn.tanh %y{i} : ({out}) -> {out}")
        last, have = f"t{i}", out
    lines.append(
        f"  %loss = nn.mse_loss <mean> %{last}, %target : ({have}, {target}) -> tensor<f32>"
    )
    inputs = f"%x: {x}, %target: {target}"
    return step(inputs, weights, layouts, "\n".join(lines))


def convolutions(batch: int, channels: list[int], where: list[str]) -> str:
    """3 x 3 convolutions of images of 8 x 8 whose batch is over dp, tanh, the mean over positions,
    and a product to `channels[-1]` classes."""
    *through, classes = channels
    weights: list[tuple[int, ...]] = [(o, c, 3, 3) for c, o in pairwise(through)]
    weights.append((through[-1], classes))
    images = laid((batch, channels[0], 8, 8), "[{dp}, {}, {}, {}]")
    lines, last, have = [], "x", images
    for i, shape in enumerate(weights[:-1]):
        out = plain_text((batch, shape[0], 8, 8))
        lines.append(
            f"  %y{i} = nn.conv %{last}, %w{i} padding <1, 1, 1, 1> : "
            f"({have}, {laid(shape, where[i])}) -> {out}"
        )
        lines.append(f"  %t{i} = nn.tanh %y{i} : ({out}) -> {out}")
        last, have = f"t{i}", out
    pooled, logits = plain_text((batch, through[-1])), plain_text((batch, classes))
    lines += [
        f"  %p = nn.reduce <mean> %{last} dims <2, 3> : ({have}) -> {pooled}",
        f"  %z = nn.matmul %p, %w{len(weights) - 1} : "
        f"({pooled}, {laid(weights[-1], where[-1])}) -> {logits}",
        f"  %loss = nn.reduce <mean> %z dims <0, 1> : ({logits}) -> tensor<f32>",
    ]
    return step(f"%x: {images}", weights, where, "\n".join(lines))


@ORDERS
def test_zero3_of_a_perceptron_moves_weights_not_batches(
    order: tuple[str, ...],
):
    """ZeRO-3 (Rajbhandari et al., 2020): each weight is gathered once and its gradient scattered
    once, in P numbers both, and the loss is one number: 4 (2 P + 1) bytes. Whichever dimension of
    the weights is split."""
    sizes = [32, 64, 32, 64, 16]
    p = sum(n * m for n, m in pairwise(sizes))
    for rows, columns in (("[{dp}, {}]",) * 2, ("[{}, {dp}]",) * 2, ("[{dp}, {}]", "[{}, {dp}]")):
        text = "dist.mesh @m <dp = 8>\n" + perceptron(4096, sizes, rows, columns)
        _, total = communication.communicated(apply(parse(text), *order))
        assert total == 4 * (2 * p + 1)


@ORDERS
def test_zero3_with_tensor_parallelism_moves_weights_not_batches(order: tuple[str, ...]):
    """Weights by columns, then by rows over tp, and over dp along the other dimension: on a device
    P / tp numbers are gathered and scattered over dp. Over tp each product by rows is reduced
    forward, [batch / dp, 32] and [batch / dp, 16], and backward in front of each by columns but the
    first, whose operand is data: [batch / dp, 32]."""
    batch, sizes, dp, tp = 4096, [32, 64, 32, 64, 16], 2, 4
    p = sum(n * m for n, m in pairwise(sizes))
    text = f"dist.mesh @m <dp = {dp}, tp = {tp}>\n"
    text += perceptron(batch, sizes, "[{dp}, {tp}]", "[{tp}, {dp}]")
    _, total = communication.communicated(apply(parse(text), *order))
    assert total == 4 * (2 * p // tp + batch // dp * (32 + 16 + 32) + 1)


@ORDERS
def test_zero3_of_a_convolutional_network_moves_weights_not_batches(
    order: tuple[str, ...],
):
    """4 (2 P + 1) bytes, as of the perceptron; kernels split by the channels
    that they make, or take."""
    channels = [8, 16, 32, 8]
    p = 9 * (8 * 16 + 16 * 32) + 32 * 8
    for kernel in ("[{dp}, {}, {}, {}]", "[{}, {dp}, {}, {}]"):
        where = [kernel, kernel, "[{dp}, {}]"]
        text = "dist.mesh @m <dp = 8>\n" + convolutions(256, channels, where)
        _, total = communication.communicated(apply(parse(text), *order))
        assert total == 4 * (2 * p + 1)
