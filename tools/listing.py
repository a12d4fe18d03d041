"""`--list-passes`: each pass with its options, then the pipelines and the modes."""

import dataclasses
import textwrap

from shardir import pipelines
from shardir.pipelines import Loaders
from shardir.rewriting.options import dashed, option_types, type_text


def describe(passes: Loaders) -> str:
    """Return the list: the first sentence of each pass, and its options with defaults."""
    lines = []
    for name in pipelines.in_order(passes):
        cls = passes[name]()
        lines += [name, *textwrap.wrap(first_sentence(cls), 92, initial_indent="    ",
                                       subsequent_indent="    ")]  # fmt: skip
        types = option_types(cls)
        for f in dataclasses.fields(cls):
            if f.name in types:
                lines.append(f"      {dashed(f.name)}: {type_text(types[f.name])} = {_default(f)}")
    lines += ["", "pipelines:"]
    lines += [f"  {name} = {text}" for name, text in pipelines.PIPELINES.items()]
    lines += ["", "modes:"]
    lines += [f"  {name} = {mode.pipeline}: {mode.does}" for name, mode in pipelines.MODES.items()]
    return "\n".join(lines)


def first_sentence(cls: type) -> str:
    doc = textwrap.dedent(cls.__doc__ or "").strip()
    return " ".join(doc.split("\n\n")[0].split())


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    return "required"
