"""Results that follow from the signature of an op, its types and properties, computed once."""

from collections.abc import Callable
from typing import Any, TypeVar

_Value = TypeVar("_Value")


class SignatureMemo(dict[Any, Any]):
    """A memo whose keys are types and properties, compared by identity.

    Identity is cheap and sufficient: equal attributes are mostly the same object. The memo keeps
    them alive, so that no id is reused.
    """

    LIMIT = 100_000
    """The maximum number of entries; the memo is cleared beyond it."""

    def get_or(self, key_parts: tuple[Any, ...], make: Callable[[], _Value]) -> _Value:
        """Return the value of the key, made by `make` the first time."""
        key = tuple(map(id, key_parts))
        found = self.get(key)
        if found is None:
            if len(self) > self.LIMIT:
                self.clear()
            found = self[key] = (key_parts, make())
        return found[1]


rules = SignatureMemo()
"""The factors of each signature."""
verified = SignatureMemo()
"""The signatures that have been verified."""


def forget_signatures() -> None:
    """Clear the memos, after a change of what follows from a signature."""
    rules.clear()
    verified.clear()
