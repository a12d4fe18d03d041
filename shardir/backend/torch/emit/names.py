"""Names, literals and comments of a program that come from its input.

Input never becomes code: names are rebuilt from ASCII letters, digits and underscores, strings are
literals, comments stay on one line and have printable characters only.
"""

import builtins
import json
import keyword
import re
import textwrap
from collections.abc import Iterable, Sequence

from shardir.algebra.mesh import Axes, sizes_of
from shardir.backend.torch.emit.imports import NAMES

CONSTANT = "NUMBERS_"
"""The prefix of the names of a program's tuples of numbers."""

WIDTH = 100
MAX_NAME = 60
MAX_COMMENT = 600

RESERVED = frozenset({*keyword.kwlist, *keyword.softkwlist, *dir(builtins), *NAMES})
"""The reserved names of programs: imported names, and Python's."""


_OTHER = re.compile(r"[^0-9A-Za-z]+")


def identifier(text: str | None, default: str) -> str:
    """Turn a text into an ASCII identifier of Python."""
    name = _OTHER.sub("_", text or "").strip("_")[:MAX_NAME]
    if not name:
        name = default
    return f"v{name}" if name[0].isdigit() or name.startswith(CONSTANT) else name


class Names:
    """A source of unique names."""

    def __init__(self, taken: Iterable[str] = ()):
        self._taken = {*RESERVED, *taken}
        self._next: dict[str, int] = {}
        """The first suffix that may be free, by name."""

    def new(self, text: str | None, default: str = "v") -> str:
        """Return a free name: `text`, with a number appended where it is taken."""
        wanted = identifier(text, default)
        name, number = wanted, self._next.get(wanted, 1)
        while name in self._taken:
            name, number = f"{wanted}_{number}", number + 1
        self._next[wanted] = number
        self._taken.add(name)
        return name


def literal(text: str) -> str:
    """A string as an ASCII literal in double quotes."""
    # json's escapes are Python's, except pairs of surrogates, which Python would not join.
    return json.dumps(text) if text.isascii() else ascii(text)


def printable(text: str) -> str:
    """The text on one line, with escapes for characters that are not printable."""
    shown = text
    if not text.isprintable():
        shown = "".join(
            c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode()
            for c in text
        )
    return shown if len(shown) <= MAX_COMMENT else shown[: MAX_COMMENT - 3] + "..."


def comment_lines(text: str, indent: int = 0) -> list[str]:
    """The lines of a comment."""
    space, shown = " " * indent, printable(text)
    if shown and shown == shown.rstrip() and len(line := f"{space}# {shown}") <= WIDTH:
        return [line]  # most are short, and wrapping is slow
    return textwrap.wrap(
        shown, WIDTH, initial_indent=f"{space}# ", subsequent_indent=f"{space}#   ",
        break_on_hyphens=False,
    )  # fmt: skip


def docstring(*paragraphs: str) -> str:
    """A module's docstring with these paragraphs."""
    text = "\n\n".join(textwrap.fill(printable(p), WIDTH - 3) for p in paragraphs)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"""{escaped}\n"""'


def join_items(head: str, items: Sequence[str], tail: str, indent: int) -> list[str]:
    """`head` + items with commas + `tail`, in one line or several; in one line if `tail` is empty.
    Otherwise the head ends with an opening bracket."""
    space = " " * indent
    line = f"{space}{head}{', '.join(items)}{tail}"
    if len(line) <= WIDTH or not tail:
        return [line]
    return [f"{space}{head}", *item_lines(items, indent + 4), f"{space}{tail}"]


def call_of_lists(
    head: str, lists: Sequence[Sequence[str]], rest: Sequence[str], indent: int
) -> list[str]:
    """`head` + lists in brackets and further arguments + `)`: in one line, or with each list on a
    new line."""
    space = " " * indent
    parts = [*(f"[{', '.join(items)}]" for items in lists), ", ".join(rest)]
    line = f"{space}{head}{', '.join(parts)})"
    if len(line) <= WIDTH:
        return [line]
    within = [line for part in parts for line in _between_items(f"{part},", indent + 4)]
    return [f"{space}{head}", *within, f"{space})"]


def _between_items(text: str, indent: int) -> list[str]:
    """Wrap a text after commas only."""
    lines = _wrap_text(re.sub("(?<!,) ", "\0", text), indent)
    return [line.replace("\0", " ") for line in lines]


def return_lines(items: Sequence[str]) -> list[str]:
    """Return the lines of a return statement; a text may have several values: `*values`."""
    if len(items) == 1 and items[0].startswith("*"):
        items = [f"{items[0]},"]
    text = f"    return {', '.join(items) or '()'}"
    return [text] if len(text) <= WIDTH else join_items("return (", items, ")", 4)


def wrap_statement(line: str, indent: int) -> list[str]:
    """A statement in one line or in several. The names before `=`, or else the innermost tuple, are
    wrapped."""
    space = " " * indent
    if len(line) + indent <= WIDTH:
        return [space + line]
    if " = " in line:
        names, _, right = line.partition(" = ")
        return join_items("(", names.split(", "), f") = {right}", indent)
    head, _, rest = line.rpartition("((")
    items, _, tail = rest.partition("))")
    return join_items(f"{head}((", items.split(", "), f")){tail}", indent)


_SLOT_CALL = re.compile(r"([^(]*\()(.*=slots\.\w+(?:\[\w+\])?)(\).*)")
"""A call whose last argument is a slot, and the views of its result."""


def assignment_lines(name: str, expression: str, indent: int) -> list[str]:
    """`name = expression` in one line, or in several for a long call that writes into a slot."""
    space = " " * indent
    line = f"{space}{name} = {expression}"
    call = _SLOT_CALL.fullmatch(line)
    if len(line) <= WIDTH or call is None:
        return [line]
    head, arguments, tail = call.groups()
    return [head, *_wrap_text(arguments, indent + 4), f"{space}{tail}"]


def item_lines(items: Sequence[str], indent: int) -> list[str]:
    """Lines of items, each followed by a comma, except a single one, which would become a tuple."""
    return _wrap_text(", ".join(items) + "," * (len(items) > 1), indent)


def _wrap_text(text: str, indent: int) -> list[str]:
    space = " " * indent
    return textwrap.wrap(
        text, WIDTH, initial_indent=space, subsequent_indent=space,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def listed_names(items: list[str], most: int = 3) -> str:
    """Return a list of items in words; of more than `most`, the first and the number of others."""
    first = min(most, 2)
    shown = items if len(items) <= most else [*items[:first], f"{len(items) - first} more"]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def axes_text(axes: Axes) -> str:
    """A tuple of axes for the runtime: names or (name, pre, size), with the sizes of shards if they
    are explicit."""
    items = []
    for name, pre, size in axes:
        items.append(f"({literal(name)}, {pre}, {size})" if size else literal(name))
    text = tuple_text(items)
    sizes = tuple_text(list(map(str, sizes_of(axes))))
    return f"rt.Sized({text}, {sizes})" if sizes_of(axes) else text


def tuple_text(items: Sequence[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
