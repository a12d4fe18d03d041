"""Memos of results that depend on an op's signature only: its types and properties."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from xdsl.ir import Operation

from shardir.compat.xdsl import operands_of, type_of

_Value = TypeVar("_Value")

NONE: Mapping[str, Any] = {}


class Memo(dict[Any, Any]):
    """A memo that `forget_signatures` clears."""

    def __init__(self) -> None:
        super().__init__()
        _memos[id(self)] = self


class SignatureMemo(Memo):
    """A memo whose keys are types and properties, compared by identity.

    Identity is cheap and sufficient: equal attributes are mostly the same object. The memo keeps
    them alive, so that no id is reused.

    Args:
        limit: the maximum number of entries; the memo is cleared beyond it.
    """

    def __init__(self, limit: int = 100_000) -> None:
        super().__init__()
        self.limit = limit

    def get_or(
        self, parts: tuple[Any, ...], props: Mapping[str, Any], make: Callable[[], _Value]
    ) -> _Value:
        """Return the value of the key, made by `make` the first time."""
        key = (*map(id, parts), *props, *map(id, props.values())) if props else (*map(id, parts),)
        try:
            return self[key][-1]
        except KeyError:
            pass
        if len(self) > self.limit:
            self.clear()
        value = make()
        self[key] = parts, tuple(props.values()), value
        return value

    def of_op(
        self, op: Operation, make: Callable[[], _Value], mesh: object = None, *, marks: bool = False
    ) -> _Value:
        """Return the value for an op's kind, types and properties, and for a mesh if given;
        with `marks`, for its attributes too. `make` computes it the first time."""
        props, attributes = op.properties, op.attributes if marks else NONE
        key = (
            type(op), id(mesh), *[id(type_of(v)) for v in operands_of(op)], None,
            *[id(type_of(v)) for v in op.results], *props, *map(id, props.values()),
        )  # fmt: skip
        if attributes:
            key = (*key, None, *attributes, *map(id, attributes.values()))
        entry = self.get(key)
        if entry is None:
            if len(self) > self.limit:
                self.clear()
            types = [type_of(v) for v in (*operands_of(op), *op.results)]
            entry = self[key] = (mesh, types, {**props}, {**attributes}), make()
        return entry[1]

    def of(self, part: Any, make: Callable[[Any], _Value]) -> _Value:
        """Return the value for a single type or attribute; `make` computes it the first time."""
        entry = self.get(id(part))
        if entry is None:
            if len(self) > self.limit:
                self.clear()
            entry = self[id(part)] = part, make(part)
        return entry[1]


_memos: WeakValueDictionary[int, Memo] = WeakValueDictionary()

rules = SignatureMemo()
"""The factors of each signature."""
verified = SignatureMemo()
"""The signatures that have been verified."""


def number_of_signatures() -> int:
    """Return the number of entries of all memos."""
    return sum(len(memo) for memo in list(_memos.values()))


def forget_signatures() -> None:
    """Clear all memos, after a change of the rules that they cache."""
    for memo in list(_memos.values()):
        memo.clear()
