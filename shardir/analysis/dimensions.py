"""Classes of dimensions that ops connect: splitting one dimension splits its whole class.

    %h = nn.matmul %x, %w1 : (8x4, 4x6) -> 8x6      one class: rows of %x, %h and %y; another:
    %y = nn.relu %h                                 columns of %w1, %h and %y; a third: columns of
                                                    %x and rows of %w1

Dimensions are connected if an op has one factor in both; of several factors the major one counts.
"""

from collections.abc import Iterable

from xdsl.ir import SSAValue

from shardir.dialects.nn.base import TensorOp
from shardir.dialects.nn.types import unsharded_type

Dimension = tuple[SSAValue, int]
"""A dimension of a value; also the representative of a class."""


class DimensionClasses:
    """The classes of the dimensions of ops' operands and results. `factors`: the factors of each
    op."""

    def __init__(self, ops: Iterable[TensorOp]):
        self._above: dict[Dimension, Dimension] = {}
        self._first: dict[TensorOp, dict[str, Dimension]] = {}
        self.factors = {op: op.factors() for op in ops}
        for op, factors in self.factors.items():
            first = self._first[op] = dict[str, Dimension]()
            for v, dims in zip(
                (*op.operands, *op.results), (*factors.operands, *factors.results), strict=True
            ):
                for d, dim in enumerate(dims):
                    major = next((f for f in dim if factors.size(f) > 1), None)
                    if major is not None:
                        self._join(first.setdefault(major, (v, d)), (v, d))

    def _join(self, a: Dimension, b: Dimension) -> None:
        a, b = self.of(a), self.of(b)
        if a != b:
            self._above[b] = a

    def join_values(self, a: SSAValue, b: SSAValue) -> None:
        """Connect the dimensions of two values of one shape."""
        for d in range(len(unsharded_type(a).get_shape())):
            self._join((a, d), (b, d))

    def of(self, dimension: Dimension) -> Dimension:
        """Return the class of a dimension."""
        above = self._above
        root = dimension
        while root in above:
            root = above[root]
        while dimension != root:
            above[dimension], dimension = root, above[dimension]
        return root

    def of_factors(self, op: TensorOp) -> dict[str, Dimension]:
        """Return the classes of an op's factors."""
        return {f: self.of(dimension) for f, dimension in self._first[op].items()}
