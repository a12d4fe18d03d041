"""Patterns: rewrites of a block that are applied until none of them applies.

@at_each(nn.NegOp)
def double_negation(op: nn.NegOp) -> bool: ...

apply_patterns([double_negation], block)
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from xdsl.ir import Block, Operation

from shardir.dialects.blocks import ops_of

OpT = TypeVar("OpT", bound=Operation)

Pattern = Callable[[Block], bool]
"""Rewrites a block where it applies, and returns whether it did."""


def at_each(kind: type[OpT]) -> Callable[[Callable[[OpT], bool]], Pattern]:
    """Return the decorator of a function of an op, which makes it the pattern that calls it with
    each op of a kind in a block, in order."""

    @cache
    def concerns(found: type[Operation]) -> bool:
        return issubclass(found, kind)

    def decorate(rewrite: Callable[[OpT], bool]) -> Pattern:
        def pattern(block: Block) -> bool:
            ops: list[Any] = [op for op in ops_of(block) if concerns(type(op))]
            return any([op.parent is block and rewrite(op) for op in ops])

        pattern.__name__, pattern.__doc__ = rewrite.__name__, rewrite.__doc__
        return pattern

    return decorate


def apply_patterns(patterns: Sequence[Pattern], block: Block) -> None:
    """Apply each pattern in turn, until none of them changes the block."""
    while any([pattern(block) for pattern in patterns]):
        pass
