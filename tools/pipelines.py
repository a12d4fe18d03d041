"""`a,b{x=1}` -> passes: named pipelines expanded, names and options checked."""

import dataclasses
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec, ArgSpecConvertible, _convert_arg_to_type, parse_spec
from xdsl.utils.exceptions import ArgSpecParseError

from shardir.algebra.errors import ShardirError
from shardir.passes import DECIDERS, MODES, PASSES
from shardir.search.drawing import form_of
from shardir.syntax.diagnostics import did_you_mean

SEARCH = "search-strategies"

Factories = Mapping[str, Callable[[], type[ModulePass]]]


class UsageError(ShardirError):
    """The command line does not say something that can be done."""


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that register custom ops, such as `acme.shardir_ops`.

    Raises:
        UsageError: one is not found, or fails.
    """
    for name in names:
        try:
            import_module(name)
        except Exception as e:
            raise UsageError(f"--import {name}: {type(e).__name__}: {e}") from e


def split(text: str, what: str) -> Iterator[str]:
    """The parts of a list, at its commas outside of brackets and strings."""
    depth, quoted, start = 0, False, 0
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c in "({[":
            depth += 1
        elif c in ")}]":
            depth -= 1
            if depth < 0:
                raise UsageError(f"{what}: the '{c}' after {text[start:i]!r} closes nothing")
        elif c == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    if depth or quoted:
        raise UsageError(f"{what}: a bracket or string in {text[start:]!r} is never closed")
    yield text[start:].strip()


def specs(
    text: str, pipelines: Mapping[str, str], inside: tuple[str, ...] = ()
) -> Iterator[ArgSpec]:
    """The passes that a pipeline names, with their options."""
    if not text.strip():
        return
    for part in split(text, "pass pipeline"):
        if not part:
            raise UsageError(f"pass pipeline: a pass is missing between the commas of {text!r}")
        if part.startswith("builtin.module(") and part.endswith(")"):
            yield from specs(part[len("builtin.module(") : -1], pipelines, inside)
            continue
        spec = spec_of(part, "pass pipeline")
        if spec.name in pipelines and spec.name not in inside:
            if spec.parameters:
                raise UsageError(f"{spec.name} is a pipeline and has no options; its passes have")
            yield from specs(pipelines[spec.name], pipelines, (*inside, spec.name))
        else:
            yield spec


def spec_of(text: str, what: str) -> ArgSpec:
    try:
        if "}" in text and not text.endswith("}"):
            raise UsageError(f"{what}: unexpected text after the options of {text!r}")
        _, _, options = re.sub(r'"[^"]*"', "", text).partition("{")
        names = [n.replace("_", "-") for n in re.findall(r"([\w-]+)\s*=", options)]
        if twice := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
            raise UsageError(f"{what}: option {twice[0]} stands twice in {text!r}")
        return parse_spec(text)
    except ArgSpecParseError as e:
        *_, message = str(e).strip().splitlines()
        raise UsageError(f"{what}: {message.strip()} (in {text!r})") from None


def checked(kind: str, cls: type[ArgSpecConvertible], spec: ArgSpec) -> Any:
    """An instance of a pass or target, its options checked one by one."""
    given = spec.normalize_parameter_names().parameters
    hints = get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init and f.name != "name"}
    for name, value in given.items():
        shown = name.replace("_", "-")
        if name not in fields:
            names = [f.replace("_", "-") for f in fields]
            has = f"; it has {', '.join(names)}" if names else "; it has none"
            hint = did_you_mean(shown, names) or has
            raise UsageError(f"{kind} {spec.name} has no option {shown}{hint}")
        try:
            _convert_arg_to_type(value, hints[name])
        except ValueError:
            got = ",".join(map(str, value)) or "no value"
            raise UsageError(
                f"{kind} {spec.name}: option {shown} is {type_text(hints[name])}, not {got!r}"
            ) from None
    try:
        return cls.from_spec(spec)
    except ValueError as e:
        raise UsageError(f"{kind} {spec.name}: {e}") from None


def with_strategies(
    passes: Sequence[ModulePass],
    load: str | Path | None,
    save: str | Path | None,
    graph: str | Path | None = None,
) -> list[ModulePass]:
    """The passes with the last one that decides where values lie replaced by the strategies of a
    file, or followed by writing them to one; and with a search that writes its graph of costs.

    Raises:
        UsageError: there is no such pass, or the graph's file has no ending that is known.
    """
    found = list(passes)
    for option, file in (("load", load), ("save", save)):
        if file is None:
            continue
        at = max((i for i, p in enumerate(found) if p.name in DECIDERS), default=None)
        if at is None:
            raise UsageError(
                f"--{option}-strategies: no pass decides where values lie; run one of "
                f"{', '.join(DECIDERS)}, or choose the mode data, hybrid, semi_auto or auto"
            )
        new: Any = PASSES[f"{option}-strategies"]()
        found[at : at + 1] = [*found[at : at + (option == "save")], new(str(file))]
    if graph is not None:
        at = next((i for i, p in enumerate(found) if p.name == SEARCH), None)
        if at is None:
            raise UsageError(f"--cost-graph: no pass searches; run {SEARCH}, or --mode=auto")
        try:
            form_of(Path(graph))
        except ShardirError as e:
            raise UsageError(f"--cost-graph: {e}") from None
        found[at] = dataclasses.replace(found[at], graph=str(graph))  # type: ignore[call-arg]
    return found


def type_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def pipeline_of(pipeline: str | None, mode: str | None, default: str) -> str:
    """The pipeline that one of the two options names: as given, or the mode's.

    Raises:
        UsageError: both are given, or there is no such mode.
    """
    if mode is None:
        return default if pipeline is None else pipeline
    if pipeline is not None:
        raise UsageError(
            f"the mode {mode} is a pipeline, and {pipeline!r} is another; give one of them"
        )
    name = mode.lower().replace("-", "_").removesuffix("_parallel")
    if name not in MODES:
        hint = did_you_mean(name, MODES) or f"; there are {', '.join(MODES)}"
        raise UsageError(f"there is no mode {mode}{hint}")
    return MODES[name].pipeline


def build(text: str, passes: Factories, pipelines: Mapping[str, str]) -> list[ModulePass]:
    """The passes of a pipeline, ready to run. Raises UsageError."""
    found = []
    for spec in specs(text, pipelines):
        if spec.name not in passes:
            hint = did_you_mean(spec.name, [*pipelines, *passes])
            raise UsageError(f"there is no pass {spec.name}{hint or '; see --list-passes'}")
        found.append(checked("pass", passes[spec.name](), spec))
    return found


def first_sentence(cls: type) -> str:
    doc = textwrap.dedent(cls.__doc__ or "").strip()
    return " ".join(doc.split("\n\n")[0].split())


def describe(passes: Factories, pipelines: Mapping[str, str]) -> str:
    """What `--list-passes` prints: each pass's sentence, and its options with their defaults."""
    lines = []
    for name, make in passes.items():
        cls = make()
        lines += [name, *textwrap.wrap(first_sentence(cls), 92, initial_indent="    ",
                                       subsequent_indent="    ")]  # fmt: skip
        hints = get_type_hints(cls)
        for f in dataclasses.fields(cls):
            if not f.init or f.name == "name":
                continue
            if f.default is not dataclasses.MISSING:
                default = f"{str(f.default).lower() if isinstance(f.default, bool) else f.default}"
            elif f.default_factory is not dataclasses.MISSING:
                default = str(f.default_factory())
            else:
                default = "required"
            shown = f.name.replace("_", "-")
            lines.append(f"      {shown}: {type_text(hints[f.name])} = {default}")
    if pipelines:
        lines += ["", "pipelines:"]
        lines += [f"  {name} = {text}" for name, text in pipelines.items()]
        lines += ["", "modes:"]
        lines += [f"  {name} = {mode.pipeline}: {mode.does}" for name, mode in MODES.items()]
    return "\n".join(lines)
