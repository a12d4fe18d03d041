"""Programs written in Python: docs/guides/building.md has a page on it.

The ops of the dialect of an extension are there too: `from shardir.build import acme`.
"""

from typing import Any

from shardir.build.function import FunctionBuilder
from shardir.build.module import Module
from shardir.build.ops import Ops, nn, ops_of
from shardir.build.values import Value

__all__ = ["FunctionBuilder", "Module", "Ops", "Value", "nn", "ops_of"]


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ops_of(name)
