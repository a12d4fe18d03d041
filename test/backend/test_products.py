"""Large products of rows and a weight: which are those of ops_products, and what these compute by
the kernel of each kind of processor."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from support.extent import extent

from shardir.backend.torch.emit.program import program_text
from shardir.backend.torch.shardir_runtime.ops import products
from shardir.syntax.parser import parse

TEXT = """
func.func @f(%x: tensor<{x}>, %w: tensor<{w}>, %b: tensor<{b}>) -> tensor<{y}> {{
  %y = nn.{op} %x, %w : (tensor<{x}>, tensor<{w}>) -> tensor<{y}>
  {end}
}}
"""
ROWS, COLUMNS = 'einsum "bij,kj->bik"', "matmul"
BIAS = """%z = nn.add %y, %b : (tensor<{y}>, tensor<{b}>) -> tensor<{y}>
  func.return %z : tensor<{y}>"""


def text_of(op: str, x: str, w: str, y: str, bias: bool = False, t: str = "f32") -> str:
    given = {"x": f"{x}x{t}", "w": f"{w}x{t}", "y": f"{y}x{t}", "b": f"{y.rpartition('x')[2]}x{t}"}
    end = (BIAS if bias else "func.return %y : tensor<{y}>").format(**given)
    return TEXT.format(op=op, end=end, **given)


FORMS = {
    "ops_products.linear(x, w, b)": text_of(ROWS, "2x64x512", "256x512", "2x64x256", bias=True),
    "ops_products.linear(x, w)": text_of(ROWS, "2x64x512", "256x512", "2x64x256"),
    "ops_products.linear(x, w.mT, b)": text_of(COLUMNS, "128x512", "512x256", "128x256", bias=True),
    "ops_products.linear(x, w.mT)": text_of(COLUMNS, "128x512", "512x256", "128x256"),
    "F.linear(x, w.mT, b)": text_of(COLUMNS, "127x512", "512x256", "127x256", bias=True),
    "x @ w": text_of(COLUMNS, "15x4096", "4096x4096", "15x4096"),
    "x @ w # f64": text_of(COLUMNS, "128x512", "512x256", "128x256", t="f64"),
    "x @ w # bf16": text_of(COLUMNS, "128x512", "512x256", "128x256", t="bf16"),
    "x.mT @ w": text_of('einsum "ij,ik->jk"', "128x512", "128x256", "512x256"),
    "x @ w # of batches": text_of(COLUMNS, "8x128x128", "8x128x128", "8x128x128"),
}
"""By the call, products of 2^25 operations, of fewer, of few rows, of other types, and others."""


@pytest.mark.parametrize("call", FORMS)
def test_a_large_product_of_rows_and_a_weight_in_f32_chooses_its_kernel(call: str) -> None:
    assert f" = {call.partition(' #')[0]}  # " in program_text(parse(FORMS[call], "p.ir"))


def views(rows: int, columns: int) -> list[torch.Tensor]:
    """Matrices with all kinds of strides: parts of larger ones, transposed, with equal rows or
    columns, and with rows that overlap."""
    own, wide = torch.randn(rows, columns), torch.randn(2 * rows + 1, 2 * columns + 1)
    overlapping = torch.randn(rows + columns).as_strided((rows, columns), (1, 1))
    turned = torch.randn(2 * columns, rows)
    return [
        own, turned[:columns].mT, turned[::2].mT, wide[1 : rows + 1, 1 : columns + 1],
        wide[1::2, :columns], wide[:rows, 1::2], own[:1].expand(rows, columns),
        own[:, :1].expand(rows, columns), own[0, 0].expand(rows, columns), overlapping,
    ]  # fmt: skip


BY_ONEDNN = [False, *[True] * torch.backends.mkldnn.is_available()]
"""Whether oneDNN computes a product, which not every build of torch has."""


@pytest.mark.parametrize("by_onednn", BY_ONEDNN)
@pytest.mark.parametrize(
    ("n", "k", "m"), extent([(5, 7, 6)], [(1, 1, 1), (4, 5, 1), (5, 7, 6), (16, 32, 24)])
)
def test_a_product_does_not_depend_on_the_order_of_elements_in_memory(
    n: int, k: int, m: int, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the rounding of sums in f32, of any order, it is the product in double precision."""
    torch.manual_seed(0)
    monkeypatch.setattr(products, "onednn_is_faster", lambda: by_onednn)
    biases = [None, *(x[:, 0] for x in views(m, 1))]
    for x, weight, bias in product([*views(n, k), torch.randn(2, n, k).mT.contiguous().mT],
                                   views(m, k), biases):  # fmt: skip
        made = products.linear(x, weight, bias)
        exact, most = x.double() @ weight.double().mT, x.double().abs() @ weight.double().abs().mT
        if bias is not None:
            exact, most = exact + bias, most + bias.abs()
        assert made.shape == exact.shape and made.is_contiguous()
        assert ((made - exact).abs() <= (k + 1) * 2**-24 * most).all()
        assert by_onednn or torch.equal(made, F.linear(x, weight, bias))


@pytest.mark.parametrize("by_onednn", BY_ONEDNN)
@pytest.mark.parametrize("shape", [(4, 0), (0, 5), (2, 4, 0), (2, 0, 5)])
def test_a_product_of_empty_shards_is_that_of_torch(
    shape: tuple[int, ...], by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "onednn_is_faster", lambda: by_onednn)
    x = torch.randn(shape)
    for weight in (torch.randn(3, shape[-1]), torch.randn(shape[-1], 3).mT):
        for bias in (None, torch.randn(3)):
            made = products.linear(x, weight, bias)
            torch.testing.assert_close(made, F.linear(x, weight, bias))
