"""Values that are not finite: where they come from.

A part of the runtime; needs only torch.
"""

import math
import sys
from pathlib import Path
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CHECKED_STEPS = 16
"""The number of steps after which losses are read from a GPU, and checked."""


class NotFiniteError(Exception):
    """A value that is not finite, of the program or its data: an error for users."""


def check_losses(losses: list[float], function: str, steps: int, infinite: str = "") -> None:
    """Check the losses of the last of so many steps.

    Args:
        infinite: the first op with an infinite result, if it was looked for.

    Raises:
        NotFiniteError: a loss is not finite.
    """
    for step, loss in enumerate(losses, steps - len(losses) + 1):
        if not math.isfinite(loss):
            hint = "--detect-anomaly to find the first such value, or --allow-nan"
            if infinite:
                hint = f"or --allow-nan; infinite first: {infinite}"
            raise NotFiniteError(
                f"{function}: expected a finite loss, got {loss:g} in step {step}; use a lower "
                f"learning rate, {hint}"
            )


class Watch(TorchDispatchMode):
    """Checks the result of each op of torch: the first NaN is an error, which names the op and its
    line. It is slow.

    Infinite values, such as those of a mask, are allowed; where one comes from finite operands, the
    error names that op too.
    """

    def __init__(self, program: Path, rank: int):
        super().__init__()
        self.program, self.rank, self.step = program, rank, 0
        self.infinite = ""
        """The first op with an infinite result of finite operands."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [x for x in tree_leaves(out) if _is_float(x)]
        if any(bool(x.isnan().any()) for x in found):
            self.fail(f"nan first as a result of {_name(func)}{self.place()}")
        if not self.infinite and any(bool(x.isinf().any()) for x in found):
            given = [x for x in tree_leaves((args, kwargs)) if _is_float(x)]
            if given and all(bool(x.isfinite().all()) for x in given):
                self.infinite = f"{_name(func)}{self.place()}"
        return out

    def of_step(self, step: int) -> Self:
        """Return this, for a step that is counted from 0."""
        self.step = step
        return self

    def fail(self, what: str) -> None:
        before = f"; infinite before that: {self.infinite}" if self.infinite else ""
        raise NotFiniteError(f"step {self.step + 1}, rank {self.rank}: {what}{before}")

    def place(self) -> str:
        """The line of the program that runs now, and the comment with its line of the source."""
        frame = sys._getframe(1)
        while frame is not None and Path(frame.f_code.co_filename).name != self.program.name:
            frame = frame.f_back
        if frame is None:
            return ""
        lines = self.program.read_text(encoding="utf-8").splitlines()[: frame.f_lineno]
        comments = (line.strip()[2:] for line in reversed(lines) if line.strip().startswith("# "))
        source = next((text for text in comments if ":" in text and " " not in text), "")
        return f" at {self.program.name}:{frame.f_lineno}" + (f" ({source})" if source else "")


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func))


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.device.type != "meta"
