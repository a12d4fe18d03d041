"""Positions, orders and views across the borders of shards."""

from typing import Any

import torch
from torch import arange
from torch.nn import functional as F

from bugs_of_others.record import bug, bugs_in

TITLE = "Positions, orders and views"


@bug(
    "pytorch/pytorch#173936, pytorch/pytorch#168940, tenstorrent/tt-mlir#8623",
    """`argmax` of a split dimension combined positions within shards by a maximum or a sum, and
    named another element.""",
    mesh="d = 2", x="[{}, {d}]", prints="result: [0, 2]",
)  # fmt: skip
def argmax_of_a_split_row(x: Any = [[10.0, 5, 3, 8], [1, 2, 7, 7]]):
    return x.argmax(1)


@bug(
    "pytorch/pytorch#172350, pytorch/pytorch#170934",
    """`index_put` with a split target and split values was an error of shapes, or took global
    positions for positions in a shard.""",
    mesh="d = 4", x="[{d}]", v="[{d}]", prints="result: [6, 2, 3, 4]",
)  # fmt: skip
def index_put_with_a_repeated_row(
    x: Any = [0.0] * 4, v: Any = [1.0, 2, 3, 4, 5], ids: Any = [0, 1, 2, 3, 0]
):
    return x.index_put((ids,), v, accumulate=True)


@bug(
    "pytorch/pytorch#178582",
    "The backward part of `topk` on a DTensor ended in an error.",
    mesh="d = 2", x="[{}, {d}]", prints="gradient of x: [[1, 2, 0, 0], [0, 0, 1, 2]]",
)  # fmt: skip
def gradient_of_topk(x: Any = [[10.0, 5, 3, 1], [1, 2, 8, 5]]):
    return (x.topk(2, dim=1).values * torch.tensor([1.0, 2.0])).sum()


@bug(
    "pytorch/pytorch#179136",
    "The backward part of `x[:, ids]` on a DTensor ended in an error.",
    mesh="d = 2", x="[{}, {d}]", prints="gradient of x: [[1, 0, 0, 2], [1, 0, 0, 2]]",
)  # fmt: skip
def gradient_of_selected_columns(x: Any = [[1.0, 2, 3, 4], [4, 3, 2, 1]], ids: Any = [3, 0, 3]):
    return x[:, ids].sum()


@bug(
    "jax-ml/jax#21403",
    "A cumulative sum along a split dimension was wrong on GPUs.",
    mesh="d = 4", x="[{d}]", prints="result: [1, 2, 3, 4, 5, 6, 7]",
)  # fmt: skip
def cumulative_sum_of_seven_over_four(x: Any = [1.0] * 7):
    return x.cumsum(0)


@bug(
    "jax-ml/jax#39301",
    "The gradient through two rolls, with one element on each device, did not compile.",
    mesh="d = 4", x="[{d}]", prints="gradient of x: [8, 16, 8, 16]",
)  # fmt: skip
def gradient_of_two_rolls(x: Any = arange(4.0)):
    return ((x.roll(1) + x.roll(-1)) ** 2).sum()


@bug(
    "jax-ml/jax#18434",
    """Rows were shifted by one, then the last was set. At the border of two shards stood the row of
    another one.""",
    mesh="d = 4", x="[{d}]", prints="result: [1, 2, 3, 4, 5, 6, 7, -1]",
)  # fmt: skip
def shift_then_set_the_last(x: Any = arange(8.0)):
    y = x.clone()
    y[:-1] = x[1:]
    y[-1] = -1.0
    return y


@bug(
    "jax-ml/jax#24576, jax-ml/jax#19106",
    """A concatenation of values that one axis of the mesh replicates was 2 or 4 times what it
    should be.""",
    mesh="a = 2, b = 2", x="[{a}]", y="[{b}]", prints="result: [1, 1, 1, 1, 1, 1, 1, 1]",
)  # fmt: skip
def concatenation_beside_replicas(x: Any = [1.0] * 2, y: Any = [1.0] * 6):
    return torch.cat([x, y])


@bug(
    "jax-ml/jax#22827",
    "Every second row was set to zero; all rows of a split array became zero.",
    mesh="d = 2", x="[{d}]", prints="result: [0, 1, 0, 1, 0, 1]",
)  # fmt: skip
def every_second_row_set(x: Any = [1.0] * 6):
    y = x.clone()
    y[::2] = 0.0
    return y


@bug(
    "pytorch/pytorch#139735, tenstorrent/tt-mlir#9303",
    "A write in place to a slice had no effect, without an error.",
    mesh="d = 2", x="[{d}]", prints="result: [[0, 2], [0, 4]]",
)  # fmt: skip
def slice_set_to_zero(x: Any = [[1.0, 2], [3, 4]]):
    y = x.clone()
    y[:, 0].zero_()
    return y


@bug(
    "jax-ml/jax#35896",
    "A split range of 64-bit integers was wrong.",
    mesh="d = 4", ids="[{d}]",
    prints="result: [2147483647, 2147483648, 2147483649, 2147483650]",
)  # fmt: skip
def range_beyond_32_bits(ids: Any = [0, 0, 0, 0]):
    return ids + arange(2**31 - 1, 2**31 + 3)


@bug(
    "jax-ml/jax#39309",
    """A reshape lost the axis of size 1, and the concatenation after it ended in an error of
    layouts.""",
    mesh="data = 1, tensor = 4", x="[{data}, {tensor}]",
    prints="result: [[[0, 1], [2, 3], [4, 5], [6, 7]]]",
)  # fmt: skip
def axis_of_size_one(x: Any = arange(8.0).view(1, 8)):
    y = x.reshape(-1, 4, 2)
    return torch.cat([y, y[..., :0]], dim=-1)


@bug(
    "pytorch/pytorch#179502",
    """A view of a [12, 8] tensor, split by columns, as [16, 6] took the shards as they were: other
    numbers, without an error.""",
    mesh="d = 4", x="[{}, {d}]",
    prints="result: [0, 6, 12, 18, 24, 30, 36, 42, 48, 54, 60, 66, 72, 78, 84, 90]",
)  # fmt: skip
def view_across_a_split_dimension(x: Any = arange(96.0).view(12, 8)):
    return x.view(16, 6)[:, 0]


@bug(
    "pytorch/pytorch#143372, pytorch/pytorch#103306",
    """Of 6 rows over 4 ranks the last has none: a view was an error; 5 rows came back as 8.""",
    mesh="d = 4", x="[{d}]", prints="result: [0, 1, 2, 3, 4, 5]",
)  # fmt: skip
def view_where_a_rank_has_nothing(x: Any = arange(6.0).view(6, 1)):
    return x.view(-1)


@bug(
    "PaddlePaddle/Paddle#67729, PaddlePaddle/Paddle#63876",
    """The gradient of a reshape had the shape of another shard where the reshape had to gather its
    input.""",
    mesh="a = 2, b = 2", x="[{a}, {}, {b}]",
    prints="gradient of x: [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]",
)  # fmt: skip
def gradient_of_merged_dimensions(x: Any = [[[1.0, 1]] * 2] * 2):
    return (x.reshape(8) * arange(8)).sum()


@bug(
    "pytorch/pytorch#179059",
    "`cartesian_prod` of split vectors ended in an error.",
    mesh="d = 2", x="[{d}]", y="[{d}]", prints="result: [[1, 3], [1, 4], [2, 3], [2, 4]]",
)  # fmt: skip
def cartesian_product(x: Any = [1.0, 2], y: Any = [3.0, 4]):
    return torch.cartesian_prod(x, y)


@bug(
    "Tencent/ncnn#6837, robertknight/rten#1418",
    "Resizing by a factor that is not a whole number read positions of another factor.",
    mesh="d = 2", x="[{}, {}, {d}]", prints="result: [[[0, 0, 1, 1, 2, 3, 3, 4]]]",
)  # fmt: skip
def resizing_by_1_6(x: Any = arange(5.0).view(1, 1, 5)):
    return F.interpolate(x, scale_factor=1.6)


@bug(
    "pytorch/pytorch#144109",
    "Columns in shards of 2, 3, 4 and 5 came back in another order.",
    mesh="d = 4", x="[{}, {d} sizes [2, 3, 4, 5]]",
    prints="result: [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26]",
)  # fmt: skip
def columns_in_unequal_shards(x: Any = arange(14.0).view(1, 14)):
    return x.sum(0) * 2


@bug(
    "NVIDIA/physicsnemo#1943",
    """Operands with 0 + 2 and 1 + 1 rows on two ranks were combined shard by shard: wrong numbers,
    without an error.""",
    mesh="d = 2", x="[{d} sizes [0, 2]]", y="[{d} sizes [1, 1]]",
    prints="result: [[11, 22], [33, 44]]",
)  # fmt: skip
def sum_of_rows_in_other_shards(x: Any = [[1.0, 2], [3, 4]], y: Any = [[10.0, 20], [30, 40]]):
    return x + y


@bug(
    "pytorch/pytorch#132751, jax-ml/jax#21562, pytorch/pytorch#131210",
    "Axes that split a dimension in the other order: the value was gathered whole on the way.",
    mesh="a = 2, b = 2", plan={"x": "[{a, b}], uses [{b, a}]"},
    prints="result: [0, 2, 4, 6, 8, 10, 12, 14]; sent: exchange of 16 B",
)  # fmt: skip
def axes_in_the_other_order(x: Any = arange(8.0)):
    return x * 2


BUGS = bugs_in(globals())
