"""Attributes with a notation of their own: `#dist.layout<@m, [{dp}, {}]>`.

The text between `<` and `>` is read by the algebra's notation, whichever parser of the IR met it.
"""

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar, Generic, Self, TypeVar

from xdsl.ir import Data
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError
from xdsl.utils.lexer import Span

from shardir.algebra.errors import NotationError
from shardir.algebra.notation import Options, options_text, parse_options

T = TypeVar("T")


class TextAttr(Data[T], ABC, Generic[T]):
    """A `Data` attribute whose body is text between angle brackets; `str` of the data is that
    text again."""

    @classmethod
    @abstractmethod
    def from_text(cls, text: str) -> T:
        """What the text means. Raises NotationError."""

    @classmethod
    def to_text(cls, data: T) -> str:
        return str(data)

    @classmethod
    def read(cls, text: str) -> Self:
        """The attribute that the text between `<` and `>` means. Raises NotationError."""
        return cls(cls.from_text(text))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> T:
        token = parser._current_token
        source = token.span.input
        parser.parse_punctuation("<")
        start = end = token.span.end
        end = closing(source.content, start)
        if end < 0:
            parser.raise_error(f"the `<` of #{cls.name} is never closed")
        text = source.content[start:end]
        try:
            data = cls.from_text(text)
        except NotationError as e:
            at = min(start + e.offset, end)
            raise ParseError(Span(at, min(at + 1, end), source), e.message) from None
        parser._resume_from(end)
        parser.parse_punctuation(">")
        return data

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.to_text(self.data)}>")


def closing(text: str, start: int) -> int:
    """Where the `>` stands that closes a `<` just before `start`; -1 when it never does.

    `->` is an arrow, and what stands in quotes is a string.
    """
    depth, quoted, at = 1, False, start
    while at < len(text):
        c = text[at]
        if quoted:
            if c == "\\":
                at += 1
            elif c == '"':
                quoted = False
        elif c == '"':
            quoted = True
        elif c == "-" and text[at + 1 : at + 2] == ">":
            at += 1
        elif c == "<":
            depth += 1
        elif c == ">":
            depth -= 1
            if depth == 0:
                return at
        at += 1
    return -1


class IntsAttr(TextAttr[tuple[int, ...]]):
    """A list of integers: `<1, 0>`."""

    @classmethod
    def from_text(cls, text: str) -> tuple[int, ...]:
        from shardir.algebra.notation import parse_numbers

        return parse_numbers(text)

    @classmethod
    def to_text(cls, data: tuple[int, ...]) -> str:
        return ", ".join(map(str, data))


class WordAttr(TextAttr[str], ABC):
    """One word of a few: `<sum>`."""

    @classmethod
    @abstractmethod
    def words(cls) -> tuple[str, ...]:
        """The words that there are."""

    @classmethod
    def from_text(cls, text: str) -> str:
        word = text.strip()
        if word not in cls.words():
            raise NotationError(f"unknown #{cls.name} {word!r}; there are {', '.join(cls.words())}")
        return word


@cache
def word(kind: type[WordAttr], text: str) -> WordAttr:
    """The attribute for a word, made once."""
    return kind.read(text)


class OptionsAttr(TextAttr[Options], ABC):
    """A word of KINDS with its named values; each value has a type, and a default or is needed."""

    KINDS: ClassVar[dict[str, dict[str, type | float]]]

    @classmethod
    def from_text(cls, text: str) -> Options:
        word, given = parse_options(text)
        if word not in cls.KINDS:
            raise NotationError(f"unknown {cls.name} {word!r}; there are {', '.join(cls.KINDS)}")
        wanted, values = cls.KINDS[word], dict(given)
        for n in values:
            if n not in wanted:
                raise NotationError(
                    f"{word} has no option {n}; it has {', '.join(wanted)}", text.find(n)
                )
        out: list[tuple[str, Any]] = []
        for n, kind in wanted.items():
            if n not in values and isinstance(kind, type):
                raise NotationError(f"{word} needs {n} = ...", len(text))
            value = values.get(n, kind)
            expected = kind if isinstance(kind, type) else float
            if expected is float and isinstance(value, int):
                value = float(value)
            if not isinstance(value, expected):
                raise NotationError(f"{n} is a {expected.__name__}, not {value!r}", text.find(n))
            out.append((n, value))
        return word, tuple(out)

    @classmethod
    def to_text(cls, data: Options) -> str:
        return options_text(data)

    @property
    def kind(self) -> str:
        return self.data[0]

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.data[1])
