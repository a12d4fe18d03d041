"""All partitions of a list: for tests by brute force."""

from collections.abc import Iterator


def partitions(numbers: list[int]) -> Iterator[list[list[int]]]:
    if not numbers:
        yield []
        return
    first, *others = numbers
    for rest in partitions(others):
        yield [[first], *rest]
        for i, block in enumerate(rest):
            yield [*rest[:i], [first, *block], *rest[i + 1 :]]
