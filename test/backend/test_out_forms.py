"""The `out` forms of calls of torch: the bits and strides of the plain ones, in given memory."""
# ruff: noqa: E402 (torch may not be installed)

import warnings
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")


from support.each import check_each

from shardir.backend.torch.emit.out_forms import CALLS, METHODS, SIGNS, out_form
from shardir.backend.torch.shardir_runtime.ops import memory, products, tensors

BLOCK = 1 << 20
OFFSET = 64 * 100


def signs() -> Iterator[str]:
    for sign in ("+", "-", "*", "/", "%", "**", "@", "==", "!=", "<", "<=", ">", ">="):
        yield f"x {sign} y"
        if sign not in "@":
            yield f"turned {sign} 2.5"
    yield from (f"mask {sign} (x > 0.5)" for sign in "&|^")
    yield from ("-turned", "~mask", "x - y.mT.contiguous().mT", "heads @ heads.mT")


def methods() -> Iterator[str]:
    given = {
        "amax": "2, keepdim=True", "amin": "(0, 1)", "clamp": "min=0.25", "cumsum": "1",
        "log_softmax": "2", "logsumexp": "1", "mean": "(0, 2)", "nan_to_num": "nan=0.5",
        "softmax": "2", "std": "1, correction=1", "sum": "(0, 1), keepdim=True", "tril": "1",
        "triu": "0 - 1", "var": "(1, 2), correction=0",
    }  # fmt: skip
    for name in sorted(METHODS):
        yield from (f"{x}.{name}({given.get(name, '')})" for x in ("x", "turned"))
    yield from ("turned.relu()", "turned.to(torch.bfloat16)", "turned.reshape((4, 64))")
    yield from ("(x.mT @ y).unflatten(1, (2, 4))", "ids.sum(1, dtype=torch.int32)")
    yield from ("turned.expand((4, 8, 8)).to(torch.float64)", "(x > y).to(torch.float32)")


def calls() -> Iterator[str]:
    given = {
        "torch.cat": ["[x, turned], 1"], "torch.full": ["(3, 5), 0.1, dtype=torch.float32"],
        "torch.lerp": ["x, y, 0.3"], "torch.maximum": ["x, y"], "torch.minimum": ["x, turned"],
        "torch.zeros": ["(3,), dtype=torch.int64"], "F.elu": ["x, 0.7"],
        "F.gelu": ["turned", 'x, approximate="tanh"'], "F.hardtanh": ["x, -0.5, 0.5"],
        "F.leaky_relu": ["x, 0.1"], "F.silu": ["x"], "F.softplus": ["x"],
        "F.embedding": ["ids, matrix"],
        "F.linear": ["x, matrix, row", "matrix, matrix, row", "turned, matrix, row"],
        "ops_products.linear": ["x, matrix, row", "turned, matrix.mT", "matrix, matrix"],
        "aten.gelu_backward": ['x, y, approximate="tanh"', "turned, x"],
        "aten.threshold_backward": ["x, y, 0"],
        "aten._softmax_backward_data": ["x, y, 2, torch.float32"],
        "aten._log_softmax_backward_data": ["x, turned, 2, torch.float32"],
        "ops.cross_entropy_grad": ["x[0], ids[0], row", "x[0], ids[0], row, ignore=1"],
        "ops.pick_grad": ["ids, x[0, :4, :6], 8, 0, 8", "ids, x[0, :4, :6], 4, 4, 8"],
        "ops.take": ["matrix, ids, 0, 0, 8", "matrix, ids, 0, 4, 16", "wide, ids, 1, 0, 8"],
        "ops.take_grad": ["ids, x[:, :6], (8, 8), 0, 0, 8", "ids, x[:, :6], (4, 8), 0, 4, 8"],
    }  # fmt: skip
    for name in CALLS:
        yield from (f"{name}({text})" for text in given.get(name, ["x, y"]))
    yield from ("torch.where(mask, x, y)", "torch.where(mask, turned, 0.0)",
                "torch.where(mask, x.mT, 0.0)", 'torch.where(mask, float("-inf"), y)',
                "torch.where(mask, (-1e+09), x)")  # fmt: skip


EXPRESSIONS = [*signs(), *methods(), *calls()]


def names() -> dict[str, object]:
    """The values that expressions name; as a program has them, a list has one by an index."""
    torch.manual_seed(0)
    x = torch.rand(4, 8, 8)
    return {
        "torch": torch, "F": torch.nn.functional, "aten": torch.ops.aten,
        "ops": tensors, "ops_memory": memory,
        "ops_products": products,
        "x": x, "y": torch.rand(4, 8, 8), "turned": torch.rand(8, 4, 8).transpose(0, 1),
        "heads": torch.rand(2, 8, 3, 4).transpose(1, 2), "mask": x > 0.3,
        "matrix": torch.rand(8, 8), "row": torch.rand(8), "wide": torch.rand(3, 8, 2),
        "ids": torch.tensor([[0, 3, 7, 1, 2, 3], [4, 4, 4, 0, 1, 5], [6, 1, 0, 2, 7, 7],
                             [1, 1, 2, 3, 5, 6]], dtype=torch.int32),
    }  # fmt: skip


def test_a_form_is_the_plain_call_in_given_memory() -> None:
    check_each(check_form, EXPRESSIONS)


def check_form(text: str) -> None:
    values = names()
    if text.startswith("ops.cross_entropy_grad"):
        values["ids"] = torch.tensor([[0, 3, 7, 1, 2, 3, 4, 1]])
    plain = eval(text, values)
    block = torch.full((BLOCK,), 77, dtype=torch.uint8)
    slot = block[OFFSET:].view(plain.dtype)[:0]
    form = out_form(text, "slot")
    assert form is not None, text
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        for _ in range(2):  # the second call has the tensor of the first
            made = eval(form, {**values, "slot": slot})
            assert made.dtype == plain.dtype and made.stride() == plain.stride()
            assert torch.equal(made, plain) or torch.allclose(made, plain, 0, 0, equal_nan=True)
    assert made.untyped_storage().data_ptr() == block.untyped_storage().data_ptr()
    assert made.data_ptr() == block.data_ptr() + OFFSET
    assert (block[:OFFSET] == 77).all() and (block[OFFSET + plain.nbytes :] == 77).all()


@pytest.mark.parametrize("text", ["1.0 - x", "(-1.0) - x", 'float("inf") < x', "x.sum()",
    "F.layer_norm(x, (8,))", "x", "x.mT",
    "torch.where(mask, 1.0, 0.0)", "x.narrow(0, 0, 2)", "x[0]", "x.sort()"])  # fmt: skip
def test_what_has_no_form(text: str) -> None:
    assert out_form(text, "slot") is None


def test_each_entry_is_tried() -> None:
    every = " ".join(out_form(text, "slot") or "" for text in EXPRESSIONS)
    functions = {f"torch.{name}" for name in (*SIGNS.values(), *METHODS)} | {
        f for f, _ in CALLS.values()
    }
    assert not {f for f in functions if f"{f}(" not in every}
