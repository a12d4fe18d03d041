"""The registered passes and pipelines, and the parser of a pipeline's text.

The package of the passes registers both when it is imported, so whoever holds a pass can run a
pipeline by its text: `run_pipeline("lower-plan", ctx, trial)` lowers a trial that is measured.

    train                            the passes of PIPELINES["train"]
    search-mesh{devices=8},auto      a pass with an option, then a pipeline
    auto{memory=16GB}                each pass of `auto` that has the option `memory` gets it
"""

from collections.abc import Callable, Iterator, Mapping

from xdsl.context import Context
from xdsl.dialects.builtin import ModuleOp
from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec

from shardir.diagnostics import did_you_mean
from shardir.dialects.installed import of_registry
from shardir.rewriting.options import (
    UsageError,
    instantiate,
    option_types,
    parse_options,
    unknown_option,
)

Loaders = Mapping[str, Callable[[], type[ModulePass]]]
"""The function that loads each pass, by name."""

PASSES: dict[str, Callable[[], type[ModulePass]]] = {}
"""By name, the function that imports a pass of shardir."""

PIPELINES: dict[str, str] = {}
"""Names for sequences of passes, used like a pass."""


def known_passes() -> Loaders:
    """Return the registered passes, and the passes of installed packages."""
    return of_registry("passes", PASSES)


def known_pipelines() -> Mapping[str, str]:
    """Return the pipelines of shardir, and of installed packages."""
    return of_registry("pipelines", PIPELINES)


def run_pipeline(text: str, ctx: Context, module: ModuleOp) -> None:
    """Run a pipeline on a module."""
    for p in build(text):
        p.apply(ctx, module)


def build(text: str) -> list[ModulePass]:
    """Return the passes of a pipeline, ready to run: of shardir and of installed packages.

    Raises:
        UsageError: the text is malformed, or a pass or an option does not exist.
    """
    passes = known_passes()
    specs = expand(text, passes, known_pipelines())
    return [instantiate("pass", passes[spec.name](), spec) for spec in specs]


def expand(
    text: str, passes: Loaders, pipelines: Mapping[str, str], inside: tuple[str, ...] = ()
) -> Iterator[ArgSpec]:
    """Yield the passes that a pipeline names, with their options. Nested pipelines are expanded;
    within a pipeline (`inside`) its own name is a pass."""
    for text_of_pass in split(text, "pass pipeline") if text.strip() else ():
        if not text_of_pass:
            raise UsageError(f"pass pipeline: a pass is missing between the commas of {text!r}")
        if text_of_pass.startswith("builtin.module(") and text_of_pass.endswith(")"):
            yield from expand(text_of_pass[len("builtin.module(") : -1], passes, pipelines, inside)
            continue
        spec = parse_options(text_of_pass, "pass pipeline").normalize_parameter_names()
        if spec.name in pipelines and spec.name not in inside:
            expanded = expand(pipelines[spec.name], passes, pipelines, (*inside, spec.name))
            yield from _with_options(spec, list(expanded), passes)
        elif spec.name in passes:
            yield spec
        else:
            hint = did_you_mean(spec.name, [*pipelines, *passes])
            raise UsageError(f"there is no pass {spec.name}{hint or '; see --list-passes'}")


def _with_options(pipeline: ArgSpec, specs: list[ArgSpec], passes: Loaders) -> list[ArgSpec]:
    """Return the passes of a pipeline with its options: an option goes to each pass that has it,
    unless the pipeline's text sets it."""
    if not pipeline.parameters:
        return specs
    open_options = [
        {n: t for n, t in option_types(passes[s.name]()).items() if n not in s.parameters}
        for s in specs
    ]
    for name in pipeline.parameters:
        if not any(name in options for options in open_options):
            known = {n: t for options in open_options for n, t in options.items()}
            raise unknown_option(f"pipeline {pipeline.name}", name, known)
    return [
        ArgSpec(s.name, s.parameters | {n: v for n, v in pipeline.parameters.items() if n in open_})
        for s, open_ in zip(specs, open_options, strict=True)
    ]


def split(text: str, what: str) -> Iterator[str]:
    """Yield the parts of a list, split at commas outside of brackets and strings."""
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
        raise UsageError(
            f"{what}: expected a closing bracket or quote, got none in {text[start:]!r}"
        )
    yield text[start:].strip()
