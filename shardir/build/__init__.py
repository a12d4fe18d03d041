"""Programs written in Python: docs/guides/building.md has a page on it."""

from shardir.build.function import FunctionBuilder
from shardir.build.module import Module
from shardir.build.ops import Ops
from shardir.build.ops import nn
from shardir.build.values import Value

__all__ = ["FunctionBuilder", "Module", "Ops", "Value", "nn"]
