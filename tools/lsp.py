"""shard-lsp: serve .ir text to editors, by the Language Server Protocol on stdin and stdout."""

import os
import sys
from collections.abc import Sequence

from shardir.tools.arguments import ToolParser

GROUPS = {"what runs": ("stdio",)}

EXAMPLES = """\
shard-lsp --stdio        as an editor starts it
"""


def parser() -> ToolParser:
    """Return the parser of shard-lsp's arguments."""
    parser = ToolParser(
        "shard-lsp", usage="[options]", groups=GROUPS, examples=EXAMPLES,
        description="Serve .ir text to editors, by the Language Server Protocol on stdin and "
        "stdout.",
    )  # fmt: skip
    parser.add_argument("--stdio", action="store_true", help="the default, which editors may name")
    parser.arrange()
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one editor until it says exit, and return the exit code."""
    parser().parse_args(arguments)
    try:
        from shardir.tools.language_server import make_server
    except ImportError as error:
        sys.exit(f"error: shard-lsp requires {error.name}; use pip install 'shardir[lsp]'")
    with open(os.dup(1), "wb") as output:  # which pygls closes
        sys.stdout = sys.stderr  # nothing else may be written between messages
        make_server().start_io(stdout=output)
    return 0
