"""Contractions."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.biases import bias_addition, weight_is_transposed
from shardir.backend.torch.emit.einsum import added, contraction
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn


def _contraction(s: EmissionScope, op: nn.Contraction) -> Text:
    if (add := bias_addition(op)) is not None:
        s.use("F")
        x, w, bias = map(s.operand, (op.lhs, op.rhs, add.rhs))
        return f"F.linear({x}, {w}{'' if weight_is_transposed(op) else '.mT'}, {bias})"
    x, y, z = op.letters
    sizes = {c: s.size(op.out, d) for d, c in enumerate(z)}
    made = s.operand(op.lhs), s.operand(op.rhs)
    if (total := s.sums.get(op.out)) is not None:
        return s.add(total, added((x, y, z), made))
    return contraction((x, y, z), made, sizes)


TORCH: dict[type[Operation], Entry] = {
    nn.EinsumOp: _contraction,
    nn.MatmulOp: _contraction,
}
