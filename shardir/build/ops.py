"""The ops of the dialect nn as Python functions: `nn.matmul(x, w)`.

    from shardir.build import nn

    h = nn.gelu(x @ w + b)
    y = nn.layer_norm(h, scale, shift, eps=1e-5)
    parts = nn.split(y, sizes=(4, 4), axis=1)

Operands are positional, in the order of the op's syntax (docs/reference/language.md); properties are keywords.
An op that does not infer its result type takes `shape` and `dtype`, which default to those of the
first operand.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xdsl.irdl import OperandDef, VarOperandDef

from shardir.build.attributes import properties
from shardir.build.values import Real, OpScope, Value
from shardir.diagnostics import ShardirError, did_you_mean
from shardir.dialects.installed import installed
from shardir.dialects.nn import FAMILIES, TensorOp, WhileOp

KINDS: dict[str, type[TensorOp]] = {
    op.name.removeprefix("nn."): op
    for ops in FAMILIES.values() for op in ops if op is not WhileOp
}  # fmt: skip
"""The ops by name, without the dialect. A trailing _ avoids Python's keywords: `and_`. Loops have
regions: `FunctionBuilder.while_loop`."""


class Ops:
    """The functions that create the ops of a dialect. Ops without operands need the `function` to
    add them to."""

    def __init__(
        self, function: OpScope | None = None, dialect: str = "nn",
        kinds: Mapping[str, type[TensorOp]] = KINDS,
    ):  # fmt: skip
        self._function, self._dialect, self._kinds = function, dialect, kinds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        dialect, kind = self._dialect, self._kinds.get(name.removesuffix("_"))
        if kind is None:
            hint = did_you_mean(name, self._kinds)
            raise AttributeError(f"expected an op of {dialect}, got {name!r}{hint}")

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
                    f"function.{dialect}.{name} for an op of a function"
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
        return sorted(self._kinds)


nn = Ops()


def ops_of(dialect: str, function: OpScope | None = None) -> Ops:
    """Return the functions that create the ops of the dialect of an installed package.

    Raises:
        AttributeError: there is no such dialect.
    """
    if dialect not in installed().names("dialects"):
        raise AttributeError(f"expected nn or the dialect of an extension, got {dialect!r}")
    made = installed().tables["dialects"][dialect]()
    kinds = {
        op.name.removeprefix(f"{dialect}."): op
        for op in made.operations if issubclass(op, TensorOp)
    }  # fmt: skip
    return Ops(function, dialect, kinds)


def _check_count(kind: type[TensorOp], n: int) -> None:
    """Raise ShardirError unless an op may have `n` operands."""
    defs = kind.get_irdl_definition().operands
    minimum = sum(type(d) is OperandDef for _, d in defs)
    any_number = any(type(d) is VarOperandDef for _, d in defs)
    if n < minimum or (n > len(defs) and not any_number):
        names = ", ".join(name for name, _ in defs)
        raise ShardirError(f"expected the operands {names or '(none)'} of {kind.name}, got {n}")
