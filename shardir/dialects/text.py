"""Attributes with their own notation: `#dist.layout<@m, [{dp}, {}]>`.

The algebra parses the text between `<` and `>`, for both parsers of the IR.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any, ClassVar, Generic, Self, TypeVar

from xdsl.ir import Data
from xdsl.parser import AttrParser
from xdsl.printer import Printer
from xdsl.utils.exceptions import ParseError
from xdsl.utils.lexer import Span

from shardir.algebra.notation import NamedOptions, nested_text, options_text, parse_options
from shardir.compat.xdsl import resume_from, token_of
from shardir.diagnostics import NotationError, coded

T = TypeVar("T")


class TextAttr(Data[T], ABC, Generic[T]):
    """A `Data` attribute whose body is text in angle brackets; `str` of the data is the text."""

    @classmethod
    @abstractmethod
    def from_text(cls, text: str) -> T:
        """Parse the data. Raises NotationError."""

    @classmethod
    def to_text(cls, data: T) -> str:
        return str(data)

    @classmethod
    def read(cls, text: str) -> Self:
        """The attribute of the text between `<` and `>`. Raises NotationError."""
        return cls(cls.from_text(text))

    @classmethod
    def parse_parameter(cls, parser: AttrParser) -> T:
        token = token_of(parser)
        source = token.span.input
        parser.parse_punctuation("<")
        start = end = token.span.end
        end = closing_bracket(source.content, start)
        if end < 0:
            parser.raise_error(f"expected a `>` that closes the `<` of #{cls.name}, got none")
        text = source.content[start:end]
        try:
            data = cls.from_text(text)
        except NotationError as e:
            at = min(start + e.offset, end)
            raise ParseError(Span(at, min(at + 1, end), source), e.message) from None
        resume_from(parser, end)
        parser.parse_punctuation(">")
        return data

    def print_parameter(self, printer: Printer) -> None:
        printer.print_string(f"<{self.to_text(self.data)}>")


def closing_bracket(text: str, start: int) -> int:
    """The offset of the `>` that closes a `<` just before `start`; -1 when there is none.

    `->` is an arrow, and text in quotes is a string.
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
    """One of several words: `<sum>`."""

    @classmethod
    @abstractmethod
    def words(cls) -> tuple[str, ...]:
        """The valid words."""

    @classmethod
    def from_text(cls, text: str) -> str:
        word = text.strip()
        if word not in cls.words():
            raise NotationError(f"expected a #{cls.name} of {', '.join(cls.words())}, got {word!r}")
        return word


@cache
def word(kind: type[WordAttr], text: str) -> WordAttr:
    """The attribute of a word, created once."""
    return kind.read(text)


@dataclass(frozen=True)
class OptionSpec:
    """The values of an option: type, default (None: required), and range from `minimum` to
    `maximum`; `ends` says which ends are included: [], (], [) or ()."""

    kind: type
    default: Any = None
    minimum: float = -inf
    maximum: float = inf
    ends: str = "[]"
    nested: Callable[[NamedOptions, str], NamedOptions] | None = None
    """Completes a word with named options, if the option accepts one instead of a value."""

    def check(self, name: str, value: Any) -> None:
        """Raises NotationError when the value is out of range."""
        above, below = self.ends[0] == "(", self.ends[1] == ")"
        low = value > self.minimum if above else value >= self.minimum
        high = value < self.maximum if below else value <= self.maximum
        if not (low and high):
            ends = [f"above {self.minimum:g}" if above else f"at least {self.minimum:g}"]
            ends += [f"below {self.maximum:g}" if below else f"at most {self.maximum:g}"]
            wanted = [e for e, end in zip(ends, (self.minimum, self.maximum), strict=True)
                      if abs(end) != inf]  # fmt: skip
            raise NotationError(
                coded("G10", f"expected {name} to be {' and '.join(wanted)}, got {value}")
            )


Kinds = Mapping[str, Mapping[str, OptionSpec]]


def complete(name: str, kinds: Kinds, options: NamedOptions, text: str) -> NamedOptions:
    """Options with their defaults, in order. Raises NotationError for options not in `kinds`."""
    word, values = options[0], dict(options[1])
    if word not in kinds:
        raise NotationError(f"expected a {name} of {', '.join(kinds)}, got {word!r}")
    wanted = kinds[word]
    for n in values:
        if n not in wanted:
            has = f"one of {', '.join(wanted)}" if wanted else "none"
            raise NotationError(
                f"expected as option of {word} {has}, got {n}", option_offset(n, text)
            )
    out: list[tuple[str, Any]] = []
    for n, option in wanted.items():
        value = values.get(n, option.default)
        if value is None:
            raise NotationError(f"expected {n} = ... in {word}, got none", len(text))
        if option.nested is not None and isinstance(value, tuple):
            out.append((n, option.nested(value, text)))
            continue
        if option.kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, option.kind):
            shown = nested_text(value) if isinstance(value, tuple) else repr(value)
            raise NotationError(
                f"expected {n} to be a {option.kind.__name__}, got {shown}", option_offset(n, text)
            )
        if option.kind is not str:
            try:
                option.check(n, value)
            except NotationError as e:
                raise NotationError(e.message, option_offset(n, text)) from None
        out.append((n, value))
    return word, tuple(out)


def option_offset(name: str, text: str) -> int:
    """The offset of the option in the text."""
    match = re.search(rf"\b{re.escape(name)}\s*=", text)
    return match.start() if match else 0


class OptionsAttr(TextAttr[NamedOptions], ABC):
    """A word of KINDS with its named options."""

    KINDS: ClassVar[Kinds]

    @classmethod
    def from_text(cls, text: str) -> NamedOptions:
        return cls.completed(parse_options(text), text)

    @classmethod
    def completed(cls, options: NamedOptions, text: str) -> NamedOptions:
        """The options with their defaults. Raises NotationError."""
        return complete(cls.name, cls.KINDS, options, text)

    @classmethod
    def to_text(cls, data: NamedOptions) -> str:
        return options_text(data)

    @property
    def kind(self) -> str:
        return self.data[0]

    @property
    def values(self) -> dict[str, Any]:
        return dict(self.data[1])
