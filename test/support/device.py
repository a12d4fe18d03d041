"""The device of the ranks of tests: SHARDIR_TEST_DEVICE=cuda lets those of test/run share GPUs, by
Gloo (docs/contribute/testing.md)."""

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

DEVICE = os.environ.get("SHARDIR_TEST_DEVICE", "cpu")


def on_cpu(reason: str) -> "pytest.MarkDecorator":
    """Return the mark of a test of what a GPU does otherwise, for a reason."""
    import pytest  # ranks import this module: few need pytest

    return pytest.mark.skipif(DEVICE != "cpu", reason=reason)
