"""The growth of a computation's work with the size of its input: the executed lines of shardir, and
the calls of other Python functions.

No time is measured, so a law about the growth holds on any machine. Loops within a call of C (numpy
or sorting) are not counted, but for COPIES.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from xdsl.ir import Block, OpOperands

import shardir

OURS = str(Path(shardir.__file__).parent)

COPIES: dict[CodeType, Callable[[Any], int]] = {
    OpOperands.__setitem__.__code__: len,
    Block.insert_arg.__code__: lambda block: len(block.args),
    Block.erase_arg.__code__: lambda block: len(block.args),
}
"""Changes of one element that copy all of them: an op with many operands, or a block with many
arguments, changes them together. Each counts as the number of its elements."""

REGEXES = str(Path(re.__file__).parent)
"""The compiler of regular expressions, which Python calls for one that has left its small cache."""

FEW = 300
"""A function that executes fewer lines at the largest size is not compared."""


def lines(work: Callable[[], object]) -> Counter[CodeType]:
    """Return how many lines each function of shardir executes, those of loops each time, and how
    often each other function is called."""
    found: Counter[CodeType] = Counter()

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_filename.startswith(REGEXES):
            return None
        found[code] += COPIES[code](frame.f_locals["self"]) if code in COPIES else 1
        return count if OURS in code.co_filename else None

    def count(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            found[frame.f_code] += 1
        return count

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(before)
    return found


def superlinear(work: Callable[[int], object], size: int) -> Iterator[str]:
    """Yield the functions whose work grows faster than linear from `size` to twice and four times
    that; and the sum of all.

    Linear is an increase that doubles (2.6 for one function, 2.1 for the sum: parts of
    logarithmic and of constant work vary); quadratic one that is four times as large. One function
    must grow by more than the size too: of few layers more may be tried.
    """
    work(size)  # what is computed once for a process
    one, two, four = (lines(lambda n=n: work(n)) for n in (size, 2 * size, 4 * size))
    for code, n in four.items():
        warm = one[code] and not code.co_filename.startswith("<")  # no caches that are filled
        more = n - two[code] > 2.6 * (two[code] - one[code]) + FEW and n > 2.1 * two[code]
        if warm and n > FEW and more:
            yield f"{code.co_filename}:{code.co_firstlineno} {code.co_name}: " + ", ".join(
                f"{c[code]:,}" for c in (one, two, four)
            )
    if four.total() - two.total() > 2.1 * (two.total() - one.total()):
        yield f"all: {one.total():,}, {two.total():,}, {four.total():,}"
