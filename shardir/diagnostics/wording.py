"""Parts of messages: suggestions and enumerations."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from inspect import cleandoc
from typing import Any

SHOWN = 60
"""The number of characters of a value to show at most."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?`, or nothing if no known word is close. A word of at least three
    letters is also close to the only known word that begins with it."""
    words = list(known)
    longer = [w for w in words if w.startswith(word)] if len(word) > 2 else []
    near = longer if len(longer) == 1 else get_close_matches(word, words, n=1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near else ""


def nearest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the names nearest to a word, at most three, `a, b, c`; nothing where none is close."""
    return ", ".join(get_close_matches(word, list(known), n=3, cutoff=cutoff))


def one_of(names: Iterable[str]) -> str:
    """Return `a`, `a or b`, `a, b or c`; words before punctuation."""
    *most, last = sorted(set(names), key=lambda n: (n[0] == "'", n))
    return f"{', '.join(most)} or {last}" if most else last


def several(names: Sequence[str], shown: int = 3) -> str:
    """Return the first names of several, and the number of the remaining ones."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + rest


def describe(value: Any) -> str:
    """Describe a value in one line: a number or a text itself, other values by their class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | str):
        text = "none" if value is None else repr(value)
        return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def first_paragraph(documented: Any) -> str:
    """Return the first paragraph of a docstring, in one line."""
    return " ".join(cleandoc(documented.__doc__ or "").split("\n\n")[0].split())


def size_text(number: int) -> str:
    """Return bytes with a binary unit: 1.5 MiB."""
    for unit, above in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= above:
            return f"{number / above:.1f} {unit}"
    return f"{number} B"


def seconds_text(seconds: float) -> str:
    """Return seconds with three digits: 2.47 ms."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1 or unit == "us":
            return f"{seconds * factor:.3g} {unit}"
    raise AssertionError(seconds)
