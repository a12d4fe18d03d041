"""Discovery of families: the modules of a package, and the classes that each defines.

A family of ops is one file of a dialect. The file of the same name in the backend emits its ops,
and the one in the tests has samples. No list names them: new files, and new classes in them, are
found.
"""

import sys
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def modules_of(package: str) -> dict[str, ModuleType]:
    """The modules of a package by name; the package may still be in import."""
    path = sys.modules[package].__path__
    return {m.name: import_module(f"{package}.{m.name}") for m in iter_modules(path)}


def defined_in(module: ModuleType, base: type[T]) -> list[type[T]]:
    """The concrete subclasses of `base` that a module defines, in order of definition. Abstract
    classes have no `name` in the IR."""
    classes: list[Any] = [c for c in vars(module).values() if isinstance(c, type)]
    own = [c for c in classes if c.__module__ == module.__name__ and "name" in vars(c)]
    return [c for c in own if issubclass(c, base)]
