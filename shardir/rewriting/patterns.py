"""Patterns: rewrites of a block that are applied until none of them applies.

@at_each(nn.NegOp)
def double_negation(op: nn.NegOp) -> bool: ...

apply_patterns([double_negation], block)
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

from xdsl.ir import Block, Operation

from shardir.dialects.blocks import of_kind, ops_of

OpT = TypeVar("OpT", bound=Operation)

Pattern = Callable[[Sequence[Operation]], bool]
"""Rewrites a block, given its ops in order; returns whether it changed the block."""


def at_each(kind: type[OpT]) -> Callable[[Callable[[OpT], bool]], Pattern]:
    """Return a decorator that turns a function of an op into a pattern: it calls the function on
    each op of a kind in a block, in order."""

    def decorate(rewrite: Callable[[OpT], bool]) -> Pattern:
        def pattern(ops: Sequence[Operation]) -> bool:
            matching = of_kind(ops, kind)
            return any([op.parent is not None and rewrite(op) for op in matching])

        pattern.__name__, pattern.__doc__ = rewrite.__name__, rewrite.__doc__
        return pattern

    return decorate


def apply_patterns(patterns: Sequence[Pattern], block: Block) -> None:
    """Apply the patterns in turn, until the block does not change."""
    changed = True
    while changed:
        changed, ops = False, ops_of(block)
        for pattern in patterns:
            if pattern(ops):
                changed, ops = True, ops_of(block)
