"""The activations that policies keep, and the blocks of a step.

full   the inputs of each of the equal blocks are kept, and what is made before them for several
dots   the results of products are kept: of matmul, einsum, attention and convolution
"""

import numpy as np
from xdsl.ir import Operation

from shardir.analysis.repeats import equal_blocks
from shardir.dialects.nn.base import TensorOp
from shardir.search.recompute.activations import SavedActivation
from shardir.search.recompute.repetitions import Simulator

FEWEST_BLOCKS, FEWEST_SAVED = 2, 4
"""The fewest equal blocks that are blocks of a model, and the fewest ops in all but one of them."""


def is_product(op: Operation) -> bool:
    """Whether an op is one of those that mixed precision computes in the narrow type."""
    return isinstance(op, TensorOp) and op.PRECISION == "narrow"


class StepBlocks:
    """The equal blocks of the forward part, and the choices in them."""

    def __init__(self, simulator: Simulator):
        self.simulator, self.activations = simulator, simulator.activations
        activations = self.activations
        forward = activations.ops[: activations.start]
        self.found = [b.blocks for b in equal_blocks(forward, FEWEST_BLOCKS, FEWEST_SAVED)]

    def full(self, together: int = 1) -> frozenset[int]:
        """Return the groups that are repeated if only the inputs of blocks are kept, or of so many
        blocks together, and what is read in several."""
        at, forward = self.activations.live.at, self.activations.start
        begins = np.zeros(forward + 1, np.int64)
        for blocks in self.found:
            begins[[at[block[0]] for block in blocks[::together]]] = 1
            begins[at[blocks[-1][-1]] + 1] = 1
        of = np.cumsum(begins)
        groups = self.activations.groups

        def is_within(a: SavedActivation) -> bool:
            """Whether all that is made of it for the backward part is made in its segment."""
            readers = [i for m, i in a.readers.items() if groups[m].needed and groups[m].repeatable]
            return all(of[a.made] == of[i] for i in readers)

        return frozenset(
            n for n, g in enumerate(groups)
            if g.needed and g.repeatable and all(map(is_within, g.activations))
        )  # fmt: skip

    def groups(self) -> list[list[frozenset[int]]]:
        """Return the choices of each block, of equal blocks in which they correspond."""
        groups, of = self.activations.groups, dict[Operation, list[int]]()
        for choice in self.simulator.choices:
            offload = self.simulator.offloads.get(choice)
            group = choice if offload is None else offload.group
            for op in () if group is None else groups[group].ops:
                of.setdefault(op, []).append(choice)
        found = [
            [frozenset(n for op in block for n in of.get(op, ())) for block in blocks]
            for blocks in self.found
        ]
        return [blocks for blocks in found if len({len(b) for b in blocks}) == 1]
