"""The builder of imported functions: ops on small constants become constants, so that the counters
of loops and the indices made from them are known."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from xdsl.dialects.builtin import TensorType
from xdsl.ir import SSAValue

from shardir.build import FunctionBuilder, Value
from shardir.compat.xdsl import type_of
from shardir.dialects import nn
from shardir.dialects.nn.base import Array
from shardir.frontends.stablehlo.types import is_float
from shardir.interpret.evaluator import GlobalView
from shardir.interpret.values import round_to_element

MAX_FOLDED = 64
"""Bounds the elements of a constant that is computed at import."""


class FoldingBuilder(FunctionBuilder):
    """A function whose ops on small constants are constants. Equal ones, and equal ops on integers,
    are one: others may be computed twice on purpose (jax.checkpoint)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._ops: dict[Any, tuple[Value, ...]] = {}

    def op(self, kind: type[nn.TensorOp], operands: Sequence[Value], *args: Any, **options: Any):
        results = super().op(kind, operands, *args, **options)
        op = results[0].ssa.owner
        assert isinstance(op, nn.TensorOp)
        props = tuple(sorted(op.properties.items(), key=lambda p: p[0]))
        key = kind, tuple(op.operands), props, tuple(op.result_types)
        if (same := self._ops.get(key)) is not None:
            op.detach()
            op.erase()
            return same
        is_shared = all(not is_float(v.dtype) or prod(v.shape) == 1 for v in results)
        results = self._folded(op, operands, results)
        if is_shared and (operands or isinstance(op, nn.ConstantOp)):
            self._ops[key] = results
        return results

    def _folded(
        self, op: nn.TensorOp, operands: Sequence[Value], results: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        """Return constants for the results of an op on small constants."""
        sizes = [prod(v.shape) for v in (*operands, *results)]
        inputs = [x for v in operands if (x := known(v)) is not None]
        if not operands or len(inputs) < len(operands) or max(sizes) > MAX_FOLDED:
            return results
        with np.errstate(all="ignore"):
            out = op.evaluate(GlobalView(), *inputs)
        arrays = out if isinstance(out, tuple) else (out,)
        op.detach()
        op.erase()
        return tuple(
            self.constant(round_to_element(a, v.type.element_type), dtype=v.dtype)
            for a, v in zip(arrays, results, strict=True)
        )


def known(value: Value | SSAValue) -> Array | None:
    """Return the numbers of a constant, in the dtype of its elements; None for other values."""
    ssa = value.ssa if isinstance(value, Value) else value
    if not isinstance(ssa.owner, nn.ConstantOp):
        return None
    t = type_of(ssa)
    assert isinstance(t, TensorType)
    return round_to_element(nn.dense_values(ssa.owner.value), t.element_type)
