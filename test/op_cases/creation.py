from typing import Any

import numpy as np
import torch
from support.harness import ELEMENTS
from support.reference import Reference, dtype_of, shape_of, to_torch
from xdsl.dialects import builtin
from xdsl.ir import Operation

from op_cases.case import EVEN, NUMBERS, ODD, Case
from shardir.dialects import dist, nn
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.nn.types import unsharded_type


def constant(element: str, values: Any) -> Case:
    values = np.array(values)
    type = dist.tensor(ELEMENTS[element], values.shape)
    data = nn.dense_attr(type, values.flatten().tolist())
    return Case(
        f"{element}-{'x'.join(map(str, values.shape))}",
        nn.ConstantOp,
        (),
        (element,),
        {"value": data},
        values.shape,
        gradient=False,
    )


CASES: list[Case] = [
    constant("f32", np.arange(32).reshape(4, 8) / 8),
    constant("f64", np.arange(15).reshape(5, 3)),
    constant("bf16", [1.0, 2.5, -3.0]),
    constant("f16", [[0.5, 1.5], [2.0, 3.0]]),
    *(
        Case(
            f"{'x'.join(map(str, s))}-{d}",
            nn.IotaOp,
            (),
            NUMBERS,
            {"dim": int_attr(d)},
            s,
            gradient=False,
        )
        for s, d in ((EVEN, 1), (ODD, 0), ((7,), -1))
    ),
    constant("i32", np.arange(12).reshape(3, 4)),
    constant("i64", 7),
    constant("i1", [True, False, True, True]),
]


def _constant(op: nn.ConstantOp) -> torch.Tensor:
    values, element = np.array(list(op.value.get_values())), unsharded_type(op.out).element_type
    if isinstance(element, builtin.IntegerType):
        values = values.astype({1: bool, 32: np.int32, 64: np.int64}[element.width.data])
    shape = shape_of(op.out)
    return to_torch(np.full(shape, values[0]) if values.size == 1 else values.reshape(shape))


def _iota(op: nn.IotaOp) -> torch.Tensor:
    shape = shape_of(op.out)
    dim = op.dim.value.data % len(shape)
    column = torch.arange(shape[dim]).reshape([-1 if d == dim else 1 for d in range(len(shape))])
    return column.expand(shape).to(dtype_of(op.out))


REFERENCES: dict[type[Operation], Reference] = {
    nn.ConstantOp: _constant,
    nn.IotaOp: _iota,
}
