"""Patterns: rewrites of a block that are applied until none of them applies.

@at_each_op
def double_negation(op: Operation) -> bool: ...

apply_patterns([double_negation], block)
"""

from collections.abc import Callable, Sequence

from xdsl.ir import Block, Operation

Pattern = Callable[[Block], bool]
"""Rewrites a block where it applies, and returns whether it did."""


def at_each_op(rewrite: Callable[[Operation], bool]) -> Pattern:
    """Return the pattern that calls `rewrite` with each op of a block, in order."""

    def pattern(block: Block) -> bool:
        return any([op.parent is block and rewrite(op) for op in list(block.ops)])

    pattern.__name__, pattern.__doc__ = rewrite.__name__, rewrite.__doc__
    return pattern


def apply_patterns(patterns: Sequence[Pattern], block: Block) -> None:
    """Apply each pattern in turn, until none of them changes the block."""
    while any([pattern(block) for pattern in patterns]):
        pass
