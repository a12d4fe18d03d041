"""The ops of the dialect nn as Python functions: `nn.matmul(x, w)`.

    from shardir.build import nn

    h = nn.gelu(x @ w + b)
    y = nn.layer_norm(h, scale, shift, eps=1e-5)
    parts = nn.split(y, sizes=(4, 4), axis=1)

Operands are positional, in the order of the op's syntax (docs/reference/language.md); properties are keywords.
An op that does not infer its result type takes `shape` and `dtype`, which default to those of the
first operand.
"""

from collections.abc import Callable, Sequence
from typing import Any

from xdsl.irdl import OperandDef, VarOperandDef

from shardir.build.attributes import properties
from shardir.build.values import Real, OpScope, Value
from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.nn import FAMILIES, TensorOp

KINDS: dict[str, type[TensorOp]] = {
    op.name.removeprefix("nn."): op for ops in FAMILIES.values() for op in ops
}
"""The ops by name, without the dialect. A trailing _ avoids Python's keywords: `and_`."""


class Ops:
    """The functions that create ops. Ops without operands need the `function` to add them to."""

    def __init__(self, function: OpScope | None = None):
        self._function = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        kind = KINDS.get(name.removesuffix("_"))
        if kind is None:
            raise AttributeError(f"expected an op of nn, got {name!r}{did_you_mean(name, KINDS)}")

        def create(
            *operands: Value | Real,
            shape: Sequence[int] | None = None,
            dtype: str | None = None,
            results: Sequence[tuple[Sequence[int], str]] | None = None,
            **options: Any,
        ) -> Any:
            like = next((v for v in operands if isinstance(v, Value)), None)
            function = self._function if like is None else like.function
            if function is None:
                raise ShardirError(
                    f"expected a value among the operands of {kind.name}, got none; use "
                    f"function.nn.{name} for an op of a function"
                )
            values = [] if like is None else [function.value(v, like) for v in operands]
            _check_count(kind, len(values))
            op_results = function.op(
                kind, values, properties(kind, options), shape=shape, dtype=dtype, results=results
            )
            return op_results[0] if len(op_results) == 1 else op_results

        create.__name__, create.__doc__ = name, kind.__doc__
        return create

    def __dir__(self) -> list[str]:
        return sorted(KINDS)


nn = Ops()


def _check_count(kind: type[TensorOp], n: int) -> None:
    """Raise ShardirError unless an op may have `n` operands."""
    defs = kind.get_irdl_definition().operands
    minimum = sum(type(d) is OperandDef for _, d in defs)
    any_number = any(type(d) is VarOperandDef for _, d in defs)
    if n < minimum or (n > len(defs) and not any_number):
        names = ", ".join(name for name, _ in defs)
        raise ShardirError(f"expected the operands {names or '(none)'} of {kind.name}, got {n}")
