"""Forms of integers and truth values: those of each element of what the interpreter computes."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.extent import sampled

from shardir.algebra.affine import Affine
from shardir.analysis.positions import form_of
from shardir.build import FunctionBuilder, Module, Value, nn
from shardir.interpret.evaluator import run


def array_of(form: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The elements that a form describes."""
    out = np.zeros(shape, np.int64 if isinstance(form, Affine) else bool)
    for index in product(*map(range, shape)):
        numbers = [e.constant + sum(k * index[d] for d, k in e.terms)
                   for e in ([form] if isinstance(form, Affine) else form.constraints)]  # fmt: skip
        out[index] = numbers[0] if isinstance(form, Affine) else all(n >= 0 for n in numbers)
    return out


def computed(f: FunctionBuilder, module: Module, values: list[Value]) -> list[np.ndarray]:
    f.returns(*values)
    return [np.asarray(x) for x in run(module.module, "f", [])]


class Drawn:
    """A function of random ops on iotas and constants, all of one shape or of sizes 1."""

    def __init__(self, seed: int):
        self.draw, self.module = random.Random(seed), Module()
        self.f = self.module.function("f")
        self.numbers = [self.iota(d, (3, 4)) for d in range(2)]
        self.numbers += [self.iota(d, s) for d, s in ((0, (3, 1)), (1, (1, 4)))]
        self.truths = [self.numbers[2] >= self.numbers[3]]
        for _ in range(16):
            self.step()

    def iota(self, dim: int, shape: tuple[int, ...]) -> Value:
        return self.f.nn.iota(dim=dim, shape=shape, dtype="i64")

    def number(self) -> Value:
        return self.draw.choice(self.numbers)

    def step(self) -> None:
        draw, x, y, k = self.draw, self.number(), self.number(), self.draw.randint(-2, 3)
        truth, other = draw.choice(self.truths), draw.choice(self.truths)
        n = x.shape[1]
        new = draw.choice([
            lambda: x + y, lambda: x - y, lambda: x * k, lambda: -x, lambda: x + k, lambda: x % 4,
            lambda: nn.cumsum(x * 0 + k, axis=1), lambda: x.broadcast_to(3, 4),
            lambda: nn.concat(x[:, :1] - 1, x, axis=1)[:, 1:],
            lambda: nn.concat(x, x[:, -1:], axis=1)[:, 1:],
            lambda: x.reshape(-1).reshape(*x.shape), lambda: x.transpose().transpose(),
            lambda: x.broadcast_to(3, 4).reshape(2, 6).reshape(3, 4),
            lambda: nn.gather(x, self.iota(0, (n,)), axis=1),
            lambda: nn.gather(x.reshape(-1), self.iota(0, (x.shape[0], 1))
                              * n + self.iota(1, (1, n)), axis=0),
            lambda: nn.take_along_axis(
                x, self.iota(1, x.shape), axis=1),
            lambda: nn.select(truth, x, y), lambda: truth.to("i64"), lambda: x.to("i32").to("i64"),
        ])()  # fmt: skip
        self.numbers.append(new)
        self.truths.append(draw.choice([
            lambda: x.compare(draw.choice(["eq", "ne", "lt", "le", "gt", "ge"]), y),
            lambda: truth & other, lambda: truth | other, lambda: ~truth, lambda: x.to("i1"),
            lambda: nn.select(truth, other, truth),
        ])())  # fmt: skip


@pytest.mark.parametrize("seed", sampled(range(25), 5))
def test_forms_are_the_elements(seed: int) -> None:
    drawn = Drawn(seed)
    values = [*drawn.numbers, *drawn.truths]
    known = 0
    for v, array in zip(values, computed(drawn.f, drawn.module, values), strict=True):
        form = form_of(v.ssa)
        if form is not None:
            np.testing.assert_array_equal(array_of(form, v.shape), array, str(v.ssa.owner))
            known += 1
    assert known > len(values) / 3
