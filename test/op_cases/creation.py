from typing import Any

import numpy as np
from harness import ELEMENTS

from op_cases.case import EVEN, NUMBERS, ODD, Case
from shardir.dialects import dist, nn
from shardir.dialects.nn.base import int_attr


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
