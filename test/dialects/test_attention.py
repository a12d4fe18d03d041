"""Attention whose keys are split is decomposed: neither keys nor scores are gathered."""

import pytest
from harness import MESH, Arg, collectives, compiled, laid_out, layout, names, parts, problem

from shardir.backend.torch.emit.program import program_text
from shardir.dialects import nn


def attention(**props):
    return lambda b, *x: b.op(nn.AttentionOp, *x, props=props).results


@pytest.mark.parametrize("keys", ["[{a}, {b}, {}]", "[{}, {a, b}, {}]"])
@pytest.mark.parametrize("props", [{}, {"causal": nn.UNIT}], ids=["all", "causal"])
def test_split_keys(keys, props):
    p = problem([Arg("f64", (2, 5, 3))] * 3, attention(**props), (0, 1, 2))
    q = keys.replace("{b}", "{}").replace("{a, b}", "{}")
    given = [layout(q), layout(keys), layout(keys)]
    module = compiled(laid_out(p.module, MESH, given))
    assert not p.errors(module)
    forward, backward = parts(module, "g")
    assert not {"nn.attention", "nn.attention_grad"} & {*names(forward), *names(backward)}
    # The maximum and the sum; the rest is of the result's size, and dq's.
    assert collectives(forward) == {"all_reduce": 2}
    assert collectives(backward) == {"all_reduce": 2}


def test_the_text_is_torchs_own_call():
    def text(q: str) -> str:
        p = problem([Arg("f32", (2, 4, 6, 4))] * 3, attention(causal=nn.UNIT))
        return program_text(compiled(laid_out(p.module, MESH, [layout(q), None, None])))

    assert "F.scaled_dot_product_attention(x0, x1, x2, is_causal=True)" in text(
        "[{a}, {b}, {}, {}]"
    )
    assert "attn_mask=ops_attention.causal(x0, x1, mesh.index" in text("[{a}, {}, {b}, {}]")
