"""The device of the ranks of tests: SHARDIR_TEST_DEVICE=cuda lets those of test/run share GPUs, by
Gloo (docs/testing.md)."""

import os

DEVICE = os.environ.get("SHARDIR_TEST_DEVICE", "cpu")
