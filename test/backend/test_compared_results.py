"""Results of a run are compared by their size."""

import numpy as np
import pytest

from shardir.diagnostics import ShardirError
from shardir.interpret.equivalence import compare


@pytest.mark.parametrize("wrong", [0.0, 2e-5, -1e-5])
def test_small_results_are_compared_by_their_size(wrong: float) -> None:
    """The gradients of a mean are small, and all differences were below 1e-4."""
    right = np.full(4, 1e-5, np.float32)
    compare("f", 0, right, right + np.float32(1e-7), "f32")
    with pytest.raises(ShardirError, match="in result 0 of @f"):
        compare("f", 0, right, np.full(4, wrong, np.float32), "f32")
