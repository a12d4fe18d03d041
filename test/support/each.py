"""A law of many small cases in one test: each test costs pytest some milliseconds."""

from collections.abc import Callable, Iterable
from traceback import format_exc
from typing import TypeVar

T = TypeVar("T")


def check_each(check: Callable[[T], object], cases: Iterable[T]) -> None:
    """Check all cases; fail with the errors of those that are wrong."""
    errors = list[str]()
    for case in cases:
        try:
            check(case)
        except Exception:
            errors.append(f"{case}:\n{format_exc()}")
    assert not errors, f"{len(errors)} cases are wrong\n" + "\n".join(errors[:5])
