"""Tests of a copy of the tree, in a process that has imported torch (test/support/rank_server.py):
`walk.py ROOT ARGUMENT... 0`."""

import os
import sys

import pytest

if __name__ == "__main__":
    root, *arguments, _ = sys.argv[1:]
    for name in [n for n in sys.modules if n.partition(".")[0] == "shardir"]:
        del sys.modules[name]
    os.chdir(root)
    sys.path.insert(0, root)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *arguments]))
