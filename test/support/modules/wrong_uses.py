"""Uses of compiled modules, and the form of the message of a wrong one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardir
from shardir.backend.runs import LaunchError
from shardir.diagnostics import ShardirError

X, Y = torch.randn(8, 4), torch.randint(3, (8,))
CROSS_ENTROPY = nn.functional.cross_entropy


def net() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


NET = net()


def compiled(model: Any = NET, inputs: Any = X, **options: Any) -> Any:
    given: dict[str, Any] = {"labels": Y, "loss": CROSS_ENTROPY, "optimizer": "sgd, lr = 0.1"}
    return shardir.compile(model, inputs, **given | options)


def assert_one_message(use: Callable[[], object], message: str) -> None:
    """A use is refused with one message, which has this part and no traceback."""
    with pytest.raises((ShardirError, LaunchError)) as e:
        use()
    assert message in str(e.value)
    assert len(str(e.value)) < 600
    assert "Traceback" not in str(e.value)
