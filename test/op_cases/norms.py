from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import float_attr, int_attr

EPS = {"eps": float_attr(1e-3)}


def batch_norm(shape: Shape) -> list[Case]:
    name, channel = "x".join(map(str, shape)), shape[1:2]
    kinds = ("normal", "normal", "normal", "normal", "positive")
    return [
        Case(
            name, nn.BatchNormOp, (shape, *[channel] * 4), kinds=kinds,
            props=EPS | {"momentum": float_attr(0.25)},
        ),
        Case(name, nn.BatchNormInferenceOp, (shape, *[channel] * 4), kinds=kinds, props=EPS),
    ]  # fmt: skip


def group_norm(shape: Shape, groups: int) -> Case:
    name = f"{'x'.join(map(str, shape))}-{groups}"
    props = EPS | {"groups": int_attr(groups)}
    return Case(name, nn.GroupNormOp, (shape, shape[1:2], shape[1:2]), props=props)


def rms_norm(shape: Shape, norm: Shape) -> Case:
    name = f"{'x'.join(map(str, shape))}-{'x'.join(map(str, norm))}"
    return Case(name, nn.RmsNormOp, (shape, norm), props=EPS)


CASES: list[Case] = [
    *batch_norm((6, 4)),
    *batch_norm((5, 3, 3)),
    *batch_norm((2, 4, 3, 2)),
    group_norm((4, 4, 3), 2),
    group_norm((3, 6, 2), 3),
    group_norm((3, 5), 1),
    group_norm((2, 4, 2, 3), 4),
    rms_norm((4, 8), (8,)),
    rms_norm((3, 5), (5,)),
    rms_norm((2, 4, 6), (4, 6)),
]
