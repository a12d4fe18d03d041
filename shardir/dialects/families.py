"""Families: a package whose files are found by their names, and what each file defines.

A family of ops is one file of a dialect. The file of the same name in the backend has the text of
its ops, and the one in the tests has their samples. No list names them: a new file is found, and so
is a new class in it.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def modules_of(package: str) -> dict[str, ModuleType]:
    """The modules of a package that is being imported, or has been, by their names."""
    path = sys.modules[package].__path__
    return {m.name: import_module(f"{package}.{m.name}") for m in iter_modules(path)}


def defined_in(module: ModuleType, base: type[T]) -> list[type[T]]:
    """The subclasses of `base` that a module defines, in their order there, but for abstract ones:
    those have no name in the IR."""
    found: list[Any] = [c for c in vars(module).values() if isinstance(c, type)]
    own = [c for c in found if c.__module__ == module.__name__ and "name" in vars(c)]
    return [c for c in own if issubclass(c, base)]
