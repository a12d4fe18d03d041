from xdsl.dialects.builtin import f32

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import dist, nn
from shardir.dialects.nn.movement import IntsPerDimAttr


def pool(x: Shape, window: Shape, stride: Shape = (), padding: Shape = ()) -> list[Case]:
    given = {"window": window, "stride": stride, "padding": padding}
    props = {n: IntsPerDimAttr(v) for n, v in given.items() if v}
    name = "-".join("x".join(map(str, v)) for v in (x, window, stride, padding))
    (y,) = nn.MaxPoolOp.infer([dist.tensor(f32, x)], props)
    ends, kinds = (x, y.get_shape()), ("ties", "normal")
    return [
        Case(name, nn.MaxPoolOp, (x,), props=props, kinds=("ties",)),
        Case(name, nn.MaxPoolGradOp, ends, props=props, kinds=kinds, gradient=False),
        Case(name, nn.AvgPoolOp, (x,), props=props),
        Case(f"{name}-exclude", nn.AvgPoolOp, (x,), ("f64",), {**props, "exclude": nn.UNIT}),
    ]


def adaptive(x: Shape, size: Shape) -> Case:
    name = "-".join("x".join(map(str, v)) for v in (x, size))
    props = {"size": IntsPerDimAttr(size)}
    return Case(name, nn.AdaptiveAvgPoolOp, (x,), props=props)


CASES: list[Case] = [
    *pool((2, 4, 8), (2,), (2,)),
    *pool((3, 2, 7), (3,), (2,), (1, 1)),
    *pool((2, 2, 5, 6), (3, 2), (1, 2), (1, 1, 1, 1)),
    adaptive((2, 4, 8), (1,)),
    adaptive((3, 2, 7), (3,)),
    adaptive((2, 2, 4, 6), (2, 6)),
]
