"""Attention."""

from xdsl.ir import Operation

from shardir.backend.torch.emit.literals import float_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_of


def _options(s: EmissionScope, op: nn.AttentionOp | nn.AttentionGradOp) -> list[str]:
    """The optional arguments of torch's call, which supports causal attention for whole sequences
    without a mask only."""
    masks = [s.operand(op.mask)] if op.mask is not None else []
    out = []
    rows = len(s.shape_of(op.q)) - 2
    if op.causal is not None and (masks or s.parts(op.q, rows) > 1):
        s.use("ops_attention")
        arguments = [s.operand(op.q), s.operand(op.k), s.start(op.q, rows), *masks]
        out.append(f"attn_mask=ops_attention.causal({', '.join(arguments)})")
    elif op.causal is not None:
        out.append("is_causal=True")
    elif masks:
        out.append(f"attn_mask={masks[0]}")
    if op.scale is not None:
        out.append(f"scale={float_text(float_of(op, 'scale'))}")
    q, k = s.global_shape(op.q), s.global_shape(op.k)
    if len(q) > 2 and q[-3] != k[-3]:
        out.append("enable_gqa=True")
    return out


def _attention(s: EmissionScope, op: nn.AttentionOp) -> Text:
    s.use("ops_attention" if op.logsumexp is not None else "F")
    call = "F.scaled_dot_product_attention" if op.logsumexp is None else "ops_attention.forward"
    operands = [s.operand(v) for v in (op.q, op.k, op.v)]
    return f"{call}({', '.join([*operands, *_options(s, op)])})"


def _attention_grad(s: EmissionScope, op: nn.AttentionGradOp) -> Text:
    s.use("ops_attention")
    operands = [s.operand(v) for v in (op.q, op.k, op.v, op.dy, op.out, op.lse)]
    return f"ops_attention.backward({', '.join([*operands, *_options(s, op)])})"


TORCH: dict[type[Operation], Entry] = {
    nn.AttentionOp: _attention,
    nn.AttentionGradOp: _attention_grad,
}
