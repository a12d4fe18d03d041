import torch
from support.reference import Reference, shape_of
from xdsl.ir import Operation

from op_cases.case import ALL, EVEN, ODD, Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.properties import dims_attr


def reshape(old: Shape, new: Shape) -> Case:
    name = "->".join("x".join(map(str, s)) for s in (old, new))
    return Case(name, nn.ReshapeOp, (old,), ALL, result=new)


def transpose(shape: Shape, *perm: int) -> Case:
    name = f"{'x'.join(map(str, shape))}-{','.join(map(str, perm))}"
    return Case(name, nn.TransposeOp, (shape,), ALL, {"perm": dims_attr(*perm)})


def broadcast(old: Shape, new: Shape, *dims: int) -> Case:
    name = f"{'x'.join(map(str, old))}->{'x'.join(map(str, new))}"
    return Case(name, nn.BroadcastOp, (old,), ALL, {"dims": dims_attr(*dims)}, result=new)


CASES: list[Case] = [
    reshape((4, 8), (32,)),
    reshape((32,), (4, 8)),
    reshape((8, 6), (4, 12)),
    reshape((4, 6), (4, 2, 3)),
    reshape((4, 2, 3), (4, 6)),
    reshape((3, 5), (15,)),
    reshape((15,), (5, 3)),
    reshape((6, 4), (4, 6)),
    reshape((4, 6, 4), (4, 4, 6)),
    reshape((12, 2), (8, 3)),
    reshape((2, 6, 10), (8, 15)),
    reshape((4, 1, 8), (4, 8)),
    reshape((2, 2, 8), (4, 8)),
    reshape((1,), ()),
    reshape((), (1, 1)),
    reshape((3, 4), (1, 3, 4, 1)),
    transpose(EVEN, 1, 0),
    transpose(ODD, 1, 0),
    transpose((2, 3, 4), 2, 0, 1),
    transpose(EVEN, -2, -1),
    broadcast((8,), EVEN, 1),
    broadcast((4,), EVEN, 0),
    broadcast((), ODD),
    broadcast((4, 1), EVEN, 0, 1),
    broadcast((3, 5), (5, 2, 3), 2, 0),
    broadcast((1, 7), (3, 5, 7), 1, 2),
]


def _broadcast(op: nn.BroadcastOp, x: torch.Tensor) -> torch.Tensor:
    shape, dims = shape_of(op.out), [d % len(shape_of(op.out)) for d in op.dims.data]
    for d in sorted(set(range(len(shape))) - set(dims)):
        x, dims = x.unsqueeze(-1), [*dims, d]
    return x.permute([dims.index(d) for d in range(len(shape))]).expand(shape)


REFERENCES: dict[type[Operation], Reference] = {
    nn.ReshapeOp: lambda op, x: x.reshape(shape_of(op.out)),
    nn.TransposeOp: lambda op, x: x.permute(op.perm.data),
    nn.BroadcastOp: _broadcast,
}
