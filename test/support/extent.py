"""The extent of the tests. `make test` runs the default forms; `make test-all`, which sets
SHARDIR_TESTS=all, the long ones. A test that has two forms asks here, and nowhere else."""

import os
from typing import TypeVar

T = TypeVar("T")

LONG = os.environ.get("SHARDIR_TESTS") == "all"
"""Whether the long forms run."""


def extent(default: T, long: T) -> T:
    """The value for the form that runs."""
    return long if LONG else default


def long_form(test: T) -> T | None:
    """Decorate a test that runs in the long form alone."""
    return extent(None, test)
