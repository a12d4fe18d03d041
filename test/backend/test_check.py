"""The comparison of `shard-run --check`: results of all ranks with those of one device."""

import math

import pytest

from shardir.backend.torch.launch.report import relative_difference

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([NAN, INF, -INF], [NAN, INF, -INF], 0.0),
        ([], [], 0.0),
        ([NAN, 1.0, 3.0], [NAN, 2.0, 4.0], 0.25),
        ([INF, 1.0], [INF, 2.0], 0.5),
        ([NAN], [1.0], INF),
        ([1.0], [NAN], INF),
        ([INF], [-INF], INF),
        ([1.0, INF], [1.0, 2.0], INF),
        ([1.0], [1.0, 1.0], INF),
    ],
)
def test_difference(ours: list[float], theirs: list[float], difference: float):
    assert relative_difference(ours, theirs) == difference
