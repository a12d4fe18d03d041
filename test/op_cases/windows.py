import torch
from support.reference import Reference, dtype_of, shape_of
from xdsl.ir import Attribute, Operation

from op_cases.case import ALL, NUMBERS, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr


def numbers(**values: int) -> dict[str, Attribute]:
    return {n: int_attr(v) for n, v in values.items()}


def windows(
    shape: Shape, dim: int, count: int, size: int, step: int, offset: int,
    elements: tuple[str, ...] = ALL,
) -> list[Case]:  # fmt: skip
    name = f"{'x'.join(map(str, shape))}-{count}x{size}+{step}{offset:+}"
    props = numbers(dim=dim, step=step, offset=offset)
    cut = (*shape[:dim], count, size, *shape[dim + 1 :])
    added = tuple(e for e in elements if e in NUMBERS)
    return [
        Case(name, nn.UnfoldOp, (shape,), elements, props, result=cut),
        Case(name, nn.FoldOp, (cut,), added, props, result=shape),
    ]


CASES: list[Case] = [
    *windows((8, 3), 0, 4, 4, 2, -1),
    *windows((7, 2), 0, 3, 5, 2, -2),
    *windows((2, 9), 1, 4, 3, 3, -1, ("f64",)),  # aligned but for the offset
    *windows((8, 4), 0, 4, 2, 2, 0, ("f64",)),  # what each has itself
    *windows((5, 2), 0, 5, 2, 3, -4, ("f64",)),  # beyond both ends
    *windows((10,), 0, 2, 2, 6, 1, ("f64",)),  # with gaps
    *windows((3, 6), 1, 1, 6, 1, 0, ("f64",)),
    *windows((4,), 0, 0, 2, 1, 0, ("f64",)),
    *windows((0, 2), 0, 2, 2, 1, 0, ("f64",)),
    Case(
        "lowest", nn.UnfoldOp, ((6, 3),), NUMBERS,
        {**numbers(dim=0, step=2, offset=-1), "lowest": nn.UNIT}, (3, 4, 3), gradient=False,
    ),
]  # fmt: skip


def _unfold(op: nn.UnfoldOp, x: torch.Tensor) -> torch.Tensor:
    rows, windows = shape_of(op.x)[op.at], op.windows()
    fill = 0 if op.lowest is None else (
        -torch.inf if x.dtype.is_floating_point else torch.iinfo(dtype_of(op.x)).min
    )  # fmt: skip
    parts = []
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            inside = 0 <= row < rows
            parts.append(x.select(op.at, row) if inside else x.new_full(
                (*x.shape[: op.at], *x.shape[op.at + 1 :]), fill
            ))  # fmt: skip
    shape = shape_of(op.out)
    if not parts:
        return x.new_zeros(shape)
    return torch.stack(parts, op.at).reshape(shape)


def _fold(op: nn.FoldOp, x: torch.Tensor) -> torch.Tensor:
    windows, shape = op.windows(), shape_of(op.out)
    out = [torch.zeros((*shape[: op.at], *shape[op.at + 1 :]), dtype=x.dtype)] * windows.rows
    for p in range(windows.count):
        for r in range(windows.size):
            row = p * windows.step + windows.offset + r
            if 0 <= row < windows.rows:
                out[row] = out[row] + x.select(op.at, p).select(op.at, r)
    return torch.stack(out, op.at) if out else x.new_zeros(shape)


REFERENCES: dict[type[Operation], Reference] = {
    nn.UnfoldOp: _unfold,
    nn.FoldOp: _fold,
}
