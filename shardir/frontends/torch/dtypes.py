"""Element types of torch: our names of them, and what ops of theirs take together."""

import torch
from torch.fx import Node

from shardir.diagnostics import ShardirError

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "i1",
    torch.int16: "i32", torch.int8: "i32", torch.uint8: "i32",
}  # fmt: skip
"""Our element type of each dtype of torch. Small integers are computed in i32."""

REAL = "write it with real numbers: a product with matrices of cosines and sines"

OF_ONE_DTYPE = {
    "linear", "matmul", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "addbmm", "einsum",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "convolution", "scaled_dot_product_attention",
}  # fmt: skip
"""Ops that do not promote their operands: in torch another dtype is an error, which the export does
not find."""


def dtype_name(dtype: torch.dtype, of: str = "") -> str:
    """Return our name of a dtype; `of` is what has it, for the message.

    Raises:
        ShardirError: there is no such element type.
    """
    if dtype not in DTYPES:
        supported = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        use = REAL if dtype.is_complex else "convert it"
        raise ShardirError(
            f"expected a dtype of {supported}{f' of {of}' if of else ''}, got {dtype}; {use}"
        )
    return DTYPES[dtype]


def check_dtypes(node: Node, name: str, at: str) -> None:
    """Check the dtypes of a node whose op has this name; `at` is its place.

    Raises:
        ShardirError: results are complex, or of a dtype that we do not have, or operands differ
            where torch takes one dtype.
    """
    value = node.meta.get("val")
    results = value if isinstance(value, tuple | list) else [value]
    for x in results:
        if isinstance(x, torch.Tensor):
            if x.is_complex():
                raise ShardirError(
                    f"expected real numbers, got complex ones of {node.target}{at}; {REAL}"
                )
            dtype_name(x.dtype, f"{node.target}{at}")
    if name not in OF_ONE_DTYPE:
        return
    values = [n.meta.get("val") for n in _operands(node, name)]
    dtypes = list(dict.fromkeys(x.dtype for x in values if isinstance(x, torch.Tensor)))
    if len(dtypes) > 1:
        raise ShardirError(
            f"expected operands of one dtype of {name}{at}, got "
            f"{' and '.join(map(str, dtypes))}; convert one, x.to({dtypes[-1]}), or give example "
            "inputs in the dtype of the module"
        )


def _operands(node: Node, name: str) -> list[Node]:
    """The tensors that are multiplied: a mask of an attention may be of another dtype."""
    if name == "scaled_dot_product_attention":
        return [n for n in node.args[:3] if isinstance(n, Node)]
    return node.all_input_nodes
