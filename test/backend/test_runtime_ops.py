"""Functions that emitted programs call, on one device."""

import pytest
import torch

from shardir.backend.torch.runtime.ops_runtime import trust_ratio


@pytest.mark.parametrize("w", [0.0, 4.0])
@pytest.mark.parametrize("u", [0.0, 9.0])
def test_a_trust_ratio_is_that_of_the_norms_or_one(w: float, u: float) -> None:
    found = trust_ratio(torch.tensor(w), torch.tensor(u), 0.5, 0.1)
    assert found.item() == pytest.approx(0.5 * 2 / (3 + 0.1 * 2) if w and u else 1.0)
