"""Lookup of the ops that a module declares by name.

find_symbol(module, FuncOp, "f")         # walks over the ops of the module
with fixed_symbols():                    # while no op is added, removed or renamed
    find_symbol(module, FuncOp, "f")     # looks in a table, made by the first lookup
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from xdsl.dialects.builtin import StringAttr
from xdsl.ir import Operation

from shardir.dialects.signatures import SignatureMemo

OpT = TypeVar("OpT", bound=Operation)
Value = TypeVar("Value")

Declarations = dict[str, list[Operation]]
"""The ops of a module by name; several where a name is declared twice, which is an error."""

_tables: ContextVar[dict[Operation, Declarations] | None] = ContextVar("tables", default=None)
_known: ContextVar[dict[tuple[Operation, str], Any] | None] = ContextVar("known", default=None)

_verified: ContextVar[SignatureMemo | None] = ContextVar("verified", default=None)


@contextmanager
def fixed_symbols() -> Iterator[None]:
    """Context in which no module changes: lookups of symbols use tables."""
    tables, values, verified = _tables.set({}), _known.set({}), _verified.set(SignatureMemo())
    try:
        yield
    finally:
        _tables.reset(tables)
        _known.reset(values)
        _verified.reset(verified)


def verified_signatures() -> SignatureMemo | None:
    """Return the signatures verified inside `fixed_symbols`; None outside."""
    return _verified.get()


def cached_by_symbol(module: Operation, name: str, make: Callable[[], Value]) -> Value:
    """Return the value that `make` computes for a symbol of a module; cached inside
    `fixed_symbols`."""
    values = _known.get()
    if values is None:
        return make()
    if (module, name) not in values:
        values[module, name] = make()
    return values[module, name]


def find_symbol(module: Operation, kind: type[OpT], name: str) -> OpT | None:
    """Return the first op at the top of a module with a kind and a name; None without one."""
    tables = _tables.get()
    if tables is None:
        candidates = (op for op in _ops(module) if _name(op) == name)
    else:
        if module not in tables:
            tables[module] = _declared(module)
        candidates = iter(tables[module].get(name, ()))
    return next((op for op in candidates if isinstance(op, kind)), None)


def _declared(module: Operation) -> Declarations:
    table: Declarations = {}
    for op in _ops(module):
        if (name := _name(op)) is not None:
            table.setdefault(name, []).append(op)
    return table


def _ops(module: Operation) -> Iterator[Operation]:
    """Yield the ops of a module. One that has an error may have several blocks."""
    return (op for block in module.regions[0].blocks for op in block.ops)


def _name(op: Operation) -> str | None:
    name = op.properties.get("sym_name")
    return name.data if isinstance(name, StringAttr) else None
