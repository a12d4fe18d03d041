"""Attribute aliases, `#name = ...` and `!name = ...`; a use may precede the definition."""

import re
from collections.abc import Callable
from functools import cache

from xdsl.ir import Attribute

from shardir.diagnostics import did_you_mean
from shardir.grammar.machine import Token
from shardir.syntax.lexer import TERMINALS
from shardir.syntax.spelling import LeafError, SilentError

DEFINITION = re.compile(r"^[^\S\n]*([#!][A-Za-z_$][\w$-]*)\s*=[^\S\n]*", re.M | re.ASCII)
USE = re.compile(r"[#!][A-Za-z_$][\w$-]*(?![\w.$<-])", re.ASCII)


@cache
def _attribute() -> re.Pattern[str]:
    """The regex of an attribute, compiled at first use: that takes longer than most parses."""
    return re.compile(TERMINALS["ATTR"], re.ASCII)


class Aliases:
    """The aliases of one text, each read at its first use.

    Args:
        read: parses an attribute, given its text, start and end; raises LeafError.
    """

    def __init__(self, text: str, read: Callable[[str, int, int], Attribute]):
        self.text, self.read = text, read
        self.position: dict[str, int] = {}
        """The offset of each definition's attribute."""
        self.redefined: list[tuple[int, int, str]] = []
        """Start, end and message of each repeated definition."""
        self.errors: dict[str, LeafError] = {}
        """The errors of definitions, which are reported when the definition is parsed."""
        self.used = False
        """Whether an alias was used since the last reset; such an attribute is not cached for other
        texts."""
        self._values: dict[str, Attribute] = {}
        self._failed: set[str] = set()
        self._pending: set[str] = set()
        if "=" in text and ("#" in text or "!" in text):
            for m in DEFINITION.finditer(text):
                if m[1] in self.position:
                    self.redefined.append(
                        (m.start(1), m.end(1), f"expected a new name, got {m[1]}")
                    )
                else:
                    self.position[m[1]] = m.end()

    def used_in(self, text: str) -> list[str]:
        """Return the aliases that occur in the text of an attribute."""
        return [m[0] for m in USE.finditer(text) if m[0] in self.position]

    def value(self, name: str, t: Token) -> Attribute:
        """Return the attribute of an alias that a token uses.

        Raises:
            LeafError: the alias has no definition, or its definition uses it.
            SilentError: the definition has an error, which is reported there.
        """
        self.used = True
        if (attribute := self._values.get(name)) is not None:
            return attribute
        if name in self._failed:
            raise SilentError
        if name not in self.position:
            hint = did_you_mean(name, self.position)
            self._failed.add(name)
            raise LeafError(t.start, t.end, f"expected a defined alias, got {name}{hint}")
        if name in self._pending:
            raise LeafError(t.start, t.end, f"expected a definition without {name} itself")
        m = _attribute().match(self.text, self.position[name])
        if m is None or m.end() == m.start():
            self._failed.add(name)  # a syntax error of the definition
            raise SilentError
        self._pending.add(name)
        try:
            attribute = self._values[name] = self.read(m[0], m.start(), m.end())
        except LeafError as e:
            self._failed.add(name)
            self.errors[name] = e
            raise SilentError from None
        except SilentError:
            self._failed.add(name)
            raise
        finally:
            self._pending.discard(name)
        return attribute
