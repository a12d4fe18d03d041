"""Means and extremes on split batches, forward and backward: where a mean of means, a gradient of
each device's own count, or one that is added up once per device would show."""

from itertools import product

import pytest
from support.extent import sampled
from support.harness import MESH, Arg, compiled, laid_out, layout, problem

from shardir.dialects import nn
from shardir.dialects.nn.properties import int_attr
from shardir.dialects.text import word

MEAN = {"reduction": word(nn.LossReductionAttr, "mean")}
BATCHES = ["[{a}, {}]", "[{}, {b}]", "[{a}, {b}]", "[{a, b}, {}]", "[{b, a}, {}]", "[{}, {a, b}]"]
ROWS = (7, 5)
"""Uneven over one axis and over both; over both the last device has one row."""


def mean(kind, **props):
    numbers = {n: int_attr(x) for n, x in props.items()}
    return lambda b, *x: b.op(kind, *x, props={**MEAN, **numbers}).results


PROGRAMS = {
    "mse": (mean(nn.MseLossOp), "f64"),
    "soft_margin": (mean(nn.SoftMarginLossOp), "f64"),
    "bce_with_logits": (mean(nn.BceWithLogitsLossOp), "f64"),
    "ignored labels": (mean(nn.CrossEntropyLossOp, ignore=1), "i64"),
    "ignored labels, nll": (mean(nn.NllLossOp, ignore=4), "i64"),
    "maximum": (lambda b, x, y: b.mul(b.reduce(x, "max", [0, 1]), b.reduce(y, "max", [0, 1])),
                 "f64"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), sampled(product(PROGRAMS, BATCHES), 12))
def test_a_mean_is_over_the_global_batch(name, text):
    body, element = PROGRAMS[name]
    labels = element == "i64"
    args = [Arg("f64", ROWS), Arg(element, ROWS[:1] if labels else ROWS)]
    kinds = ["normal", f"below:{ROWS[1]}" if labels else "normal"]
    p = problem(args, body, (0,) if labels else (0, 1), kinds)
    given = [layout(text), None]
    assert not p.errors(compiled(laid_out(p.module, MESH, given), check=True))
