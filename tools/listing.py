"""`--list-passes`: each pass with its options, then the pipelines and the modes."""

import textwrap
from collections.abc import Callable, Iterator

from xdsl.passes import ModulePass
from xdsl.transforms import get_all_passes

from shardir import pipelines
from shardir.diagnostics import ShardirError, first_paragraph
from shardir.pipelines import Loaders
from shardir.rewriting.options import default_text, field_docs, option_name, option_types, type_text
from shardir.rewriting.registry import known_pipelines

WIDTH = 96


def describe(passes: Loaders) -> str:
    """Return the list of passes with their first sentences, options and defaults; only the names of
    xDSL's passes."""
    xdsl_passes = get_all_passes()
    lines: list[str] = []
    for name in pipelines.in_order(passes):
        if name not in xdsl_passes:
            lines += [name, *_entry(passes[name])]
    names = ", ".join(sorted(n for n in passes if n in xdsl_passes))
    lines += ["", "passes of xDSL:", *_wrap(names, 2)]
    lines += ["", "pipelines, each with the options of its passes:"]
    lines += [f"  {name} = {text}" for name, text in known_pipelines().items()]
    lines += ["", "modes:"]
    lines += [
        f"  {name} = {mode.pipeline}: {mode.does}" for name, mode in pipelines.known_modes().items()
    ]
    return "\n".join(lines)


def _entry(load: Callable[[], type[ModulePass]]) -> list[str]:
    """Return the lines of a pass, or the reason why it cannot be loaded."""
    try:
        return [*_describe(load())]
    except ShardirError as e:
        return _wrap(str(e), 4)


def _describe(cls: type[ModulePass]) -> Iterator[str]:
    yield from _wrap(first_paragraph(cls), 4)
    texts = field_docs(cls)
    for option, type in option_types(cls).items():
        yield f"      {option_name(option)}: {type_text(type)} = {default_text(cls, option)}"
        yield from _wrap(texts.get(option, ""), 10)


def _wrap(text: str, indent: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(
        text, WIDTH, initial_indent=blank, subsequent_indent=blank, break_on_hyphens=False
    )
