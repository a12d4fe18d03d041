"""Errors and their diagnostics, and terminals. Needs nothing but rich, and this late, so that every
layer can raise.

A `ShardirError` is bad input, with one message: the expected and the found input, and the fix. A
`Failure` is several of them, each with its op. A `Diagnostic` is a message with its source
location, as the tools print it:

    net.ir:12:8: error: [T6] expected dimension 1 of operand 1 to be 8 or 1, got 6; use equal sizes
      %y = nn.add %x, %b : ...
           ^^^^^^
"""

from shardir.diagnostics.arguments import check_arguments, check_call, show_overloads
from shardir.diagnostics.codes import CODES, SECTIONS, Code, coded
from shardir.diagnostics.errors import (
    Diagnostic,
    Failure,
    Located,
    NotationError,
    ParseErrors,
    ShardirError,
)
from shardir.diagnostics.progress import progress_to, report_progress
from shardir.diagnostics.terminal import counted, painter, print_error, progress_shown, width
from shardir.diagnostics.wording import (
    describe,
    did_you_mean,
    first_paragraph,
    nearest,
    one_of,
    seconds_text,
    several,
    size_text,
)

__all__ = [
    "CODES",
    "SECTIONS",
    "Code",
    "Diagnostic",
    "Failure",
    "Located",
    "NotationError",
    "ParseErrors",
    "ShardirError",
    "check_arguments",
    "check_call",
    "coded",
    "counted",
    "describe",
    "did_you_mean",
    "first_paragraph",
    "nearest",
    "one_of",
    "painter",
    "print_error",
    "progress_shown",
    "progress_to",
    "report_progress",
    "seconds_text",
    "several",
    "show_overloads",
    "size_text",
    "width",
]
