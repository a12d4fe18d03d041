"""Reductions."""

from math import prod

from xdsl.ir import Operation

from shardir.backend.torch.emit.names import tuple_text
from shardir.backend.torch.emit.scope import EmissionScope, Entry, Text
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_of


def _reduce(s: EmissionScope, op: nn.ReduceOp) -> Text:
    """A mean over a split dimension becomes a partial sum divided by the global number of
    elements."""
    dims = dims_of(op.properties, "dims", len(s.shape_of(op.x)))
    if not dims:
        return op.x
    x, keep = s.operand(op.x), op.keep is not None
    at = _dims(dims, len(s.shape_of(op.x)), keep)
    tail = [", keepdim=True"] if keep else []
    kind = op.kind.data
    if kind in ("max", "min"):
        if any(s.may_be_empty(op.x, d) for d in dims):
            s.use("ops")
            helper = "maximum" if kind == "max" else "minimum"
            return f"ops.{helper}({x}, {tuple_text(list(map(str, dims)))}{', keep=True' * keep})"
        return f"{x}.a{kind}({at}{''.join(tail)})"
    if kind in ("any", "all"):
        return f"{x}.{kind}({at}{''.join(tail)})"
    if kind == "prod":
        return _prod(s, op, dims)
    if kind == "sum":
        typed = [] if s.is_float(op.x) else [f"dtype={s.dtype(op.x)}"]
        return f"{x}.sum({', '.join([*([at] if at else []), *(t[2:] for t in tail), *typed])})"
    split = [d for d in dims if s.parts(op.x, d) > 1]
    if not split:
        return f"{x}.mean({at}{''.join(tail)})"
    if all(s.is_even(op.x, d) for d in split):
        return f"{x}.mean({at}{''.join(tail)}) / {prod(s.parts(op.x, d) for d in split)}"
    total = prod(s.global_shape(op.x)[d] for d in dims)
    if s.element(op.x) in ("f16", "bf16"):  # the sum may overflow
        summed = ", ".join([*([at] if at else []), *(t[2:] for t in tail), "dtype=torch.float32"])
        return f"({x}.sum({summed}) / {total}).to({s.dtype(op.x)})"
    return f"{x}.sum({at}{''.join(tail)}) / {total}"


def _prod(s: EmissionScope, op: nn.ReduceOp, dims: tuple[int, ...]) -> str:
    """torch multiplies along one dimension or all. Chained calls begin with the last dimension, so
    that the indices of the others stay valid."""
    typed = [] if s.is_float(op.x) else [f"dtype={s.dtype(op.x)}"]
    if len(dims) == len(s.shape_of(op.x)) and op.keep is None:
        return f"{s.operand(op.x)}.prod({', '.join(typed)})"
    options = [*(["keepdim=True"] if op.keep is not None else []), *typed]
    calls = [f".prod({', '.join([str(d), *options])})" for d in sorted(dims, reverse=True)]
    return s.operand(op.x) + "".join(calls)


def _dims(dims: tuple[int, ...], rank: int, keep: bool) -> str:
    """The dimensions of a reduction; empty if it is over all of them."""
    if len(dims) == rank and not keep:
        return ""
    return str(dims[0]) if len(dims) == 1 else tuple_text(list(map(str, dims)))


TORCH: dict[type[Operation], Entry] = {
    nn.ReduceOp: _reduce,
}
