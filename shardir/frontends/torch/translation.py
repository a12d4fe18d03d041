"""The node that an entry of the table of ATen ops translates, and its result."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from shardir.build import FunctionBuilder, Value
from shardir.build.values import Real
from shardir.frontends.torch.dtypes import dtype_name

AtenEntry = Callable[..., Any]
Inverse = Callable[..., Value]


class Translation:
    """The translation of one node."""

    def __init__(
        self,
        function: FunctionBuilder,
        node: Node,
        random: Callable[[], tuple[Value, int]],
        assign: Callable[[Node, Value], None],
    ):
        self.function, self.node, self.nn = function, node, function.nn
        self.random = random
        """Returns the key of random numbers, and a stream of its own for each call."""
        self._assign = assign

    # ---- the result ----

    @property
    def result(self) -> Any:
        """The node's result, or the first of several, as torch's fake tensor."""
        found = self.node.meta["val"]
        return found[0] if isinstance(found, tuple | list) else found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.result.shape)

    @property
    def dtype(self) -> str:
        return dtype_name(self.result.dtype)

    def of(self, at: int) -> "Translation":
        """The translation of a node whose result is like an argument of this one."""
        node = self.node.args[at]
        assert isinstance(node, Node)
        return Translation(self.function, node, self.random, self._assign)

    # ---- operands ----

    def argument(self, at: int) -> Any:
        """The fake tensor, or the number, of an argument."""
        given = self.node.args[at]
        return given.meta["val"] if isinstance(given, Node) else given

    def assign(self, at: int, value: Value) -> None:
        """Write a value in place of an argument, which the op changes though its schema does not
        say so."""
        given = self.node.args[at]
        assert isinstance(given, Node)
        self._assign(given, value)

    def value(self, x: Value | Real, dtype: str | None = None) -> Value:
        """Return a value, or a number as a constant, in a dtype: that of the result by default."""
        dtype = dtype or self.dtype
        return x.to(dtype) if isinstance(x, Value) else self.function.constant(x, dtype=dtype)

    def binary(self, op: AtenEntry, x: Value | Real, y: Value | Real) -> Value:
        """The op of two operands in the result's dtype."""
        return op(self.value(x), self.value(y))

    def promoted(self, x: Value | Real, y: Value | Real) -> tuple[Value, Value]:
        """Two operands in the dtype to which torch promotes them."""
        dtype = dtype_name(torch.result_type(self.argument(0), self.argument(1)))
        return self.value(x, dtype), self.value(y, dtype)

    def full(self, number: Real, shape: Sequence[int] | None = None) -> Value:
        """The number everywhere, in the result's dtype, and its shape by default."""
        return self.value(number).broadcast_to(*(self.shape if shape is None else shape))

    def iota(self, shape: Sequence[int], dim: int = 0, dtype: str = "i64") -> Value:
        """The indices along a dimension."""
        return self.nn.iota(dim=dim, shape=shape, dtype=dtype)
