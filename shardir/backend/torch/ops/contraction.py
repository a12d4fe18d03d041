"""Contractions."""

from math import prod

from xdsl.dialects.builtin import f32
from xdsl.ir import Operation

from shardir.backend.torch.emit.biases import bias_addition, weight_is_transposed
from shardir.backend.torch.emit.einsum import addition_call, contraction
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn

LARGE_FLOPS, LARGE_ROWS = 1 << 25, 16
"""The minimum size for a product of rows and a weight to use ops_products, whose kernel takes
longer to call and is no faster for a few rows."""


def _contraction(s: EmissionScope, op: nn.Contraction) -> Text:
    total, transposed = s.sums.get(op.out), weight_is_transposed(op)
    add = bias_addition(op)
    is_large = total is None and transposed is not None and _is_large(s, op)
    if add is not None or is_large:
        module = "ops_products" if is_large else "F"
        s.use(module)
        operands = [s.operand(op.lhs), s.operand(op.rhs) + ("" if transposed else ".mT")]
        operands += [s.operand(add.rhs)] if add is not None else []
        return f"{module}.linear({', '.join(operands)})"
    x, y, z = op.letters
    sizes = {c: s.size(op.out, d) for d, c in enumerate(z)}
    factors = s.operand(op.lhs), s.operand(op.rhs)
    if total is not None:
        return s.add(total, addition_call((x, y, z), factors))
    return contraction((x, y, z), factors, sizes)


def _is_large(s: EmissionScope, op: nn.Contraction) -> bool:
    """Whether a product of rows and a weight in f32 is large."""
    *rows, summed = s.shape_of(op.lhs)
    flops = 2 * prod(rows) * summed * s.shape_of(op.out)[-1]
    types = {s.type(v).element_type for v in (op.lhs, op.rhs)}
    return types == {f32} and prod(rows) >= LARGE_ROWS and flops >= LARGE_FLOPS


TORCH: dict[type[Operation], Entry] = {
    nn.EinsumOp: _contraction,
    nn.MatmulOp: _contraction,
}
