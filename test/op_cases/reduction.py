from harness import FLOATS
from xdsl.ir import Attribute

from op_cases.case import ALL, EVEN, NUMBERS, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import dims_attr
from shardir.dialects.text import word


def reduce(kind: str, shape: Shape, *dims: int, keep: bool = False) -> Case:
    props: dict[str, Attribute] = {
        "kind": word(nn.ReductionKindAttr, kind),
        "dims": dims_attr(*dims),
    }
    if keep:
        props["keep"] = nn.UNIT
    name = f"{kind}-{'x'.join(map(str, shape))}-{','.join(map(str, dims))}{'-keep' * keep}"
    elements = {"sum": NUMBERS, "mean": FLOATS}.get(kind, ALL)
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
    reduce("max", EVEN, 1),
    reduce("max", ODD, 0, 1),
    reduce("max", ODD, 1, keep=True),
    reduce("min", EVEN, 0),
    reduce("min", ODD, 0),
    reduce("min", (3, 4, 5), 1, keep=True),
]
