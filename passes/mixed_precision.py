"""mixed-precision: casts, so that products are computed and communicated in a narrow type.

    %y = nn.matmul %x, %w : (tensor<8x4xf32>, tensor<4x6xf32>) -> tensor<8x6xf32>
 -> %x_1 = nn.convert %x : (tensor<8x4xf32>) -> tensor<8x4xbf16>
    %w_1 = nn.convert %w : (tensor<4x6xf32>) -> tensor<4x6xbf16>
    %y   = nn.matmul %x_1, %w_1 : (tensor<8x4xbf16>, tensor<4x6xbf16>) -> tensor<8x6xbf16>

1. f32 operands of an op with `PRECISION = "narrow"` (products) become `compute`; narrow operands of
   an op with "wide" (exponentials, sums, norms, losses) become f32; an op without precision is
   computed in the widest type of its operands. These are the lists of torch.autocast.
2. Arguments and results keep their types: parameters, their gradients and the optimizer are f32.
3. A value is converted once to a type; scalar constants never widen the remaining operands.
4. A converted value is communicated in the type in which its users compute. A cotangent is reduced
   in the narrow type, before it is widened; with `reduce = f32` it is widened first.
5. It runs before differentiation, so that gradients have these types too. Only f32 operands of
   functions in the global view change; a function whose products are all in f64 gets a warning.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

from xdsl.dialects.builtin import (
    AnyFloat,
    TensorType,
    UnitAttr,
    bf16,
    f16,
    f32,
    f64,
)
from xdsl.dialects.func import ReturnOp
from xdsl.ir import Attribute, Block, Operation, SSAValue

from shardir.compat.xdsl import set_type
from shardir.diagnostics import Located
from shardir.dialects import nn
from shardir.dialects.blocks import ops_of
from shardir.dialects.dist import SAME_VALUE
from shardir.dialects.nn.base import TensorOp
from shardir.dialects.train import BackwardOp
from shardir.rewriting.bases import Function, GlobalPass
from shardir.rewriting.rewriter import Rewriter
from shardir.syntax.source import warn

TYPES: dict[str, Attribute] = {"bf16": bf16, "f16": f16, "f32": f32}


@dataclass(frozen=True)
class MixedPrecision(GlobalPass):
    """Computes products in a narrow type, and the rest in f32."""

    name = "mixed-precision"
    ONE_DEVICE: ClassVar[bool] = True
    compute: Literal["bf16", "f16"] = "bf16"
    """The type of products and of their communicated operands."""
    reduce: Literal["narrow", "f32"] = "narrow"
    """The type in which gradients of converted values are summed over devices."""

    def check(self, f: Function) -> Iterable[Located]:
        backward = next((op for op in f.block.ops if isinstance(op, BackwardOp)), None)
        if backward is not None:
            message = f"expected @{f.name} before differentiation, got its backward part"
            yield backward, f"{message}; run mixed-precision before distributed-autodiff"

    def rewrite(self, f: Function) -> None:
        wide = next((op for op in f.block.ops if _is_wide_product(op)), None)
        casts = _Casts(f.block, TYPES[self.compute], self.reduce == "f32")
        casts.run()
        if wide is not None and not casts.converted:
            warn(
                wide, f"expected products of f32 in @{f.name}, got f64: mixed-precision leaves "
                "them in f64; write the program in f32 (of a module: model.float())",
            )  # fmt: skip


def _is_wide_product(op: Operation) -> bool:
    """Whether an op is a product of f64, which would be narrow with f32 operands."""
    narrow = isinstance(op, TensorOp) and op.PRECISION == "narrow"
    return narrow and any(_element(v) == f64 for v in op.operands)


class _Casts:
    """The casts of one function."""

    def __init__(self, block: Block, narrow: Attribute, reduce_wide: bool):
        self.block, self.narrow, self.reduce_wide = block, narrow, reduce_wide
        self.rewriter = Rewriter()
        self.converted: dict[tuple[SSAValue, Attribute], SSAValue] = {}

    def run(self) -> None:
        last = self.block.last_op
        results = [v.type for v in last.operands] if isinstance(last, ReturnOp) else []
        for op in ops_of(self.block):
            if isinstance(op, SAME_VALUE):
                _set_element(op.out, _element(op.value))
            elif isinstance(op, TensorOp) and not isinstance(op, nn.ConvertOp) and op.operands:
                self.retype(op)
        if isinstance(last, ReturnOp):
            for i, type in enumerate(results):
                if isinstance(type, TensorType):
                    last.operands[i] = self.as_type(last.operands[i], type.element_type, last)

    def retype(self, op: TensorOp) -> None:
        """Set the type in which an op is computed."""
        floats = [i for i, v in enumerate(op.operands) if _element(v) in (f32, self.narrow)]
        if not floats:
            return
        if isinstance(op, nn.WhileOp):  # its regions stay as they are
            for i in floats:
                element = _element(op.body.block.args[i])
                assert element is not None
                op.operands[i] = self.as_type(op.operands[i], element, op)
            return
        target = {"narrow": self.narrow, "wide": f32}.get(op.PRECISION)
        if target is None:
            strong = [_element(v) for i in floats if not _is_scalar(v := op.operands[i])]
            target = self.narrow if self.narrow in strong and f32 not in strong else f32
        statistics = [getattr(op, name) for name in op.STATISTICS]
        for i in floats:
            v = op.operands[i]
            op.operands[i] = self.as_type(v, f32 if v in statistics else target, op)
        for v in op.results:
            if _element(v) in (f32, self.narrow) and v not in statistics:
                _set_element(v, target)

    def as_type(self, v: SSAValue, element: Attribute, before: Operation) -> SSAValue:
        """Return the value in another type, converted before its first use in that type."""
        if _element(v) == element or not isinstance(_element(v), AnyFloat):
            return v
        key = v, element
        if key not in self.converted:
            t = v.type
            assert isinstance(t, TensorType)
            type = TensorType(element, t.get_shape(), t.encoding)
            partial = {"partial": UnitAttr()} if self.reduce_wide else {}
            new = self.rewriter.before(before).create(nn.ConvertOp, [v], [type], partial, names=[v])
            self.converted[key] = new.out
        return self.converted[key]


def _is_scalar(v: SSAValue) -> bool:
    """Whether a value is a broadcast scalar constant, which gets the type of the remaining
    operands."""
    while isinstance(v.owner, nn.BroadcastOp):
        v = v.owner.x
    return isinstance(v.owner, nn.ConstantOp) and v.owner.value.is_splat()


def _set_element(v: SSAValue, element: Attribute | None) -> None:
    assert isinstance(v.type, TensorType) and element is not None
    set_type(v, TensorType(element, v.type.get_shape(), v.type.encoding))


def _element(v: SSAValue) -> Attribute | None:
    return v.type.element_type if isinstance(v.type, TensorType) else None
