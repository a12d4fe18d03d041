"""The zoo for inference: all outputs of each architecture are those of torch, in the interpreter,
with weights that are loaded after the compilation."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ZOO, Example
from support.extent import extent
from support.modules.zoo import IMPORTED
from torch.utils._pytree import tree_leaves

import shardir
from shardir.dialects.train import arguments, updated_keys
from shardir.frontends.torch.importer import FUNCTION, KEY
from shardir.frontends.torch.weights import array_of
from shardir.interpret.evaluator import function, run

PLAN = "megatron(tp) * fsdp(dp)"
SAMPLE = ["ResNet"]
"""What the default form tests."""


def in_torch(example: Example) -> list[Any]:
    """The tensors among the module's outputs, in their order."""
    with torch.no_grad():
        found = tree_leaves(deepcopy(example.module)(*example.args, **example.kwargs))
    return [array_of(x) for x in found if isinstance(x, torch.Tensor)]


def in_numpy(program: Any) -> list[Any]:
    """The results of a compiled module that are not the new values of its states."""
    f, inputs = function(program.module, FUNCTION), iter(program.imported.inputs)
    given = [
        np.array(7) if a.key == KEY
        else array_of(program.values[a.key] if a.key else next(inputs)[1])
        for a in arguments(f)
    ]  # fmt: skip
    results = run(program.module, FUNCTION, given)
    return [x for x, key in zip(results, updated_keys(f), strict=True) if key is None]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", extent(SAMPLE, IMPORTED))
def test_outputs_are_those_of_torch(name: str) -> None:
    example = ZOO[name].make()
    example.module.eval()
    other = deepcopy(example.module)
    for tensor in other.state_dict().values():
        tensor.zero_()
    program = shardir.compile(
        other, example.args, keywords=example.kwargs, train=False, mesh="dp = 2, tp = 2",
        plan=PLAN,
    )  # fmt: skip
    program.load_state_dict(example.module.state_dict())
    found, wanted = in_numpy(program), in_torch(example)
    assert len(found) == len(wanted) > 0
    for x, y in zip(found, wanted, strict=True):
        scale = np.abs(y).max(initial=0) or 1
        assert x.shape == y.shape
        assert np.abs(x - y).max(initial=0) <= 1e-4 * scale
