"""Options of passes: sizes in bytes, and floats."""

import pytest

from shardir.rewriting.options import UNITS, float_of, size_of


@pytest.mark.parametrize("unit", UNITS)
def test_the_letters_of_a_unit_say_its_bytes(unit: str) -> None:
    """A power of 1024 with an i, else of 1000."""
    base, power = (1024 if "i" in unit else 1000), " KMGT".index(unit[:-1].rstrip("i") or " ")
    assert size_of((f"3{unit}",)) == 3 * base**power
    assert size_of((f"1.5 {unit}",)) == round(1.5 * base**power)


def test_other_values_are_no_sizes() -> None:
    assert [size_of(v) for v in [(), (3,), ("3",), ("KB",), ("3XB",), ("1KB", "2KB")]] == [None] * 6


def test_floats_have_every_form() -> None:
    assert [float_of((v,)) for v in (1, 0.5, "1", "1e-3", "2.5E+4")] == [1, 0.5, 1, 1e-3, 2.5e4]
    others = [(), (True,), ("-1",), ("x",), ("1 2",), ("nan",), (1, 2)]
    assert [float_of(v) for v in others] == [None] * len(others)
