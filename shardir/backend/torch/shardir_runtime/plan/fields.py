"""Values of JSON with their paths, for messages. This file needs only Python."""

import json
from collections.abc import Collection, Sequence
from typing import Any


class PlanError(Exception):
    """An error in a directory or its plan, for users."""


class Field:
    """A value in plan.json, with its path for messages."""

    def __init__(self, value: Any, path: str):
        self.value, self.path = value, path

    def fail(self, message: str) -> PlanError:
        return PlanError(f"{self.path}: {message}" if self.path else message)

    def get(self, name: str, kind: Any = object, **default: Any) -> "Field":
        """Return a field of this object, or its `default`. Raises PlanError without either."""
        if not isinstance(self.value, dict):
            raise self.fail(f"expected an object, got {short_json(self.value)}")
        path = f"{self.path}.{name}" if self.path else name
        if name not in self.value and not default:
            raise self.fail(f"the field {name!r} is missing")
        return Field(self.value.get(name, default.get("default")), path).of(kind)

    def of(self, kind: Any) -> "Field":
        kinds = kind if isinstance(kind, tuple) else (kind,)
        right = isinstance(self.value, kinds)
        if not right or (isinstance(self.value, bool) and not {bool, object} & {*kinds}):
            raise self.fail(f"expected {_names(kinds)}, got {short_json(self.value)}")
        return self

    def one_of(self, choices: Any) -> str:
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.fail(f"expected one of {', '.join(choices)}, got {short_json(self.value)}")
        return self.value

    def items(self) -> "list[Field]":
        self.of(list)
        return [Field(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)]

    def ints(self, minimum: int) -> tuple[int, ...]:
        for item in self.items():
            if item.of(int).value < minimum:
                raise item.fail(f"expected at least {minimum}, got {item.value}")
        return tuple(self.value)


def several(names: Sequence[str]) -> str:
    """Return the first three names, and the number of further names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def differences(
    needed: Collection[str], known: Collection[str], values: Collection[str],
    wrong: Sequence[str], kind: str, all: str,
) -> str:  # fmt: skip
    """Return what a message expects where values by name do not fit a program; "" where they do.

    Args:
        needed: the names that the program needs.
        known: the names that it takes.
        values: the names of the values.
        wrong: differences of values that it takes, such as shapes.
        kind: the kind of the values: `states`.
        all: all values that it needs: `all states of the program`.
    """
    texts = [*wrong]
    if missing := [name for name in needed if name not in values]:
        texts.append(f"{all}, got none of {several(missing)}")
    if unknown := [name for name in values if name not in known]:
        texts.append(f"{kind} of the program alone, got {several(unknown)} too")
    return "; ".join(texts[:5])


def short_json(value: Any) -> str:
    """Return a value as a short text of JSON."""
    text = json.dumps(value)
    return text if len(text) < 40 else text[:37] + "..."


def _names(kinds: tuple) -> str:
    names: dict[type, str] = {dict: "an object", list: "a list", str: "a text", int: "an integer",
             float: "a number", bool: "a truth value", type(None): "null"}  # fmt: skip
    return " or ".join(names.get(kind, str(kind)) for kind in kinds)
