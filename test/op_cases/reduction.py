import torch
from support.harness import FLOATS
from support.reference import Reference
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr
from shardir.dialects.text import word


def reduce(kind: str, shape: Shape, *dims: int, keep: bool = False) -> Case:
    props: dict[str, Attribute] = {
        "kind": word(nn.ReductionKindAttr, kind),
        "dims": dims_attr(*dims),
    }
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    elements = {
        "sum": NUMBERS, "prod": NUMBERS, "mean": FLOATS, "any": ("i1",), "all": ("i1",)
    }.get(kind, ALL)  # fmt: skip
    return Case(name, nn.ReduceOp, (shape,), elements, props, kinds=("ties",))


CASES: list[Case] = [
    reduce("sum", EVEN, 1),
    reduce("sum", ODD, 0),
    reduce("sum", (3, 4, 5), 0, 2),
    reduce("sum", EVEN, 0, 1),
    reduce("sum", EVEN, -1, keep=True),
    reduce("sum", EVEN),
    reduce("mean", EVEN, 1),
    reduce("mean", ODD, 0),
    reduce("mean", ODD, 0, 1),
    reduce("mean", (3, 4, 5), 2, 0, keep=True),
    reduce("prod", EVEN, 1),
    reduce("prod", ODD, 0),
    reduce("prod", (3, 4, 5), 0, 2),
    reduce("prod", EVEN, 0, 1, keep=True),
    reduce("any", EVEN, 1),
    reduce("any", ODD, 0, 1, keep=True),
    reduce("all", ODD, 0),
    reduce("all", EVEN, 0, 1),
    reduce("max", EVEN, 1),
    reduce("max", ODD, 0, 1),
    reduce("max", ODD, 1, keep=True),
    reduce("min", EVEN, 0),
    reduce("min", ODD, 0),
    reduce("min", (3, 4, 5), 1, keep=True),
]


def _reduce(op: nn.ReduceOp, x: torch.Tensor) -> torch.Tensor:
    dims, keep = op.dims.data, op.keep is not None
    match op.kind.data:
        case "sum":
            return x.sum(dims, keepdim=keep, dtype=x.dtype) if dims else x
        case "mean":
            return x.mean(dims, keepdim=keep) if dims else x
        case "prod":
            for d in sorted((d % x.ndim for d in dims), reverse=True):
                x = x.prod(d, keepdim=keep, dtype=x.dtype)
            return x
        case "any":
            return x.any(dims, keepdim=keep) if dims else x
        case "all":
            return x.all(dims, keepdim=keep) if dims else x
        case "max":
            return x.amax(dims, keepdim=keep) if dims else x
        case _:
            return x.amin(dims, keepdim=keep) if dims else x


REFERENCES: dict[type[Operation], Reference] = {
    nn.ReduceOp: _reduce,
}
