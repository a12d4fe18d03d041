from typing import Any

import torch
from support.harness import FLOATS, INTEGERS
from support.reference import Reference, dtype_of, shape_of
from xdsl.ir import Operation

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.backend.torch.shardir_runtime.ops import random as torch_random
from shardir.dialects import nn
from shardir.dialects.nn.properties import float_attr, int_attr

KEY = ("i64", ())


def drawn(text: str, elements: tuple[str, ...], shape: Shape) -> Case:
    props = {"distribution": nn.DistributionAttr.read(text), "stream": int_attr(3)}
    name = f"{text.split(',', maxsplit=1)[0]}-{'x'.join(map(str, shape))}"
    return Case(name, nn.RandomOp, (KEY,), elements, props, shape, kinds=("below:9",),
                gradient=False)  # fmt: skip


def dropout(p: float, shape: Shape) -> Case:
    props = {"p": float_attr(p), "stream": int_attr(1)}
    return Case(f"{p}-{'x'.join(map(str, shape))}", nn.DropoutOp, (shape, KEY), props=props,
                kinds=("normal", "below:9"))  # fmt: skip


CASES: list[Case] = [
    drawn("uniform, low = -1.0, high = 2.0", FLOATS, (4, 8)),
    drawn("normal, mean = 1.0, std = 0.5", ("f64", "f32"), (5, 3)),
    drawn("integers, low = -3, high = 100", INTEGERS, (2, 3, 5)),
    drawn("bernoulli, p = 0.25", ("i1",), (7, 6)),
    drawn("bernoulli, p = 0.25", ("i1",), ()),
    dropout(0.5, (4, 8)),
    dropout(0.1, (5, 3)),
    dropout(0.0, (3, 4)),
    dropout(1.0, (3, 4)),
]


def _drawn(
    op: Any, kind: str, params: Any, shape: Shape, key: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """By torch's twin of the generator, unsharded."""
    seed = torch_random.seed_at(key, op.stream.value.data)
    return torch_random.fill(kind, params, shape, [(0, n) for n in shape], seed, dtype)


def _random(op: nn.RandomOp, key: torch.Tensor) -> torch.Tensor:
    how = op.distribution
    return _drawn(op, how.kind, how.values, shape_of(op.out), key, dtype_of(op.out))


def _dropout(op: nn.DropoutOp, x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    p = op.p.value.data
    dropped = _drawn(op, "bernoulli", {"p": p}, shape_of(op.out), key, torch.bool)
    return x * ~dropped / (1 - p if p < 1 else 1)


REFERENCES: dict[type[Operation], Reference] = {
    nn.RandomOp: _random,
    nn.DropoutOp: _dropout,
}
