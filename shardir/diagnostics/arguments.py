"""Arguments of Python calls, checked by the annotations of their parameters."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from textwrap import wrap
from types import NoneType, UnionType
from typing import (
    Any,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_overloads,
    get_type_hints,
)

from shardir.diagnostics.errors import ShardirError
from shardir.diagnostics.wording import describe, did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

WORDS = {
    str: "a text", Path: "a path", Mapping: "a dict", bool: "True or False", int: "an integer",
    float: "a number", Collection: "a list", Sequence: "a list", Iterable: "a list or an iterator",
    Callable: "a function",
}  # fmt: skip
"""The words for classes in annotations; other classes are named."""

SEVERAL = (Collection, Sequence, Iterable)
"""Annotations that a text and a dict would fit, but are not meant by."""


def check_arguments(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function, `name` to its callers: an unknown or missing argument, or one of another
    type than its annotation, is a ShardirError with the parameter's sentence in the docstring. Only
    annotations with classes are checked."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            for parameter, value in _bind_arguments(function, name, args, kwargs):
                _check(function, parameter, value)
            return function(*args, **kwargs)

        return call

    return decorate


def show_overloads(function: Callable[..., Any]) -> None:
    """Give a function the signature and the docstring that `help` shows for its overloads: each
    form on a line of its own, and all arguments by name in the signature."""
    forms = [signature(form) for form in get_overloads(function)]
    own = [p for p in signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
    named = {p.name: p for form in forms for p in form.parameters.values()}
    added = [p.replace(kind=p.KEYWORD_ONLY) for p in named.values() if p.name not in {
        q.name for q in own
    }]  # fmt: skip
    shown = signature(function).replace(parameters=[*own, *added])
    vars(function)["__signature__"] = shown
    lines = [
        line for form in forms
        for line in wrap(f"{function.__name__}{_in_short(form)}", 96, initial_indent=" " * 8,
                         subsequent_indent=" " * 12)
    ]  # fmt: skip
    first, rest = (function.__doc__ or "").split("\n", 1)
    function.__doc__ = "\n".join([first, "", *lines, rest])


def _in_short(form: Signature) -> str:
    """The names and defaults of a signature, without types but its result's."""
    bare = [p.replace(annotation=p.empty) for p in form.parameters.values()]
    result = form.return_annotation
    return f"{Signature(bare)} -> {result if isinstance(result, str) else result.__name__}"


def check_call(function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> None:
    """Check the number and the names of a call's arguments. Raises ShardirError."""
    try:
        parameters = signature(function).parameters
    except ValueError:  # of a function in C
        return
    unknown = [key for key in kwargs if key not in parameters]
    if unknown and not any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values()):
        known = [p for p in parameters if p != "self"]
        hint = did_you_mean(str(unknown[0]), known) or f"; it has {', '.join(known) or 'none'}"
        raise ShardirError(f"expected an argument of {name}, got {unknown[0]}{hint}")
    try:
        signature(function).bind(*args, **kwargs)
    except TypeError as e:
        got = [f"{len(args)} in order"] if args else []
        raise ShardirError(
            f"expected the arguments {name}{_form(function)}, got "
            f"{' and '.join([*got, *kwargs]) or 'none'}: {e}"
        ) from None


def _form(function: Callable[..., Any]) -> str:
    """The parameters in order: `(directory, batches)`."""
    parameters = signature(function).parameters.values()
    words = [
        p.name if p.default is p.empty else f"{p.name}=..." for p in parameters
        if p.kind is not Parameter.VAR_KEYWORD and p.name != "self"
    ]  # fmt: skip
    return f"({', '.join(words[:6])}{', ...' if len(words) > 6 else ''})"


def _bind_arguments(
    function: Callable[..., Any], name: str, args: Any, kwargs: Any
) -> Iterator[tuple[str, Any]]:
    """Yield the parameter and the value of each argument."""
    check_call(function, name, args, kwargs)
    parameters = signature(function).parameters
    for key, value in signature(function).bind(*args, **kwargs).arguments.items():
        if parameters[key].kind is Parameter.VAR_POSITIONAL:
            yield from ((key, each) for each in value)
        elif parameters[key].kind is not Parameter.VAR_KEYWORD:
            yield key, value


def _check(function: Callable[..., Any], name: str, value: Any) -> None:
    kinds = _kinds(function).get(name)
    if kinds is None or any(_fits(value, kind) for kind in kinds):
        return
    words = list(dict.fromkeys(WORDS.get(k, f"a {k.__name__}") for k in kinds if k is not NoneType))
    said = _described_argument(function, name)
    raise ShardirError(
        f"expected {' or '.join(words)} as {name}, got {describe(value)}"
        f"{f'; {name}: {said}' if said else ''}"
    )


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) and kind in (int, float):
        return False
    if kind in SEVERAL and isinstance(value, str | Mapping):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """The classes that each parameter may have; none of one that may have any."""
    found = {name: _classes(hint) for name, hint in get_type_hints(function).items()}
    return {name: kinds for name, kinds in found.items() if kinds is not None}


def _classes(hint: Any) -> tuple[Any, ...] | None:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        parts = [_classes(part) for part in get_args(hint)]
        return None if None in parts else tuple(k for part in parts if part for k in part)
    kind = hint if origin is None else origin
    return (kind,) if isinstance(kind, type) and kind not in (Any, object) else None


def _described_argument(function: Callable[..., Any], name: str) -> str:
    """The first sentence that a docstring has on an argument."""
    entry = rf"^    (?:\w+, )*{name}(?:, \w+)*: ((?:.*)(?:\n        .*)*)"
    found = re.search(entry, getdoc(function) or "", re.MULTILINE)
    return re.split(r"\. |\.$", " ".join(found[1].split()))[0] if found else ""
