"""Estimated times are compared up to rounding, in any order of the options."""

from itertools import permutations

import pytest

from shardir.algebra.estimates import IMPROVEMENT, ranked


@pytest.mark.parametrize("base", [0.0, 3e-7, 0.000225, 1e3])
def test_times_that_differ_by_rounding_are_equal(base: float) -> None:
    """Then the preference decides, whatever the order of the options."""
    times = {"c": base * (1 - 3e-16), "a": base * (1 + 3e-16), "b": base, "slow": base + 1e-9}
    for options in permutations(times):
        found = ranked(options, times.__getitem__, str)
        assert found == [(times[o], o) for o in ("a", "b", "c", "slow")]


def test_equal_options_keep_their_order() -> None:
    options = ["y", "x", "never", "z"]
    found = ranked(options, lambda o: float("inf") if o == "never" else 1.0, lambda _: 0)
    assert [o for _, o in found] == ["y", "x", "z", "never"]


def test_less_is_more_than_rounding() -> None:
    assert [o for _, o in ranked([2, 1], lambda o: 1.0 * IMPROVEMENT**o, lambda o: o)] == [1, 2]
    assert [o for _, o in ranked([2, 1], lambda o: 0.99**o, lambda o: o)] == [2, 1]
