"""What may stand at a place of a text: values, symbols, aliases, axes, ops; in a comment with a
command, passes with their options, modes, and presets of plans."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from xdsl.ir import Attribute

from shardir import pipelines
from shardir.diagnostics import first_paragraph
from shardir.editor.index import CLOSES, TextIndex
from shardir.passes import PASSES
from shardir.rewriting.options import default_text, option_name, option_types, type_text
from shardir.rewriting.registry import known_pipelines
from shardir.search.plans.preset_entries import known_products
from shardir.syntax.parser import default_parser

WORD = re.compile(r"[%@#!]?[\w$.+-]*\Z", re.ASCII)
CompletionKind = Literal[
    "value", "symbol", "alias", "axis", "op", "attribute", "pass", "option", "mode", "preset"
]

UNFINISHED = r"""[\s=]+(?:"[^"]*|'[^']*|[^"'\s]*)\Z"""
COMMANDS: dict[CompletionKind, re.Pattern[str]] = {
    "pass": re.compile(r"(?:-p|--(?:pass-pipeline|passes))" + UNFINISHED),
    "mode": re.compile("--mode" + UNFINISHED),
    "preset": re.compile("--(?:plan|compare)" + UNFINISHED),
}
"""Of each kind of names: the options of commands whose value they are, and its text so far."""

OPTION = re.compile(r"([\w-]+)\{[^{}]*\Z")


@dataclass(frozen=True)
class Completion:
    """A name that may replace the word before the cursor.

    Attributes:
        detail: in one line, such as a type or a form.
    """

    name: str
    kind: CompletionKind
    detail: str = ""
    documentation: str = ""


def word_before(text: str, offset: int) -> str:
    """Return the part of a name that ends at an offset."""
    line = text.rfind("\n", 0, offset) + 1
    m = WORD.search(text[line:offset])
    return m[0] if m else ""


def completions(index: TextIndex, offset: int) -> list[Completion]:
    """Return what may stand in place of the word that ends at an offset."""
    text = index.text
    before = text[text.rfind("\n", 0, offset) + 1 : offset]
    word = word_before(text, offset)
    if "//" in before:
        return [*_of_command(before)]
    match word[:1]:
        case "%":
            start, _ = index.statement(offset)
            names = index.values_at(offset)
            return [Completion(n, "value") for n, t in names.items() if t.start < start]
        case "@":
            return [Completion(s.name.text, "symbol", s.op.text) for s in index.symbols]
        case "#" | "!":
            aliases = [Completion(name, "alias") for name in index.aliases]
            return aliases + [c for c in _attributes() if c.name[0] == word[0]]
    opened = _opened(text, index.statement(offset)[0], offset)
    if opened and opened[-1] in "{<[":
        mesh = index.mesh_before(offset - len(word))
        return [
            Completion(axis, "axis", f"of {symbol.name.text}") for axis, known in index.axes.items()
            for symbol, _ in known if mesh in (None, symbol.name.text) or "(" in opened
        ]  # fmt: skip
    rest = before[: len(before) - len(word)].rstrip()
    return [*ops()] if not opened and (not rest or rest.endswith("=")) else []


def _opened(text: str, start: int, offset: int) -> list[str]:
    """Return the brackets that are open at an offset, since the start of its statement; a body's
    is none."""
    opened: list[str] = []
    for m in re.finditer(r'->|"[^"\n]*"?|//[^\n]*|[<>(){}\[\]]', text[start:offset]):
        if m[0] in CLOSES:
            opened.append(m[0])
        elif opened and m[0] == CLOSES[opened[-1]]:
            opened.pop()
    if opened and opened[-1] == "{" and re.search(r"\{\s*\n[^\n]*\Z", text[start:offset]):
        return []
    return opened


@cache
def ops() -> tuple[Completion, ...]:
    """All ops with a syntax of their own: the form as detail, and what the class says of it."""
    parser = default_parser()
    known = ((name, parser.ctx.get_optional_op(name)) for name in parser.builder.known)
    return tuple(
        Completion(name, "op", _form(op), first_paragraph(op)) for name, op in known
        if op is not None and "." in name
    )  # fmt: skip


def _form(op: type) -> str:
    get = getattr(op, "get_irdl_definition", None)
    return (get().assembly_format or "").replace("`", "") if get is not None else ""


@cache
def _attributes() -> tuple[Completion, ...]:
    """The attributes and types of the loaded dialects."""
    parser = default_parser()
    kinds: list[tuple[str, type[Attribute]]] = [
        (name, kind) for d in parser.ctx.loaded_dialects for kind in d.attributes
        if "." in (name := kind.name)
    ]  # fmt: skip
    return tuple(Completion(f"#{n}", "attribute", "", first_paragraph(k)) for n, k in kinds)


def _of_command(before: str) -> Iterator[Completion]:
    """Yield the names that an option of a command, in a comment, may have as its value."""
    kind = next((kind for kind, form in COMMANDS.items() if form.search(before)), None)
    if kind in ("pass", "mode") and (m := OPTION.search(before)) is not None:
        yield from _options(m[1])
    elif kind == "pass":
        yield from (
            Completion(name, "pass", "", _about(name)) for name in pipelines.known_passes()
        )  # fmt: skip
        yield from (Completion(n, "pass", text) for n, text in known_pipelines().items())
    elif kind == "mode":
        yield from (Completion(n, "mode", m.does) for n, m in pipelines.known_modes().items())
    elif kind == "preset":
        yield from (Completion(name, "preset") for name in known_products())


def _about(name: str) -> str:
    """Return what a pass of ours does; those of others would all be imported."""
    return first_paragraph(PASSES[name]()) if name in PASSES else ""


def _options(name: str) -> Iterator[Completion]:
    """Yield the options of a pass, or of the passes of a pipeline or a mode."""
    modes, passes = pipelines.known_modes(), pipelines.known_passes()
    text = modes[name].pipeline if name in modes else name
    text = known_pipelines().get(text, text)
    found: dict[str, Completion] = {}
    for part in re.findall(r"[\w-]+(?=[{,]|\Z)", text):
        if part in passes:
            cls = passes[part]()
            for option, kind in option_types(cls).items():
                detail = f"{type_text(kind)} = {default_text(cls, option)}"
                found.setdefault(
                    option_name(option), Completion(option_name(option), "option", detail)
                )
    yield from found.values()
