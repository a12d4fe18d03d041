"""The extent of the tests. `make test` runs the default forms; `make test-all`, which sets
SHARDIR_TESTS=all, the long ones. A test that has two forms asks here, and nowhere else."""

import os
from collections.abc import Container, Iterable
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("SHARDIR_TESTS") == "all"
"""Whether the long forms run."""


def extent(default: T, long: T) -> T:
    """The value for the form that runs."""
    return long if LONG else default


def sampled(cases: Iterable[T], most: int, also: Container[T] = ()) -> list[T]:
    """As many of the cases of a law as `most`, spread evenly, and those that are `also` needed, as
    they catch planted errors; in the long form all cases. The place within each stretch of cases
    varies, so that a product of options shows each option."""
    every = [*cases]
    n = min(most, len(every))
    places = {int((i + i * GOLDEN % 1) * len(every) / n) for i in range(n)}
    return [x for i, x in enumerate(every) if LONG or i in places or x in also]


GOLDEN = 0.6180339887498949
"""Its multiples are spread evenly between whole numbers."""


def long_form(test: T) -> T | None:
    """Decorate a test that runs in the long form alone."""
    return extent(None, test)
