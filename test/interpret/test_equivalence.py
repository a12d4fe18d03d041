"""`--check-equivalence` finds wrong values and wrong gradients of a pass."""

from collections.abc import Callable

import numpy as np
import pytest

from shardir.dialects import nn
from shardir.interpret import check_pass
from shardir.interpret.equivalence import TOLERANCE, NotEquivalentError, compare
from shardir.passes import PASSES
from shardir.syntax.parser import default_parser, parse

ARGS = '%w: tensor<4x3xf32> {train.parameter = "w", train.init = #train.init<normal>}'
BODY = """
func.func @loss(%x: tensor<5x4xf32>, ARGS) -> tensor<f32> {
  %h = nn.matmul %x, %w : (tensor<5x4xf32>, tensor<4x3xf32>) -> tensor<5x3xf32>
  %t = nn.tanh %h : (tensor<5x3xf32>) -> tensor<5x3xf32>
  %k = nn.stop_gradient %t : (tensor<5x3xf32>) -> tensor<5x3xf32>
  %y = nn.mul %t, %k : (tensor<5x3xf32>, tensor<5x3xf32>) -> tensor<5x3xf32>
  %s = nn.reduce <mean> %y dims <0, 1> : (tensor<5x3xf32>) -> tensor<f32>
  func.return %s : tensor<f32>
}
""".replace("ARGS", ARGS)
REQUESTS = {
    "gradient": "train.gradient @g of @loss wrt <0, 1>",
    "sgd": "train.step @g of @loss <sgd, lr = 0.1, weight_decay = 0.01>",
    "momentum": "train.step @g of @loss <momentum, lr = 0.1, momentum = 0.9>",
    "adam": "train.step @g of @loss <adam, lr = 0.1, weight_decay = 0.1>",
    "lamb": "train.step @g of @loss <lamb, lr = constant<rate = 0.1>> loss_scale <dynamic>",
}


def differentiate(request: str) -> None:
    before = parse(BODY + request)
    after = before.clone()
    PASSES["distributed-autodiff"]()().apply(default_parser().ctx, after)
    check_pass(before, after, "distributed-autodiff")


@pytest.mark.parametrize("request_text", REQUESTS.values(), ids=REQUESTS)
def test_gradients_are_held_against_difference_quotients(request_text: str) -> None:
    differentiate(request_text)


@pytest.mark.parametrize("request_text", REQUESTS.values(), ids=REQUESTS)
def test_a_wrong_gradient_is_found(request_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable = nn.TanhOp.gradient
    monkeypatch.setattr(
        nn.TanhOp, "gradient", lambda self, b, *c: [b.scale(d, 4.0) for d in right(self, b, *c)]
    )
    with pytest.raises(
        NotEquivalentError, match=r"expected gradients of @g with the slope .* of @loss"
    ):
        differentiate(request_text)


@pytest.mark.parametrize("element", TOLERANCE)
def test_results_agree_within_the_tolerance_of_their_type(element: str) -> None:
    """Relative to the largest element."""
    before = np.array([0.5, -3.0, 2.0])
    difference = np.array([0.0, 0.0, 3.0 * TOLERANCE[element]])
    compare("f", 0, before, before + 0.9 * difference, element)
    with pytest.raises(NotEquivalentError, match="in result 0 of @f at"):
        compare("f", 0, before, before + 1.1 * difference, element)


def test_a_changed_value_is_found() -> None:
    before = parse(BODY)
    after = parse(BODY.replace("nn.tanh", "nn.sigmoid"))
    with pytest.raises(NotEquivalentError, match=r"after x: expected .* in result 0 of @loss"):
        check_pass(before, after, "x")
