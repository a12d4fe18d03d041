"""Attention whose keys are split is decomposed: neither keys nor scores are gathered. The gradient
reads what the forward part makes."""

from typing import Any

import pytest
import torch
from support.harness import (
    MESH,
    Arg,
    collectives,
    compiled,
    laid_out,
    layout,
    names,
    parts,
    problem,
)

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime.ops import attention as ops_attention
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


def test_only_what_is_differentiated_has_the_sums_of_rows():
    """The text of a forward part calls torch; that of a step computes nothing twice."""

    def frozen(b, q, k, v):
        return [b.value(nn.AttentionOp, b.value(nn.AttentionOp, q, k, k), k, v)]

    p = problem([Arg("f32", (2, 4, 6, 4))] * 3, frozen, (2,))
    text = program_text(compiled(laid_out(p.module, MESH, [None] * 3)))
    forward, backward = text.split("def g(")
    assert "ops_attention" not in forward.split("def f(")[1]
    lines = [line.partition(" = ")[2].split("(")[0] for line in backward.splitlines()]
    assert [line for line in lines if "attention" in line] == [
        "F.scaled_dot_product_attention", "ops_attention.forward", "ops_attention.backward",
    ]  # fmt: skip


def test_without_a_kernel_the_gradient_is_that_of_the_formula() -> None:
    """k and v have other widths, there are several heads for one, and a query attends to no key."""
    draw = torch.Generator().manual_seed(7)
    q, k, v, dy = (
        torch.randn(n, generator=draw, dtype=torch.float64)
        for n in ((4, 5, 3), (2, 6, 3), (2, 6, 2), (4, 5, 2))
    )
    mask = torch.ones(5, 6).tril(-1) > 0
    out, lse = ops_attention.forward(q, k, v, attn_mask=mask, enable_gqa=True)
    found = ops_attention.backward(q, k, v, dy, out, lse, attn_mask=mask, enable_gqa=True)
    qs, ks, vs = (x.clone().requires_grad_() for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(
        qs, ks, vs, attn_mask=mask, enable_gqa=True
    )
    gradients = torch.autograd.grad(expected, (qs, ks, vs), dy)
    assert not out[:, 0].any() and not found[0][:, 0].any()
    for mine, theirs in zip((out, *found), (expected.detach(), *gradients), strict=True):
        torch.testing.assert_close(mine, theirs)

    low = mask.double().log().clamp(min=-1e30)  # the mean of all values
    out, _ = ops_attention.forward(q, k, v, attn_mask=low, enable_gqa=True)
    mean = v.mean(1).repeat_interleave(2, 0)
    torch.testing.assert_close(out[:, 0], mean)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 4, 6, 8), (2, 4, 6, 8), {}),
    "causal": ((2, 4, 6, 8), (2, 4, 6, 8), {"is_causal": True}),
    "grouped": ((2, 4, 6, 8), (2, 2, 6, 8), {"enable_gqa": True, "scale": 0.3}),
    "masked": ((2, 4, 6, 8), (2, 4, 6, 8), {"attn_mask": torch.eye(6).roll(1, 0).tril() > 0}),
    "biased": ((2, 4, 6, 8), (2, 4, 6, 8), {"attn_mask": torch.arange(36.0).view(6, 6) / 9}),
    "rank 3": ((4, 6, 8), (4, 6, 8), {"is_causal": True}),
    "rank 5": ((2, 2, 4, 6, 8), (2, 2, 4, 6, 8), {"attn_mask": torch.ones(2, 2, 1, 6, 6) > 0}),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_kernels_are_those_of_torchs_call(shape: str, dtype: torch.dtype) -> None:
    """Results and gradients have the bits of torch's own call on tensors of rank 4, and of its
    gradient; the sums of rows are those of the scores."""
    draw = torch.Generator().manual_seed(7)
    of_q, of_k, options = SHAPES[shape]
    q, k, v, dy = (
        torch.randn(n, generator=draw, dtype=torch.float64).to(dtype)
        for n in (of_q, of_k, of_k, of_q)
    )
    if (mask := options.get("attn_mask")) is not None and mask.dtype != torch.bool:
        options = options | {"attn_mask": mask.to(dtype)}
    out, lse = ops_attention.forward(q, k, v, **options)
    found = ops_attention.backward(q, k, v, dy, out, lse, **options)
    as_four = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v, dy)]
    qs, ks, vs = (x.clone().requires_grad_() for x in as_four[:3])
    given = {n: x.reshape(-1, 1, 6, 6) if n == "attn_mask" else x for n, x in options.items()}
    expected = torch.nn.functional.scaled_dot_product_attention(qs, ks, vs, **given)
    gradients = torch.autograd.grad(expected, (qs, ks, vs), as_four[3])
    for mine, theirs in zip((out, *found), (expected.detach(), *gradients), strict=True):
        assert torch.equal(mine, theirs.view(mine.shape))
    keys = k.double().repeat_interleave(of_q[-3] // of_k[-3], -3)
    scores = q.double() @ keys.mT * options.get("scale", 8**-0.5)
    if options.get("is_causal"):
        mask = torch.ones(6, 6).tril() > 0
    if mask is not None:
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    sums = scores.logsumexp(-1)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(
        lse.double(), sums.masked_fill(sums.isneginf(), 0.0), atol=1e-2, rtol=1e-2
    )
