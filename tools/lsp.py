"""shard-lsp: serve .ir text to editors, by the Language Server Protocol on stdin and stdout."""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from shardir.tools.arguments import add_version


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one editor until it says exit, and return the exit code."""
    parser = ArgumentParser("shard-lsp", description=__doc__)
    parser.add_argument("--stdio", action="store_true", help="the default, which editors may name")
    add_version(parser)
    parser.parse_args(arguments)
    try:
        from shardir.tools.language_server import make_server
    except ImportError as error:
        sys.exit(f"error: shard-lsp requires {error.name}; use pip install 'shardir[lsp]'")
    with open(os.dup(1), "wb") as output:  # which pygls closes
        sys.stdout = sys.stderr  # nothing else may be written between messages
        make_server().start_io(stdout=output)
    return 0
