"""The values of tokens: strings, symbols and integers; and the errors of leaves."""

import re
from collections.abc import Callable
from typing import TypeVar

from xdsl.utils.exceptions import ParseError, VerifyException

from shardir.diagnostics import NotationError, ShardirError
from shardir.grammar.machine import Token

T = TypeVar("T")

ESCAPE = re.compile(r"\\(?:([0-9a-fA-F]{2})|(.))", re.S)
KNOWN_ESCAPES = {"n": b"\n", "t": b"\t", "\\": b"\\", '"': b'"'}


class LeafError(Exception):
    """An error within a leaf, with its range in the source text."""

    def __init__(self, start: int, end: int, message: str):
        super().__init__(message)
        self.start, self.end, self.message = start, end, message


class SilentError(Exception):
    """The definition of a used name has an error, which is reported there."""


def string_bytes(t: Token) -> bytes:
    """Return the bytes of the quoted part of a token."""
    text = t.value[t.value.index('"') + 1 : -1]
    if "\\" not in text:
        return text.encode()
    out, last = bytearray(), 0
    for m in ESCAPE.finditer(text):
        out += text[last : m.start()].encode()
        if m[1]:
            out.append(int(m[1], 16))
        elif m[2] in KNOWN_ESCAPES:
            out += KNOWN_ESCAPES[m[2]]
        else:
            at = t.start + t.value.index('"') + 1 + m.start()
            raise LeafError(
                at,
                at + 2,
                f'expected an escape of a string, got {m[0]!r}; \\n, \\t, \\" and \\\\ are some',
            )
        last = m.end()
    return bytes(out + text[last:].encode())


def text_of(t: Token) -> str:
    """Return the text of a string, a symbol or a bare word."""
    value = t.value.removeprefix("@")
    if not value.startswith('"'):
        return value
    try:
        return string_bytes(t).decode()
    except UnicodeDecodeError:
        raise LeafError(t.start, t.end, "expected UTF-8 text, got other bytes") from None


def decimal(text: str, t: Token) -> int:
    """Return a decimal or hexadecimal integer; errors are at the token `t`."""
    try:
        return int(text, 0) if "x" in text else int(text)
    except ValueError:  # Python reads no more than 4300 digits
        raise LeafError(t.start, t.end, f"expected at most 4300 digits, got {len(text)}") from None


def located(start: int, end: int, make: Callable[[], T]) -> T:
    """Return the result of `make`; its errors become LeafErrors of the leaf in [start, end)."""
    try:
        return make()
    except (LeafError, SilentError):
        raise
    except NotationError as e:
        at = min(start + e.offset, end - 1)
        raise LeafError(at, at + 1, e.message) from None
    except ParseError as e:
        raise LeafError(start, end, e.msg) from None
    except (VerifyException, ShardirError, ValueError, OverflowError, TypeError) as e:
        raise LeafError(start, end, str(e).split("\n")[0]) from None
    except RecursionError:
        raise LeafError(start, end, "expected less nesting, got more than can be read") from None
