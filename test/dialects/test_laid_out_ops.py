"""Ops on layouts with explicit sizes, halos and axes of size 1."""

import pytest
from support.harness import compiled

import shardir

CONV = "(tensor<2x4x5xf64>, tensor<4x1x2xf64>) -> tensor<2x4x4xf64>"


LAID_OUT = {
    "explicit sizes before a concat": (
        "%x: tensor<5x3xf64, #dist.layout<@m, [{}, {b} sizes [1, 0, 2]]>>, %y: tensor<5x1xf64>",
        "nn.concat %x, %y axis 1 : (tensor<5x3xf64, #dist.layout<@m, [{}, {b} sizes [1, 0, 2]]>>, "
        "tensor<5x1xf64>) -> tensor<5x4xf64>",
    ),
    "explicit sizes before a slice": (
        "%x: tensor<4x3xf64, #dist.layout<@m, [{a} sizes [1, 3], {}]>>, %y: tensor<f64>",
        "nn.slice %x starts <1, 0> limits <4, 3> strides <1, 1> : (tensor<4x3xf64, "
        "#dist.layout<@m, [{a} sizes [1, 3], {}]>>) -> tensor<3x3xf64>",
    ),
    "explicit sizes before no repeats": (
        "%x: tensor<5x3xf64, #dist.layout<@m, [{a} sizes [4, 1], {}]>>, %y: tensor<f64>",
        "nn.repeat_interleave %x repeats 0 axis 0 : (tensor<5x3xf64, "
        "#dist.layout<@m, [{a} sizes [4, 1], {}]>>) -> tensor<0x3xf64>",
    ),
    "a device without a group of a convolution": (
        "%x: tensor<2x4x5xf64, #dist.layout<@m, [{}, {b}, {}]>>, %y: tensor<4x1x2xf64>",
        f"nn.conv %x, %y : {CONV}".replace(
            "2x4x5xf64", "2x4x5xf64, #dist.layout<@m, [{}, {b}, {}]>"
        ),
    ),
}


@pytest.mark.parametrize("name", LAID_OUT)
def test_laid_out_ops_keep_their_meaning(name: str) -> None:
    """Explicit sizes were copied to dimensions of another size; groups of channels were counted on
    devices without channels: four over three devices are 2, 2 and 0."""
    arguments, op = LAID_OUT[name]
    result = op.rsplit("-> ", 1)[1]
    module = shardir.parse(f"""
        dist.mesh @m <a = 2, b = 3>
        func.func @f({arguments}) -> {result} {{
          %z = {op}
          func.return %z : {result}
        }}
        train.gradient @g of @f wrt <0>""")
    compiled(module, check=True)


@pytest.mark.parametrize(
    ("op", "result"),
    [
        ("nn.max_pool %x window <3> stride <2> padding <1, 1>", "2x1x4xf64"),
        ("nn.slice %x starts <0, 0, 1> limits <2, 1, 7> strides <1, 1, 1>", "2x1x6xf64"),
        ("nn.fold %x dim 1 step 2 offset 0", "2x7xf64"),
    ],
)
def test_halo_exchanges_are_differentiated_in_the_local_view(op: str, result: str) -> None:
    """The cotangent of the windows was used as that of the rows."""
    halo = "[{}, {}, {b}]" if "fold" not in op else "[{}, {b}, {}]"
    shape = "2x1x7xf64" if "fold" not in op else "2x4x1xf64"
    x = f"tensor<{shape}, #dist.layout<@m, {halo}>>"
    module = shardir.parse(f"""
        dist.mesh @m <a = 2, b = 3>
        func.func @f(%x: {x}) -> tensor<{result}> {{
          %z = {op} : ({x}) -> tensor<{result}>
          func.return %z : tensor<{result}>
        }}
        train.gradient @g of @f wrt <0>""")
    compiled(module, ("propagate-strategies", "insert-redistributions", "lower-to-spmd"))
    assert f"dist.halo_{'fold' if 'fold' in op else 'unfold'}" in str(module)
    compiled(module, ("distributed-autodiff",), check=True)


def test_axis_of_size_1_splits_no_input() -> None:
    """It does not overlap with itself, so that two dimensions of an op could have it."""
    text = """
        dist.mesh @m <a = 1, b = 1>
        func.func @f(
            %x: tensor<3x6x2xf32>, %w: tensor<6xf32, #dist.layout<@m, [{a, b}]>>, %b: tensor<6xf32>
        ) -> tensor<3x6x2xf32> {
          %y = nn.group_norm %x, %w, %b groups 3 eps 1.000000e-05 : (tensor<3x6x2xf32>,
            tensor<6xf32, #dist.layout<@m, [{a, b}]>>, tensor<6xf32>) -> tensor<3x6x2xf32>
          func.return %y : tensor<3x6x2xf32>
        }"""
    assert "{a" not in shardir.compile(text, "propagate-strategies").text
    shardir.compile(text)
