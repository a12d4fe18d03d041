"""Steps of replicas: the values that they share, and those that each has of its own."""

from itertools import product

import pytest
from support.harness import apply, function

from shardir.dialects import train
from shardir.syntax.parser import parse

STATES = {
    "w.velocity": "constant, value = 0.0", "step.count": "constant, value = 0.0",
    "mask": "normal", "seen": "constant, value = 0.0",
}  # fmt: skip
"""Two of the optimizer, one that starts from random numbers, and one of the program."""
OWN = {"w.velocity", "step.count", "mask"}

STEP = """
func.func @step(
    %w: tensor<4xf32> {{train.parameter = "w", train.init = #train.init<normal>}},
    %s: tensor<4xf32> {{train.state = "{key}", train.init = #train.init<{init}>}}
) -> (tensor<4xf32> {{train.updates = "w"}}, tensor<4xf32> {{train.updates = "{key}"}}) attributes {{train.step, train.sync = #train.synchronization<sgd, replicas = 2, every = 8, lr = 1.0>}} {{
  %n = nn.add %s, %w : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  func.return %w, %n : tensor<4xf32>, tensor<4xf32>
}}
"""  # noqa: E501 - a program
READER = """
func.func @reader(
    %s: tensor<4xf32> {{train.state = "{key}", train.init = #train.init<{init}>}}
) -> tensor<4xf32> {{
  func.return %s : tensor<4xf32>
}}
"""


@pytest.mark.parametrize(("key", "is_read"), [*product(STATES, (False, True))])
def test_what_other_functions_read_is_synchronised(key: str, is_read: bool) -> None:
    """Whatever it is: none of them reads a value that the step no longer updates. Otherwise the
    states of the optimizer, and random ones, stay each replica's own."""
    text = (STEP + READER * is_read).format(key=key, init=STATES[key])
    module = apply(parse(text), "local-steps")
    shared = {k for k in train.updated_keys(function(module, "step_sync")) if k is not None}
    assert (key in shared) is (is_read or key not in OWN)
    assert "w" in shared
    if is_read:
        assert train.arguments(function(module, "reader"))[0].key in shared
