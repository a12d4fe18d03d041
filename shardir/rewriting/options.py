"""Options of passes and targets: the fields of their dataclasses, read from `name{option=value}`.

A field annotated with `Bytes` is a size: it reads `16GB` and `512MiB` besides numbers of bytes. A
float also reads `1` and `1e-3`, a text also numbers.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, get_args, get_origin, get_type_hints

from xdsl.passes import ModulePass
from xdsl.utils.arg_spec import ArgSpec, ArgSpecConvertible, parse_spec
from xdsl.utils.exceptions import ArgSpecParseError

from shardir.compat.xdsl import converted_argument
from shardir.diagnostics import ShardirError, did_you_mean

Bytes = Annotated[int, "bytes"]
"""The type of an option that is a size."""

UNITS = {"B": 1} | {
    f"{prefix}{suffix}": base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}

FLOAT = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?")


class UsageError(ShardirError):
    """A command line, a pipeline or an option that is not valid."""


class PassOptions(ModulePass):
    """A pass whose options may be sizes or any floats, also in xDSL's own tools."""

    @classmethod
    def from_spec(cls, spec: ArgSpec) -> Self:
        if spec.name == cls.name and not spec.parameters and not cls.required_fields():
            return cls()  # xDSL would evaluate the annotations of the class for each instance
        return super().from_spec(with_numbers(cls, spec))


def parse_options(text: str, what: str) -> ArgSpec:
    """Return the name and the options of `name{option=value ...}`.

    Raises:
        UsageError: the text is not of that form; `what` names its source in the message.
    """
    try:
        if "}" in text and not text.endswith("}"):
            raise UsageError(f"{what}: unexpected text after the options of {text!r}")
        _, _, options = re.sub(r'"[^"]*"', "", text).partition("{")
        names = [n.replace("_", "-") for n in re.findall(r"([\w-]+)\s*=", options)]
        if repeated := [n for n in dict.fromkeys(names) if names.count(n) > 1]:
            raise UsageError(
                f"{what}: expected option {repeated[0]} once, got it twice in {text!r}; drop one"
            )
        return parse_spec(text)
    except ArgSpecParseError as e:
        *_, message = str(e).strip().splitlines()
        raise UsageError(f"{what}: {message.strip()} (in {text!r})") from None


@cache
def option_types(cls: type[ArgSpecConvertible]) -> Mapping[str, Any]:
    """Return the options of a pass or target, each with its annotated type."""
    hints = get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    return {f.name: hints[f.name] for f in fields if f.init and f.name != "name"}


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstrings of the fields of a class; empty if its source is not available."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    except (OSError, SyntaxError, TypeError):
        return {}
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(getattr(node, "body", ()))
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def default_text(cls: type[ArgSpecConvertible], option: str) -> str:
    """Return the default of an option, as help and docs show it."""
    (field,) = (f for f in dataclasses.fields(cls) if f.name == option)
    if field.default_factory is not dataclasses.MISSING:
        return str(field.default_factory())
    value = field.default
    if value is dataclasses.MISSING:
        return "required"
    if value in (None, ""):
        return "none"
    if option_types(cls)[option] == Bytes and isinstance(value, int) and value:
        return f"{value >> 20}MiB" if value % 2**20 == 0 else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def with_numbers(cls: type[ArgSpecConvertible], spec: ArgSpec) -> ArgSpec:
    """Return the options with sizes such as `16GB` as bytes, floats such as `1e-3` as floats, and
    texts such as `0.5` as texts."""
    spec = spec.normalize_parameter_names()
    types = option_types(cls)
    readers: dict[Any, Callable[[tuple[Any, ...]], float | str | None]] = {
        Bytes: size_of,
        float: float_of,
        str: text_of,
    }
    numbers = {
        name: (number,)
        for name, value in spec.parameters.items()
        if (read := readers.get(types.get(name))) and (number := read(value)) is not None
    }
    return ArgSpec(spec.name, {**spec.parameters, **numbers})


def size_of(value: tuple[Any, ...]) -> int | None:
    """Return the number of bytes of `("16GB",)`; None if the value is not a size."""
    if len(value) != 1 or not isinstance(value[0], str):
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", value[0])
    if match is None or match[2] not in UNITS:
        return None
    return round(float(match[1]) * UNITS[match[2]])


def bytes_of(text: str) -> int | None:
    """Return the number of bytes of `6GB` or `6000`; None if the text is neither."""
    if (size := size_of((text,))) is not None:
        return size
    return int(text) if text.isdecimal() and int(text) > 1 else None


def text_of(value: tuple[Any, ...]) -> str | None:
    """Return the text of a number; None if the value is not a number."""
    is_number = len(value) == 1 and type(value[0]) in (int, float)
    return str(value[0]) if is_number else None


def float_of(value: tuple[Any, ...]) -> float | None:
    """Return the number of `(1,)` or `("1e-3",)`; None if the value is not a number."""
    if len(value) != 1 or isinstance(value[0], bool) or not FLOAT.fullmatch(str(value[0])):
        return None
    return float(value[0])


def instantiate(kind: str, cls: type[ArgSpecConvertible], spec: ArgSpec) -> Any:
    """Return an instance of a pass or target; `kind` names it in messages.

    Raises:
        UsageError: an option does not exist or has the wrong type.
    """
    spec, types = with_numbers(cls, spec), option_types(cls)
    for name, value in spec.parameters.items():
        if name not in types:
            raise unknown_option(f"{kind} {spec.name}", name, types)
        try:
            converted: Any = converted_argument(value, _plain_type(types[name]))
        except ValueError:
            got = repr(",".join(map(str, value))) if value else "no value"
            raise UsageError(
                f"{kind} {spec.name}: option {option_name(name)}: "
                f"expected {_expected_text(types[name])}, got {got}"
            ) from None
        if types[name] == Bytes and converted < 0:
            raise UsageError(
                f"{kind} {spec.name}: option {option_name(name)}: expected 0 bytes or more, "
                f"got {converted}"
            )
    try:
        return cls.from_spec(spec)
    except ValueError as e:
        raise UsageError(f"{kind} {spec.name}: {e}") from None


def unknown_option(of: str, name: str, known: Mapping[str, Any]) -> UsageError:
    """Return the error for an option that does not exist, with the existing ones."""
    names = [option_name(n) for n in known]
    has = f"; it has {', '.join(names)}" if names else "; it has none"
    hint = did_you_mean(option_name(name), names) or has
    return UsageError(f"{of} has no option {option_name(name)}{hint}")


def option_name(name: str) -> str:
    """Return the name of an option on the command line."""
    return name.replace("_", "-")


def type_text(hint: Any) -> str:
    """Return the type of an option as messages and help show it."""
    if hint == Bytes:
        return "bytes"
    if get_origin(hint) is Literal:
        return " | ".join(get_args(hint))
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _expected_text(hint: Any) -> str:
    return "a size such as 16GB or 512MiB" if hint == Bytes else type_text(hint)


def _plain_type(hint: Any) -> Any:
    return int if hint == Bytes else hint
