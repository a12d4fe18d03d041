from harness import FLOATS, INTEGERS

from op_cases.case import Case
from shardir.algebra.layout import Shape
from shardir.dialects import nn
from shardir.dialects.nn.base import float_attr, int_attr

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
