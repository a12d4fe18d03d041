"""The origin of values that are not finite."""

import linecache
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import Tensor

from ..compat import TorchDispatchMode, schema_of, tree_leaves
from ..plan.program import PlanFunction

CHECKED_STEPS = 16
"""The number of steps after which losses are read from a GPU and checked: one copy in place of 16,
each of which waits for the GPU."""


_SOURCE = re.compile(r"(?:^|\s)# (\S+:\d+)$")
"""The comment with the source line of a statement, on its first line or before it."""


class NotFiniteError(Exception):
    """A value of the program or its data that is not finite: an error for users."""


def not_finite(losses: Sequence[float], steps: int) -> tuple[int, float] | None:
    """Return the first loss that is not finite, with the number of its step; None if all are
    finite. `losses`: of the last of `steps` steps."""
    numbered = enumerate(losses, steps - len(losses) + 1)
    return next(((step, loss) for step, loss in numbered if not math.isfinite(loss)), None)


class Watch(TorchDispatchMode):
    """Checks the result of each op of torch: the first NaN is an error that names the op and its
    line. The check is slow.

    Infinite values, for instance of a mask, are allowed; the error also names the first op that
    makes one from finite operands. Views are not checked, nor memory that is written later: the
    result of `torch.empty`, and the memory into which a collective receives.

    Args:
        fails: whether the first NaN is an error; else it is only recorded.
    """

    def __init__(self, program: Path, rank: int, fails: bool = True):
        super().__init__()
        self.program, self.rank, self.step, self.fails = program, rank, 0, fails
        self.nan = self.infinite = ""
        """The first value of each kind on this rank: its step, rank and op."""
        self.infinite_step = math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func.namespace == "c10d" or "empty" in _name(func):
            return func(*args, **(kwargs or {}))
        given = tree_leaves((args, kwargs))
        in_place = schema_of(func).is_mutable
        # Before the op, which may overwrite its operands.
        from_finite = in_place and not self.infinite and _are_finite(given)
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if _is_float(x)]
        if not self.nan and any(bool(x.isnan().any()) for x in found):
            others = [x for x in given if _is_float(x) and not any(x is y for y in found)]
            role = "an operand" if any(bool(x.isnan().any()) for x in others) else "a result"
            self._found_nan(f"as {role} of {_name(func)}{self._place()}")
        is_first = not self.infinite and any(bool(x.isinf().any()) for x in found)
        if is_first and (from_finite if in_place else _are_finite(given)):
            self._found_infinite(f"as a result of {_name(func)}{self._place()}")
        return out

    def of_step(self, step: int) -> Self:
        """Return this watch, set to a step counted from 0."""
        self.step = step
        return self

    def look_at(self, function: PlanFunction, inputs: Sequence[Tensor]) -> None:
        """Check the inputs of a step.

        Raises:
            NotFiniteError: one has a NaN.
        """
        names = [arg.name for arg in function.args if arg.role == "input"]
        for name, x in zip(names, inputs, strict=True):
            if not _is_float(x):
                continue
            if not self.nan and bool(x.isnan().any()):
                self._found_nan(f"in the input {name}")
            if not self.infinite and bool(x.isinf().any()):
                self._found_infinite(f"in the input {name}")

    def _found_nan(self, where: str) -> None:
        before = f"\n  before that {self.infinite}" if self.infinite else ""
        self.nan = f"step {self.step + 1}, rank {self.rank}: nan first {where}{before}"
        if self.fails:
            raise NotFiniteError(self.nan)

    def _found_infinite(self, where: str) -> None:
        self.infinite = f"step {self.step + 1}, rank {self.rank}: infinite first {where}"
        self.infinite_step = self.step

    def _place(self) -> str:
        """Return the current line of the program, with its source line from the comments."""
        frame = sys._getframe(1)
        while frame is not None and Path(frame.f_code.co_filename).name != self.program.name:
            frame = frame.f_back
        return "" if frame is None else place_of(self.program, frame.f_lineno)


def place_of(program: Path, number: int) -> str:
    """Return a line of the program as text, with its source line from the comments, if its text is
    known: ` at program.py:40 (model.ir:9, backward)`."""
    lines = linecache.getlines(str(program))
    source = source_of(lines, number)
    before = reversed(lines[:number])
    parts = (line for line in before if line.startswith("def ") or "# ---- " in line)
    part = ", backward" if source and "---- backward ----" in next(parts, "") else ""
    source = f" ({source}{part})" if source else ""
    return f" at {program.name}:{number}{source}"


def source_of(lines: Sequence[str], number: int) -> str:
    """Return the source line of a line of the program: that of the last comment; "" for none."""
    comments = (_SOURCE.search(line.rstrip("\n")) for line in reversed(lines[:number]))
    return next((found[1] for found in comments if found), "")


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type != "meta"


def _are_finite(given: Sequence[Any]) -> bool:
    """Whether an op has a tensor as operand, and all its operands are finite."""
    numbers = all(math.isfinite(x) for x in given if isinstance(x, float))
    tensors = [x for x in given if _is_float(x)]
    return numbers and bool(tensors) and all(bool(x.isfinite().all()) for x in tensors)
